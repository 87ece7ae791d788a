"""Loading: both layouts of experts, shards, ties, dtypes, dummies; what is amiss is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from millpond.errors import Refused
from millpond.models.base import DUMMY, Model, describe, load
from millpond.models.weights import Checkpoint, Dummy, Weights
from millpond.ops.bind import Bound
from tests.support.batches import Bench
from tests.support.oracle import CPU, Tiny, random_ids
from tests.support.tiny_models import edit_config

Tensors = dict[str, torch.Tensor]
MakeTiny = Callable[[str], Tiny]
IDS = random_ids(90, 9)


@pytest.mark.parametrize("kind", ["glm", "qwen_moe"])
def test_fused_and_single_experts_load_alike(
    kind: str, make_tiny: MakeTiny, tmp_path: Path, ops: Bound
) -> None:
    tiny = make_tiny(kind)

    def the_other_way(stored: Tensors) -> Tensors:
        """Body one by one to fused, draft layer fused to one by one."""
        found = dict(stored)
        for name in stored:
            key, _, part = name.rpartition(".experts.")
            if part == "gate_up_proj":
                for expert, value in enumerate(found.pop(name)):
                    gate, up = (half.contiguous() for half in value.chunk(2))
                    found[f"{key}.experts.{expert}.gate_proj.weight"] = gate
                    found[f"{key}.experts.{expert}.up_proj.weight"] = up
            elif part == "down_proj":
                for expert, value in enumerate(found.pop(name)):
                    found[f"{key}.experts.{expert}.down_proj.weight"] = value.contiguous()
            elif part == "0.gate_proj.weight":
                parts = [
                    {
                        p: found.pop(f"{key}.experts.{e}.{p}_proj.weight")
                        for p in ("gate", "up", "down")
                    }
                    for e in range(8)
                ]
                both = [torch.cat((p["gate"], p["up"])) for p in parts]
                found[f"{key}.experts.gate_up_proj"] = torch.stack(both)
                found[f"{key}.experts.down_proj"] = torch.stack([p["down"] for p in parts])
        return found

    model_dir = altered(tiny, tmp_path, the_other_way)
    model = loaded(model_dir, ops)
    assert torch.equal(logits(tiny, model), logits(tiny, tiny.model))
    assert torch.equal(model.draft_layer.mlp.gate_up, tiny.model.draft_layer.mlp.gate_up)  # type: ignore[attr-defined]
    assert torch.equal(model.draft_layer.mlp.down, tiny.model.draft_layer.mlp.down)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["glm", "qwen_dense"])
def test_a_text_only_checkpoint_loads_alike(
    kind: str, make_tiny: MakeTiny, tmp_path: Path, ops: Bound
) -> None:
    tiny = make_tiny(kind)
    model_dir = altered(
        tiny,
        tmp_path,
        lambda stored: {
            name.replace("model.language_model.", "model."): value
            for name, value in stored.items()
            if not name.startswith("model.visual.")
        },
    )
    config = json.loads((model_dir / "config.json").read_text())
    flat = {**config["text_config"], "tie_word_embeddings": config["tie_word_embeddings"]}
    (model_dir / "config.json").write_text(json.dumps(flat))
    assert torch.equal(logits(tiny, loaded(model_dir, ops)), logits(tiny, tiny.model))


def test_shards_with_an_index_load_alike(make_tiny: MakeTiny, tmp_path: Path, ops: Bound) -> None:
    tiny = make_tiny("qwen_dense")
    model_dir = sharded(tiny, tmp_path)
    assert torch.equal(logits(tiny, loaded(model_dir, ops)), logits(tiny, tiny.model))


def test_a_missing_shard_is_named(make_tiny: MakeTiny, tmp_path: Path, ops: Bound) -> None:
    model_dir = sharded(make_tiny("qwen_dense"), tmp_path)
    (model_dir / "part-2.safetensors").unlink()
    with pytest.raises(Refused, match=r"part-2\.safetensors is missing"):
        loaded(model_dir, ops)


def test_an_index_that_names_what_its_file_lacks_is_refused(
    make_tiny: MakeTiny, tmp_path: Path, ops: Bound
) -> None:
    model_dir = sharded(make_tiny("qwen_dense"), tmp_path)
    index = model_dir / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = dict.fromkeys(content["weight_map"], "part-2.safetensors")
    index.write_text(json.dumps(content))
    with pytest.raises(Refused, match=r"tensor \S+ is not in the file"):
        loaded(model_dir, ops)
    index.write_text("[]")
    with pytest.raises(Refused, match="not an index of weights"):
        loaded(model_dir, ops)


def test_a_directory_without_weights_or_with_broken_ones_is_refused(
    make_tiny: MakeTiny, tmp_path: Path, ops: Bound
) -> None:
    shutil.copy(make_tiny("glm").description.model_dir / "config.json", tmp_path)
    with pytest.raises(Refused, match=r"holds no weights: neither model\.safetensors nor"):
        loaded(tmp_path, ops)
    (tmp_path / "model.safetensors").write_bytes(b"not a header")
    with pytest.raises(Refused, match=r"model\.safetensors cannot be read"):
        loaded(tmp_path, ops)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("glm", "model.language_model.embed_tokens.weight"),
        ("glm", "lm_head.weight"),
        ("glm", "model.language_model.layers.0.hc_attn_fn"),
        ("glm", "model.language_model.layers.1.self_attn.k_conv1d.weight"),
        ("glm", "model.language_model.layers.3.self_attn.indexer.k_norm.bias"),
        ("glm", "model.language_model.layers.4.mlp.experts.5.up_proj.weight"),
        ("glm", "model.language_model.layers.4.mlp.gate.e_score_correction_bias"),
        ("glm", "model.language_model.layers.6.shared_head.norm.weight"),
        ("qwen_dense", "model.language_model.layers.0.linear_attn.A_log"),
        ("qwen_dense", "model.language_model.layers.3.self_attn.q_norm.weight"),
        ("qwen_dense", "mtp.layers.0.mlp.down_proj.weight"),
        ("qwen_moe", "model.language_model.layers.2.mlp.shared_expert_gate.weight"),
        ("qwen_moe", "mtp.layers.0.mlp.experts.down_proj"),
    ],
)
def test_a_missing_or_misshapen_tensor_is_named(
    kind: str, name: str, make_tiny: MakeTiny, tmp_path: Path, ops: Bound
) -> None:
    tiny = make_tiny(kind)
    short = name.removeprefix("model.language_model.")
    missing = altered(
        tiny, tmp_path / "a", lambda stored: {n: v for n, v in stored.items() if n != name}
    )
    with pytest.raises(Refused) as refusal:
        loaded(missing, ops)
    assert short in str(refusal.value)
    assert "is missing" in str(refusal.value)

    shape: list[int] = []

    def misshape(stored: Tensors) -> Tensors:
        shape.extend(stored[name].shape)
        return {**stored, name: torch.cat((stored[name], stored[name]))}

    misshapen = altered(tiny, tmp_path / "b", misshape)
    with pytest.raises(Refused) as refusal:
        loaded(misshapen, ops)
    found = [2 * shape[0], *shape[1:]]
    assert f"tensor {name} has shape {found}, expected {shape}" in str(refusal.value)


def test_quantised_tensors_are_refused_by_name(
    make_tiny: MakeTiny, tmp_path: Path, ops: Bound
) -> None:
    tiny = make_tiny("qwen_dense")
    name = "model.language_model.layers.3.self_attn.o_proj.weight"
    float8 = altered(tiny, tmp_path / "a", lambda s: {**s, name: s[name].to(torch.float8_e4m3fn)})
    scaled = altered(tiny, tmp_path / "b", lambda s: {**s, name + "_scale_inv": torch.ones(1, 1)})
    for model_dir in (float8, scaled):
        with pytest.raises(Refused, match=f"tensor {name} is quantised"):
            loaded(model_dir, ops)


def test_a_draft_layer_the_weights_lack_is_left_out(
    make_tiny: MakeTiny, tmp_path: Path, ops: Bound
) -> None:
    """A re-saved checkpoint often loses it while its configuration still names it."""
    for kind, prefix in (("glm", "model.language_model.layers.6."), ("qwen_moe", "mtp.")):
        tiny = make_tiny(kind)

        def without(stored: Tensors, prefix: str = prefix) -> Tensors:
            return {n: v for n, v in stored.items() if not n.startswith(prefix)}

        model_dir = altered(tiny, tmp_path / kind, without)
        assert describe(model_dir).config.num_draft_layers == 0
        model = loaded(model_dir, ops)
        assert model.draft_layer is None  # type: ignore[attr-defined]
        assert torch.equal(logits(tiny, model), logits(tiny, tiny.model))


def test_tensors_nobody_takes_are_logged(
    make_tiny: MakeTiny, tmp_path: Path, ops: Bound, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = make_tiny("qwen_dense")
    loaded(tiny.description.model_dir, ops)
    assert not caplog.records
    loaded(altered(tiny, tmp_path, lambda s: {**s, "model.strange": torch.ones(1)}), ops)
    assert "model.strange" in caplog.text


def test_what_is_stored_in_fp32_stays_so(make_tiny: MakeTiny, tmp_path: Path, ops: Bound) -> None:
    kept = ("A_log", "linear_attn.norm.weight")

    def published_dtypes(stored: Tensors) -> Tensors:
        return {
            n: v if n.endswith(kept) else v.to(torch.bfloat16).contiguous()
            for n, v in stored.items()
        }

    model_dir = altered(make_tiny("qwen_dense"), tmp_path, published_dtypes)
    model = load(describe(model_dir), ops, dtype=torch.bfloat16, device=CPU)
    mixer = model.layers[0].mixer  # type: ignore[attr-defined]
    stored = load_file(model_dir / "model.safetensors")
    key = "model.language_model.layers.0.linear_attn."
    assert torch.equal(mixer.norm, stored[key + "norm.weight"])
    assert mixer.norm.dtype == torch.float32
    assert torch.equal(mixer.core.gate.a_log, stored[key + "A_log"])
    assert mixer.inputs.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["glm", "qwen_dense", "qwen_moe"])
def test_dummy_weights_are_drawn_from_the_seed(kind: str, make_tiny: MakeTiny, ops: Bound) -> None:
    tiny = make_tiny(kind)

    def drawn(seed: int) -> Model:
        return load(
            tiny.description,
            ops,
            dtype=torch.float32,
            device=CPU,
            load_format=DUMMY,
            seed=seed,
        )

    first, again, other = drawn(0), drawn(0), drawn(1)
    out = logits(tiny, first)
    assert out.isfinite().all()
    assert torch.equal(out, logits(tiny, again))
    assert not torch.equal(out, logits(tiny, other))
    assert out.std(0).mean() > 0.1, "the text does not matter"


def test_dummy_weights_need_no_files(make_tiny: MakeTiny, tmp_path: Path, ops: Bound) -> None:
    shutil.copy(make_tiny("glm").description.model_dir / "config.json", tmp_path)
    model = load(describe(tmp_path), ops, dtype=torch.float32, device=CPU, load_format=DUMMY)
    assert model.draft_layer is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["glm", "qwen_dense"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_dummies_are_drawn_where_they_are_needed_and_are_alike_everywhere(
    kind: str, device: str, make_tiny: MakeTiny
) -> None:
    """Mean and spread as on the CPU, whatever the order in which tensors are asked for."""
    description = make_tiny(kind).description
    family, config = description.family, description.config

    def source(where: str) -> Dummy:
        return Dummy(lambda *what: family.draw(config, *what), device=torch.device(where))

    shapes = {
        "layers.0.mlp.up_proj.weight": (512, 256),
        "layers.0.input_layernorm.weight": (4096,),
        "layers.1.linear_attn.norm.weight": (4096,),
        "layers.1.mlp.gate.bias": (4096,),
    }
    there, here, backwards = source(device), source("cpu"), source(device)
    drawn = {name: there.read(name, shape) for name, shape in shapes.items()}
    for name, shape in reversed(shapes.items()):
        value, like = drawn[name], here.read(name, shape)
        assert value.device.type == device
        assert torch.equal(value, backwards.read(name, shape))
        assert value.isfinite().all()
        assert abs(value.mean().item() - like.mean().item()) < 0.02
        assert abs(value.std().item() / like.std().item() - 1) < 0.1


@pytest.mark.parametrize("kind", ["glm", "qwen_dense"])
def test_half_of_the_dummy_heads_keep_their_state(
    kind: str, make_tiny: MakeTiny, ops: Bound, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their log decay lies in [-0.02, 0] at (nearly) every token; the others forget."""
    from millpond.ops.reference import delta

    seen = []
    original = delta.log_decay

    def watched(*args: torch.Tensor) -> torch.Tensor:
        seen.append(original(*args))
        return seen[-1]

    monkeypatch.setattr(delta, "log_decay", watched)
    tiny = make_tiny(kind)
    model = load(tiny.description, ops, dtype=torch.float32, device=CPU, load_format=DUMMY)
    logits(tiny, model)
    assert len(seen) == len(tiny.linear_layers)
    for decay in seen:
        keep, forget = decay[:, ::2], decay[:, 1::2]
        assert ((keep >= -0.02) & (keep <= 0.0)).float().mean() > 0.99
        assert (forget < -0.1).float().mean() > 0.8


