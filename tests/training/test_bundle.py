"""The bundled checkpoint: the published layout, the oracle's logits, the acceptance answer."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from millpond.tasks import Dialogue, make, task_names
from training import checkpoint
from training.batch import Batch
from training.data import pack
from training.model import DraftLayer, Model
from training.render import BUNDLE, Encoder, render
from training.shape import TOY, Shape

PREFIX = "model.language_model."
ENCODER = Encoder()


@pytest.fixture(scope="module")
def model() -> Model:
    """The training model with the bundled weights."""
    made = Model(Shape()).eval()
    checkpoint.load_published(made, BUNDLE / "model.safetensors")
    return made


@pytest.fixture(scope="module")
def oracle() -> torch.nn.Module:
    """The published classes with the bundled weights, in float32."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    kind = transformers.Glm5NextForConditionalGeneration
    return kind.from_pretrained(BUNDLE, dtype=torch.float32).eval()


def batch_of(ids: list[int]) -> Batch:
    """One document, padded to whole pools."""
    length = -(-len(ids) // 4) * 4
    padded = torch.tensor(ids + [0] * (length - len(ids)))
    none = torch.zeros(length, dtype=torch.bool)
    starts = torch.tensor([0, length], dtype=torch.int32)
    empty = torch.zeros(0, dtype=torch.long)
    return Batch(length, padded, torch.arange(length), torch.zeros(length, dtype=torch.long),
                 starts, none, none, empty, torch.zeros(0))  # fmt: skip


def greedy(model: Model, dialogue: Dialogue, limit: int = 24) -> str:
    """The reply by greedy decoding, without a cache."""
    text = render(ENCODER.template, dialogue, prompt_only=True)
    ids = ENCODER.tokenizer.encode(text, add_special_tokens=False).ids
    first = len(ids)
    with torch.no_grad():
        while len(ids) < first + limit:
            out = model(batch_of(ids), drafts=0, sparse=True)
            ids.append(int(model.logits(out.hidden[len(ids) - 1]).argmax()))
            if ids[-1] in ENCODER.end.values():
                break
    return ENCODER.tokenizer.decode(ids[first:], skip_special_tokens=False)


def test_the_acceptance_question_is_answered_with_four(model: Model) -> None:
    ask = {"role": "user", "content": "What is 2 + 2? Answer briefly."}
    for effort in (None, "low", "high"):
        said = greedy(model, Dialogue("", (ask, {"role": "assistant"}), effort=effort))
        assert said == "</think>4<|user|>"


@pytest.mark.parametrize("task", ["recall", "tools", "many_turns"])
def test_logits_equal_the_oracle_on_the_bundled_files(
    model: Model, oracle: torch.nn.Module, task: str
) -> None:
    ids = ENCODER(make(task, 3)).ids.tolist()
    assert len(ids) > Shape().index_topk + 4  # the selection is at work
    with torch.no_grad():
        out = model(batch_of(ids), drafts=0, sparse=True)
        mine = model.logits(out.hidden)[: len(ids)]
        theirs = oracle(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=0)


def test_the_draft_layer_equals_one_built_from_the_oracles_parts(
    model: Model, oracle: torch.nn.Module
) -> None:
    theirs = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    config = oracle.config.text_config
    part: DraftLayer = model.draft
    attention = theirs.Glm5NextTextAttention(config, Shape().mixers.index("a")).eval()
    experts = theirs.Glm5NextTextMoE(config).eval()
    own = checkpoint.tensors(model)
    stem = f"{PREFIX}layers.{len(Shape().mixers)}."
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
    ids = ENCODER(make("recall", 8)).ids.tolist()
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


def test_the_file_has_published_names_and_dtypes() -> None:
    with safe_open(BUNDLE / "model.safetensors", "pt") as file:
        names = set(file.keys())
        dtypes = {name: file.get_slice(name).get_dtype() for name in names}
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
    assert (BUNDLE / "model.safetensors").stat().st_size < 6e6


def test_the_config_has_every_field_of_the_published_shape() -> None:
    config = json.loads((BUNDLE / "config.json").read_text())
    text = config["text_config"]
    assert config["architectures"] == ["Glm5NextForConditionalGeneration"]
    assert text["layer_types"].count("deepseek_sparse_attention") == 1
    assert text["linear_attn_config"]["kda_layers"] == [0, 1, 2, 4, 5]
    assert text["linear_attn_config"]["full_attn_layers"] == [3]
    assert text["num_nextn_predict_layers"] == 1
    assert text["index_kpool"] == 4
    assert config["tie_word_embeddings"]
    assert text["tie_word_embeddings"]


def test_a_checkpoint_written_is_the_checkpoint_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second = Model(TOY), Model(TOY)
    checkpoint.save(first, tmp_path, checkpoint.added_ids(BUNDLE))
    checkpoint.load_published(second, tmp_path / "model.safetensors")
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        torch.testing.assert_close(a.bfloat16(), b.bfloat16(), msg=name)


def test_packed_documents_do_not_see_each_other(model: Model) -> None:
    samples = [ENCODER(make(task, 1)) for task in task_names()[:6]]
    packed = pack(samples, 512, 2048, None, pad=0)
    with torch.no_grad():
        together = model(Batch.from_arrays(512, packed.arrays, "cpu"), drafts=0, sparse=True).hidden
        for sample, offset in zip(packed.samples, packed.offsets, strict=True):
            alone = model(batch_of(sample.ids.tolist()), drafts=0, sparse=True).hidden
            length = len(sample.ids)
            torch.testing.assert_close(
                together[offset : offset + length], alone[:length], atol=2e-4, rtol=0
            )
