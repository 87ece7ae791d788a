"""What the draft layer's pages hold after the target's own forward, against transformers.

Entry i is made from the final hidden of token i - 1 (zero before the first) and the embedding of
token i; GLM keeps latents and pooled keys of it, Qwen a key rotated by i and a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.batches import Bench
from tests.support.oracle import Tiny, random_ids

TOLERANCE = 1e-4


def test_glm_draft_entries_equal_the_oracle(make_tiny: Callable[[str], Tiny]) -> None:
    tiny, ids = make_tiny("glm"), random_ids(201, 8)
    latent, pooled, tail = glm_entries(tiny, ids)
    for bench in filled_in_every_way(tiny, ids):
        close(bench.entries(6, "latent", 0, 201), latent)
        close(bench.entries(6, "pooled", 0, 200), pooled)
        seat = bench.arenas.seats.view(6, "tail")[0]
        close(seat[200 % 4], tail)


@pytest.mark.parametrize("kind", ["qwen_dense", "qwen_moe"])
def test_qwen_draft_entries_equal_the_oracle(kind: str, make_tiny: Callable[[str], Tiny]) -> None:
    tiny, ids = make_tiny(kind), random_ids(201, 8)
    key, value = qwen_entries(tiny, ids)
    for bench in filled_in_every_way(tiny, ids):
        close(bench.entries(4, "key", 0, 201), key)
        close(bench.entries(4, "value", 0, 201), value)


def test_the_first_entry_after_a_hit_comes_from_the_slot(tiny: Tiny, prompt: list[int]) -> None:
    """No forward is repeated for it: the boundary hidden of the slot is the hidden it needs."""
    layer, name = (6, "latent") if tiny.kind.startswith("glm") else (4, "value")
    bench = tiny.bench()
    bench.hidden([bench.row(0, 0, prompt, None, 0, [(128, 1)])])
    expected = bench.entries(layer, name, 0, 200)
    bench.share_pages(0, 1, 128)
    bench.hidden([bench.row(1, 128, prompt[128:], 1, 2)])
    assert torch.equal(bench.entries(layer, name, 1, 200), expected)
    bench.arenas.slots.view(-1, "boundary_hidden")[1] += 1.0
    bench.share_pages(0, 2, 128)
    bench.hidden([bench.row(2, 128, prompt[128:], 1, 3)])
    differs = (bench.entries(layer, name, 2, 200) != expected).flatten(1).any(1)
    assert differs.nonzero().squeeze(1).tolist() == [128]


def test_boundary_hidden_is_the_final_hidden_before_the_end(tiny: Tiny, prompt: list[int]) -> None:
    bench = tiny.bench()
    (hidden,) = bench.hidden([bench.row(0, 0, prompt, None, 0, [(64, 1), (192, 2)])])
    bank = bench.arenas.slots.view(-1, "boundary_hidden")
    assert torch.equal(bank[[0, 1, 2]], hidden[[199, 63, 191]])


def test_a_model_without_a_draft_layer_runs_alike(tiny: Tiny, prompt: list[int]) -> None:
    draft, tiny.model.draft_layer = tiny.model.draft_layer, None  # type: ignore[attr-defined]
    try:
        bench = tiny.bench()
        (without,) = bench.logits([bench.row(0, 0, prompt, None, 0)])
    finally:
        tiny.model.draft_layer = draft  # type: ignore[attr-defined]
    bench = tiny.bench()
    assert torch.equal(without, bench.logits([bench.row(0, 0, prompt, None, 0)])[0])


def filled_in_every_way(tiny: Tiny, ids: list[int]) -> list[Bench]:
    """Memory after one forward, after two with a seam, and after a prompt and per-token rows."""
    whole, cut, decoded = tiny.bench(), tiny.bench(), tiny.bench()
    whole.hidden([whole.row(0, 0, ids, None, 0)])
    cut.hidden([cut.row(0, 0, ids[:128], None, 0)])
    cut.hidden([cut.row(0, 128, ids[128:], 0, 0)])
    decoded.hidden([decoded.row(0, 0, ids[:190], None, 0)])
    decoded.hidden(decode=[decoded.row(0, 190, ids[190:193], 0, 0)])
    for at in range(193, len(ids)):
        decoded.hidden(decode=[decoded.row(0, at, ids[at : at + 1], 0, 0)])
    return [whole, cut, decoded]


def pairs(tiny: Tiny, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding of every token and the target's final hidden before it: [1, T, hidden] each."""
    inner = tiny.oracle.model
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        hidden = inner(input_ids=tokens).last_hidden_state
        embedded = tiny.oracle.get_input_embeddings()(tokens)
    return embedded, torch.cat((torch.zeros_like(hidden[:, :1]), hidden[:, :-1]), 1)


def glm_entries(tiny: Tiny, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents [T, C], pooled keys [T // 4, D], and the last token's raw key and gate [2, D]."""
    from transformers import DynamicCache

    draft: Any = tiny.draft
    embedded, previous = pairs(tiny, ids)
    with torch.inference_mode():
        z = draft["eh_proj"](torch.cat((draft["enorm"](embedded), draft["hnorm"](previous)), -1))
        attention = draft["self_attn"]
        cache = DynamicCache(config=attention.config)
        everything = torch.ones(1, len(ids), dtype=torch.bool)
        attention(draft["input_layernorm"](z), everything, past_key_values=cache)
        latent = cache.layers[0].keys[0, 0]
        dim = attention.config.index_head_dim
        key, gate, _ = cache.layers[0].indexer_keys[0].split((dim, dim, 1), -1)
        whole = len(ids) // 4 * 4
        shares = gate[:whole].view(-1, 4, dim) + attention.indexer.index_kpool_compress_ape
        pooled = (shares.softmax(1) * key[:whole].view(-1, 4, dim)).sum(1)
    return latent, pooled, torch.stack((key[-1], gate[-1]))


def qwen_entries(tiny: Tiny, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated keys and values, [T, kv heads, D] each."""
    draft: Any = tiny.draft
    embedded, previous = pairs(tiny, ids)
    both = (draft["pre_fc_norm_embedding"](embedded), draft["pre_fc_norm_hidden"](previous))
    with torch.inference_mode():
        out = draft["decoder"](inputs_embeds=draft["fc"](torch.cat(both, -1)), use_cache=True)
    layer = out.past_key_values.layers[0]
    return layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