def test_taking_counts_the_bytes_on_the_device(make_tiny: MakeTiny, ops: Bound) -> None:
    description = make_tiny("glm").description
    weights = Weights(Checkpoint(description.model_dir), dtype=torch.float32, device=CPU)
    description.family.build(description.config, weights, ops)
    assert weights.taken.num_bytes == description.weight_bytes(torch.float32, ops)


def loaded(model_dir: Path, ops: Bound) -> Model:
    return load(describe(model_dir), ops, dtype=torch.float32, device=CPU)


def logits(tiny: Tiny, model: Model) -> torch.Tensor:
    bench = Bench(model, tiny.description.layout(torch.float32))
    return bench.logits([bench.row(0, 0, IDS, None, 0)])[0]


def altered(tiny: Tiny, model_dir: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy of the model's directory with its tensors changed."""
    model_dir.mkdir(exist_ok=True)
    source = tiny.description.model_dir
    shutil.copy(source / "config.json", model_dir)
    stored = change(load_file(source / "model.safetensors"))
    save_file(stored, model_dir / "model.safetensors", metadata={"format": "pt"})
    return model_dir


def sharded(tiny: Tiny, model_dir: Path) -> Path:
    """The model in two files with an index."""
    source = tiny.description.model_dir
    shutil.copy(source / "config.json", model_dir)
    stored = load_file(source / "model.safetensors")
    where = {name: f"part-{1 + i % 2}.safetensors" for i, name in enumerate(sorted(stored))}
    for file in set(where.values()):
        part = {name: stored[name] for name in stored if where[name] == file}
        save_file(part, model_dir / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": where}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    edit_config(model_dir)
    return model_dir
