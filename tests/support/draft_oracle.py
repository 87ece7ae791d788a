"""The draft layer by transformers, wired by hand, on entries that lie at their own positions.

Entry i is made from the embedding of token i and a hidden vector of i - 1. No query sees entry 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.support.oracle import Tiny


def hidden_of(tiny: Tiny, ids: Sequence[int]) -> torch.Tensor:
    """The target's final hidden vectors [T, hidden]."""
    with torch.inference_mode():
        return tiny.oracle.model(input_ids=torch.tensor([ids])).last_hidden_state[0]


def chained(
    tiny: Tiny, ids: Sequence[int], hidden: torch.Tensor, follow: Sequence[int] = ()
) -> torch.Tensor:
    """What the layer makes of entries 1 .. T - 1, and of a chain that goes on with `follow`.

    ids [T], hidden [T, H] by the target -> [T - 1 + len(follow), H]. The chain starts at T - 1: the
    entry of each of its later tokens is made from the vector before.
    """
    vectors = _vectors(tiny, ids, hidden[:-1], len(ids))
    ids = list(ids)
    for token in follow:
        ids.append(token)
        before = torch.cat((hidden[: len(hidden) - 1], vectors[len(hidden) - 2 :]))
        vectors = _vectors(tiny, ids, before, len(hidden))
    return vectors


def logits_of(tiny: Tiny, vectors: torch.Tensor) -> torch.Tensor:
    """By the target's own head."""
    with torch.inference_mode():
        return tiny.oracle.get_output_embeddings()(vectors)


@torch.inference_mode()
def _vectors(tiny: Tiny, ids: Sequence[int], previous: torch.Tensor, known: int) -> torch.Tensor:
    """Entries 1 .. T - 1 through the whole layer: previous [T - 1, H] -> [T - 1, H].

    Queries from position `known` on attend to what the one before `known` selected.
    """
    draft: Any = tiny.draft
    embedded = tiny.oracle.get_input_embeddings()(torch.tensor(ids))
    if not tiny.kind.startswith("glm"):
        pair = (draft["pre_fc_norm_embedding"](embedded[1:]), draft["pre_fc_norm_hidden"](previous))
        return draft["decoder"](inputs_embeds=draft["fc"](torch.cat(pair, -1))[None])[0][0]
    previous = torch.cat((torch.zeros_like(previous[:1]), previous))
    pair = (draft["enorm"](embedded), draft["hnorm"](previous))
    z = draft["eh_proj"](torch.cat(pair, -1))[None]
    x, attention = draft["input_layernorm"](z), draft["self_attn"]
    selected = _selected(attention, x)
    selected[:, known:] = selected[:, known - 1 : known]
    indexer, attention.indexer = attention.indexer, None
    try:
        z = z + attention(x, None, prev_topk_indices=selected)[0]
    finally:
        attention.indexer = indexer
    z = z + draft["mlp"](draft["post_attention_layernorm"](z))
    return draft["norm"](z)[0, 1:]


def _selected(attention: Any, x: torch.Tensor) -> torch.Tensor:
    """Positions every query attends to, [1, T, n], negative: none.

    The first pool is one of the best without being scored, and entry 0 is left out of it. (Query 0
    sees itself, which nobody looks at.)
    """
    indexer, length = attention.indexer, x.shape[1]
    pool, pooled = indexer.index_kpool, indexer.get_pooled_states

    def without_the_first(packed_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keys, indices, valid = pooled(packed_states=packed_states)
        return keys, indices, valid & (indices[..., -1] >= pool)

    indexer.get_pooled_states = without_the_first
    indexer.index_topk -= pool
    try:
        queries = attention.q_a_layernorm(attention.q_a_proj(x))
        everything = torch.ones(1, length, dtype=torch.bool)
        found = indexer(x, queries, everything, None).long()
    finally:
        indexer.index_topk += pool
        del indexer.get_pooled_states
    query = torch.arange(length)
    first = torch.arange(1, pool).expand(1, length, -1)
    first = first.masked_fill((query < pool - 1)[:, None], -1)
    found[:, 1:] = found[:, 1:].masked_fill(found[:, 1:] == 0, -1)
    return torch.cat((found, first), -1)
