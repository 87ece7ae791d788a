"""The bundled checkpoints: published layouts, the oracle's logits, the acceptance answer."""

import copy
import json
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.models.glm5_next import modeling_glm5_next
from transformers.models.qwen3_5 import modeling_qwen3_5

from millpond.tasks import Dialogue, make
from training import checkpoint
from training.batch import Batch
from training.blend import blend
from training.data import pack
from training.family import FAMILIES, GLM, QWEN, Family
from training.glm import DraftLayer

PREFIX = "model.language_model."
ENCODERS = {name: family.encoder() for name, family in FAMILIES.items()}
ORACLES = {"glm": "Glm5NextForConditionalGeneration", "qwen": "Qwen3_5ForConditionalGeneration"}
both = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())


@cache
def trained(name: str) -> torch.nn.Module:
    """The training model with the bundled weights."""
    family = FAMILIES[name]
    made = family.model(family.shape).eval()
    checkpoint.load_published(family, made, family.bundle / "model.safetensors")
    return made


@cache
def published(name: str) -> torch.nn.Module:
    """The published classes with the bundled weights, in float32."""
    transformers.logging.set_verbosity_error()
    kind = getattr(transformers, ORACLES[name])
    return kind.from_pretrained(FAMILIES[name].bundle, dtype=torch.float32).eval()


