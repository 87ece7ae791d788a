"""Configurations: families are found, and what is missing or not supported is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from millpond.errors import Refused
from millpond.models.base import describe, families
from tests.support import published

GLM = published.glm_flash()
QWEN = published.qwen(published.QWEN_SIZES[0])
QWEN_MOE = published.qwen(published.QWEN_SIZES[5])


def test_families_are_found_by_their_model_types() -> None:
    assert set(families()) == {
        "glm5_next",
        "glm5_next_text",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
    }


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(Refused, match=r"'llama'.*LlamaForCausalLM.*supported: glm5_next"):
        describe(written(tmp_path, config))


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"config\.json does not exist"):
        describe(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Refused, match="is not JSON"):
        describe(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(Refused, match="not a JSON object"):
        describe(tmp_path)


@pytest.mark.parametrize("place", ["top", "text"])
def test_a_quantised_model_is_refused_by_its_method(place: str, tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}
    config = GLM | quantised if place == "top" else changed(GLM, **quantised)
    with pytest.raises(Refused, match=r"quantisation 'fp8' is not supported"):
        describe(written(tmp_path, config))


@pytest.mark.parametrize("config", [GLM, QWEN, QWEN_MOE], ids=["glm", "qwen", "qwen_moe"])
def test_every_required_field_is_named_when_it_is_missing(
    config: dict[str, Any], tmp_path: Path
) -> None:
    silent = {  # not required: others say the same, or there is a default
        "model_type",
        "num_nextn_predict_layers",
        "mtp_num_hidden_layers",
        "full_attention_interval",
        "linear_attn_config",
        "norm_topk_prob",
        "eos_token_id",
        "pad_token_id",
        "layer_types",
        "rope_parameters",
    }
    checked = 0
    for name, value in config["text_config"].items():
        if name in silent or not isinstance(value, int | float | list) or isinstance(value, bool):
            continue
        try:
            describe(written(tmp_path, changed(config, **{name: None})))
        except Refused as refusal:
            assert f"no field '{name}'" in str(refusal)  # noqa: PT017
            checked += 1
    assert checked >= 14


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (GLM, {"index_kpool": None}, "no field 'index_kpool'"),
        (GLM, {"index_kpool": 7}, "index_kpool is 7"),
        (GLM, {"layer_types": ["mamba"] * 45}, "layer_types is 'mamba'"),
        (GLM, {"layer_types": ["linear_attention"] * 44}, "list of 45"),
        (GLM, {"hidden_size": "4096"}, "hidden_size is '4096'"),
        (GLM, {"hidden_size": 0}, "hidden_size is 0"),
        (GLM, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (GLM, {"qk_rope_head_dim": 64}, "qk_rope_head_dim is 64"),
        (GLM, {"n_group": 8}, "n_group is 8"),
        (GLM, {"indexer_types": ["shared"] * 45}, "indexer_types is 'shared'"),
        (GLM, {"index_kpool_always_select_tail": False}, "always_select_tail is False"),
        (GLM, {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2"),
        (GLM, {"mhc": False}, "mhc is False"),
        (QWEN, {"attention_bias": True}, "attention_bias is True"),
        (QWEN, {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16'"),
        (QWEN, {"attn_output_gate": False}, "attn_output_gate is False"),
        (QWEN, {"linear_num_value_heads": 20}, "linear_num_value_heads is 20"),
        (QWEN, {"rope_parameters": None}, "no field 'rope_parameters'"),
        (QWEN, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, "'yarn'"),
        (QWEN, {"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        (QWEN, {"mtp_num_hidden_layers": 3}, "mtp_num_hidden_layers is 3"),
        (QWEN_MOE, {"num_experts": None}, "no field 'num_experts'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    config: dict[str, Any], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(Refused) as refusal:
        describe(written(tmp_path, changed(config, **change)))
    assert message in str(refusal.value)
    assert "config.json" in str(refusal.value)


def test_a_gate_bound_outside_what_kernels_can_exponentiate_is_refused(tmp_path: Path) -> None:
    linear = GLM["text_config"]["linear_attn_config"] | {"gate_lower_bound": -6.0}
    with pytest.raises(Refused, match="lower bound is -6"):
        describe(written(tmp_path, changed(GLM, linear_attn_config=linear)))


def test_linear_attention_is_read_from_the_fields_of_a_re_saved_model(tmp_path: Path) -> None:
    flat = dict(linear_num_heads=64, linear_head_dim=128, linear_conv_kernel_dim=4)
    config = changed(GLM, linear_attn_config=None, **flat)
    assert describe(written(tmp_path, config)).config == describe(written(tmp_path, GLM)).config
    config["text_config"]["linear_lower_bound"] = -2.0
    assert describe(written(tmp_path, config)).config.lower_bound == -2.0  # type: ignore[attr-defined]
    config["text_config"]["linear_lower_bound"] = None  # said to be none: a gate without bound
    assert describe(written(tmp_path, config)).config.lower_bound is None  # type: ignore[attr-defined]


def test_flat_text_configurations_are_read(tmp_path: Path) -> None:
    for config in (GLM, QWEN, QWEN_MOE):
        wrapped = describe(written(tmp_path, config)).config
        flat = {**config["text_config"], "tie_word_embeddings": config["tie_word_embeddings"]}
        assert describe(written(tmp_path, flat)).config == wrapped


def test_layer_types_follow_the_interval_where_they_are_not_listed(tmp_path: Path) -> None:
    listed = describe(written(tmp_path, QWEN)).config
    assert describe(written(tmp_path, changed(QWEN, layer_types=None))).config == listed


def test_the_generation_configuration_names_the_ends_of_a_text_first(tmp_path: Path) -> None:
    assert describe(written(tmp_path, QWEN)).eos_token_ids == (248044,)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [248046, 248044]}))
    assert describe(tmp_path).eos_token_ids == (248046, 248044)
    generation.write_text(json.dumps({"temperature": 1.0}))
    assert describe(tmp_path).eos_token_ids == (248044,)
    generation.write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(Refused, match=r"generation_config\.json: eos_token_id"):
        describe(tmp_path)


def test_the_layout_needs_no_draft_layer(tmp_path: Path) -> None:
    config = describe(written(tmp_path, GLM)).config
    with_draft, without = (c.layout(torch.bfloat16) for c in (config, config.without_draft()))
    assert with_draft.slot == without.slot
    assert {t.layer for t in with_draft.page.tensors} - {t.layer for t in without.page.tensors} == {
        45
    }


def changed(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The configuration with fields of its text part set, or removed where None."""
    text = {**config["text_config"], **fields}
    text = {name: value for name, value in text.items() if value is not None}
    return {**config, "text_config": text}


def written(model_dir: Path, config: dict[str, Any]) -> Path:
    (model_dir / "config.json").write_text(json.dumps(config))
    return model_dir