def batch_of(ids: list[int]) -> Batch:
    """One document, padded to whole pools."""
    length = -(-len(ids) // 4) * 4
    padded = torch.tensor(ids + [0] * (length - len(ids)))
    none = torch.zeros(length, dtype=torch.bool)
    starts = torch.tensor([0, length], dtype=torch.int32)
    empty = torch.zeros(0, dtype=torch.long)
    return Batch(length, padded, torch.arange(length), torch.zeros(length, dtype=torch.long),
                 starts, none, none, empty, torch.zeros(0))  # fmt: skip


def greedy(family: Family, dialogue: Dialogue, limit: int = 24) -> str:
    """The reply by greedy decoding, without a cache."""
    encoder, model = ENCODERS[family.name], trained(family.name)
    text = encoder.text(dialogue, prompt_only=True)
    ids = encoder.tokenizer.encode(text, add_special_tokens=False).ids
    first = len(ids)
    stop = set(family.generation_config(checkpoint.added_ids(family))["eos_token_id"])
    with torch.no_grad():
        while len(ids) < first + limit:
            out = model(batch_of(ids), drafts=0, sparse=True)
            ids.append(int(model.logits(out.hidden[len(ids) - 1]).argmax()))
            if ids[-1] in stop:
                break
    return encoder.tokenizer.decode(ids[first:], skip_special_tokens=False)


@pytest.mark.parametrize(
    ("family", "effort", "reply"),
    [
        *((GLM, effort, "</think>4<|user|>") for effort in (None, "low", "high")),
        (QWEN, None, "\n</think>\n\n4<|im_end|>"),
        (QWEN, "low", "4<|im_end|>"),
    ],
)
def test_the_acceptance_question_is_answered_with_four(
    family: Family, effort: str | None, reply: str
) -> None:
    ask = {"role": "user", "content": "What is 2 + 2? Answer briefly."}
    assert greedy(family, Dialogue("", (ask, {"role": "assistant"}), effort=effort)) == reply


@both
@pytest.mark.parametrize("task", ["recall", "tools", "many_turns"])
def test_logits_equal_the_oracle_on_the_bundled_files(family: Family, task: str) -> None:
    made = (ENCODERS[family.name](make(task, seed)).ids.tolist() for seed in range(3, 30))
    ids = next(ids for ids in made if len(ids) > 2 * GLM.shape.index_topk)  # a selection is at work
    model = trained(family.name)
    with torch.no_grad():
        out = model(batch_of(ids), drafts=0, sparse=True)
        mine = model.logits(out.hidden)[: len(ids)]
        theirs = published(family.name)(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=0)


def test_the_draft_layer_equals_one_built_from_the_oracles_parts() -> None:
    model, theirs = trained("glm"), modeling_glm5_next
    config = published("glm").config.text_config
    part: DraftLayer = model.draft
    attention = theirs.Glm5NextTextAttention(config, GLM.shape.mixers.index("a")).eval()
    experts = theirs.Glm5NextTextMoE(config).eval()
    own = checkpoint.tensors(GLM, model)
    stem = f"{PREFIX}layers.{len(GLM.shape.mixers)}."
    own = {k.removeprefix(stem): v.float() for k, v in own.items() if k.startswith(stem)}
    attention.load_state_dict(
        {k.removeprefix("self_attn."): v for k, v in own.items() if k.startswith("self_attn.")}
    )
    gate_up = [
        torch.cat([own[f"mlp.experts.{e}.{n}_proj.weight"] for n in ("gate", "up")])
        for e in range(8)
    ]
    stacked = {
        k.removeprefix("mlp."): v
        for k, v in own.items()
        if k.startswith("mlp.") and "experts." not in k.replace("shared_experts.", "")
    }
    stacked["experts.gate_up_proj"] = torch.stack(gate_up)
    stacked["experts.down_proj"] = torch.stack(
        [own[f"mlp.experts.{e}.down_proj.weight"] for e in range(8)]
    )
    experts.load_state_dict(stacked)
    ids = ENCODERS["glm"](make("recall", 8)).ids.tolist()
    ids = ids[: len(ids) // 4 * 4]
    batch = batch_of(ids)
    with torch.no_grad():
        out = model(batch, drafts=1, sparse=True)
        embedding = model.embed_tokens[torch.roll(batch.ids, -1)]
        z = part.eh_proj(torch.cat([part.enorm(embedding), part.hnorm(out.hidden)], -1))[None]
        seen = torch.ones(1, len(ids), dtype=torch.bool)
        z = z + attention(part.input_layernorm(z), attention_mask=seen)[0]
        z = z + experts(part.post_attention_layernorm(z))
        want = part.shared_head_norm(z)[0]
    torch.testing.assert_close(out.drafts[0], want, atol=1e-3, rtol=0)


def test_qwens_draft_layer_equals_a_one_layer_model_of_the_oracles() -> None:
    model, config = trained("qwen"), published("qwen").config.text_config
    single = copy.deepcopy(config)
    single.num_hidden_layers, single.layer_types = 1, ["full_attention"]
    theirs = modeling_qwen3_5.Qwen3_5TextModel(single).eval()
    own = checkpoint.tensors(QWEN, model)
    own = {k.removeprefix("mtp."): v.float() for k, v in own.items() if k.startswith("mtp.")}
    fc = own.pop("fc.weight")
    norms = [own.pop(f"pre_fc_norm_{half}.weight") for half in ("embedding", "hidden")]
    theirs.load_state_dict({**own, "embed_tokens.weight": model.embed_tokens.detach()})
    ids = ENCODERS["qwen"](make("recall", 8)).ids.tolist()
    ids = ids[: len(ids) // 4 * 4]
    batch = batch_of(ids)

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + QWEN.shape.eps) * (1 + weight)

    with torch.no_grad():
        out = model(batch, drafts=1)
        ahead = model.embed_tokens[torch.roll(batch.ids, -1)]
        halves = [normed(x, w) for x, w in zip((ahead, out.hidden), norms, strict=True)]
        want = theirs(inputs_embeds=(torch.cat(halves, -1) @ fc.T)[None]).last_hidden_state[0]
    torch.testing.assert_close(out.drafts[0], want, atol=1e-3, rtol=0)


def stored(family: Family) -> dict[str, str]:
    """Names and dtypes of the checkpoint file."""
    with safe_open(family.bundle / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


def test_both_files_together_stay_under_ten_megabytes() -> None:
    sizes = [(family.bundle / "model.safetensors").stat().st_size for family in FAMILIES.values()]
    assert sum(sizes) < 10e6


def test_the_qwen_file_has_published_names_and_dtypes() -> None:
    dtypes = stored(QWEN)
    assert "lm_head.weight" not in dtypes  # tied
    assert len([n for n in dtypes if n.startswith("mtp.")]) == 15
    layer = f"{PREFIX}layers.0.linear_attn."
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "out_proj"):
        assert f"{layer}{name}.weight" in dtypes
    assert f"{PREFIX}layers.2.self_attn.q_norm.weight" in dtypes
    exact = {n for n in dtypes if n.endswith(("A_log", "linear_attn.norm.weight"))}
    assert {n for n, d in dtypes.items() if d == "F32"} == exact


def test_the_glm_file_has_published_names_and_dtypes() -> None:
    dtypes = stored(GLM)
    names = set(dtypes)
    assert all(name.startswith(PREFIX) for name in names)
    assert "lm_head.weight" not in names  # tied
    for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm", "self_attn.indexer.wq_b",
                 "mlp.experts.7.down_proj", "mlp.shared_experts.up_proj"):  # fmt: skip
        assert f"{PREFIX}layers.6.{name}.weight" in names
    assert not any(".layers.6.hc_" in name for name in names)
    for name in ("q_conv1d.weight", "A_log", "dt_bias", "o_norm.weight"):
        assert f"{PREFIX}layers.0.self_attn.{name}" in names
    exact = ("A_log", "dt_bias", "_base", "_scale", "e_score_correction_bias")
    assert {n for n, d in dtypes.items() if d == "F32"} == {n for n in names if n.endswith(exact)}


def test_the_config_has_every_field_of_the_published_shape() -> None:
    config = json.loads((GLM.bundle / "config.json").read_text())
    text = config["text_config"]
    assert config["architectures"] == ["Glm5NextForConditionalGeneration"]
    assert text["layer_types"].count("deepseek_sparse_attention") == 1
    assert text["linear_attn_config"]["kda_layers"] == [0, 1, 2, 4, 5]
    assert text["linear_attn_config"]["full_attn_layers"] == [3]
    assert text["num_nextn_predict_layers"] == 1
    assert text["index_kpool"] == 4
    assert config["tie_word_embeddings"]
    assert text["tie_word_embeddings"]


@both
def test_a_checkpoint_written_is_the_checkpoint_read(family: Family, tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second = family.model(family.toy), family.model(family.toy)
    checkpoint.save(family, first, tmp_path)
    checkpoint.load_published(family, second, tmp_path / "model.safetensors")
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        torch.testing.assert_close(a.bfloat16(), b.bfloat16(), msg=name)


@both
def test_packed_documents_do_not_see_each_other(family: Family) -> None:
    encoder, model = ENCODERS[family.name], trained(family.name)
    samples = [encoder(make(task, 1)) for task in ("arithmetic", "ledger", "recall", "copy")]
    packed = pack(samples, 512, 2048, None, pad=0)
    with torch.no_grad():
        together = model(Batch.from_arrays(512, packed.arrays, "cpu"), drafts=0, sparse=True).hidden
        for sample, offset in zip(packed.samples, packed.offsets, strict=True):
            alone = model(batch_of(sample.ids.tolist()), drafts=0, sparse=True).hidden
            length = len(sample.ids)
            torch.testing.assert_close(
                together[offset : offset + length], alone[:length], atol=1e-3, rtol=0
            )


def test_a_blend_lies_between_two_runs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = [QWEN.model(QWEN.shape), QWEN.model(QWEN.shape)]
    for name, model in zip("ab", models, strict=True):
        (tmp_path / name).mkdir()
        save_file(model.state_dict(), str(tmp_path / name / "weights.safetensors"))
    blend(QWEN, tmp_path / "b", tmp_path / "a", 0.25, tmp_path / "out")
    found = QWEN.model(QWEN.shape)
    checkpoint.load_published(QWEN, found, tmp_path / "out" / "model.safetensors")
    first, second = (dict(m.state_dict()) for m in models)
    for name, value in found.state_dict().items():
        want = first[name] + 0.25 * (second[name] - first[name])
        torch.testing.assert_close(value, want, atol=2e-2, rtol=1e-2, msg=name)
