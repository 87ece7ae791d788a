"""Decode through pages at fixed addresses: what a captured step reads anew when it is replayed.

On a GPU the calls are captured once and replayed; under the interpreter they are repeated. Between
two replays only numbers at fixed addresses change: positions, pages, seats, tokens.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from millpond.ops.batch import ForwardBatch
from millpond.ops.reference import attention, indexer, moe
from tests.ops.batches import make_batch, strided_bank
from tests.ops.triton.layers import NAN, to
from tests.ops.triton.test_graphs import replayable
from tests.ops.triton.tolerances import within

kernels = [
    pytest.importorskip(f"millpond.ops.triton.{name}")
    for name in ("writes", "latent", "indexer", "moe")
]

ROWS, PAGES, POOL, TOP_K, DIM, RANK, HEADS = 3, 12, 4, 16, 8, 16, 3
TABLES = [[3, 1, 7], [2, 9, 0], [5, 6, 4]]
NOBODY = [-1, -1, -1]
SPANS = [(60, 70, None), (61, 71, 127), (62, None, 128), (63, 72, 129)]
"""The position of each row's token, step by step; a row of nobody in between."""


def batch_at(step: int) -> ForwardBatch:
    """One step; the host knows its capacity only."""
    at = SPANS[step]
    batch = make_batch(
        (), [(p or 0, 1) for p in at],
        tables=[NOBODY if p is None else t for p, t in zip(at, TABLES, strict=True)],
        seats=[-1 if p is None else seat for seat, p in enumerate(at)],
    )  # fmt: skip
    return replace(batch, ends=(192,) * ROWS)


class Layer:
    """Memory and weights of a latent layer with an indexer and experts, in one place or two."""

    def __init__(self, device: torch.device) -> None:
        made = torch.Generator().manual_seed(4)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=made).to(device)

        self.latents = strided_bank(PAGES, (64, RANK)).to(device)
        self.pooled = strided_bank(PAGES, (64 // POOL, DIM)).to(device)
        self.tails = strided_bank(ROWS, (POOL, 2, DIM)).to(device)
        self.bias, self.gate = random(POOL, DIM), random(5, RANK)
        self.up, self.down = random(5, 16, RANK) / 4, random(5, RANK, 8) / 4
        # What a step changes: latent, index key and gate, queries.
        self.x, self.key, self.key_gate = random(ROWS, RANK), random(ROWS, DIM), random(ROWS, DIM)
        self.q, self.index_q = random(ROWS, HEADS, RANK), random(ROWS, 2, DIM)
        self.head_weights = random(ROWS, 2)

    def __call__(self, ops: list[object], batch: ForwardBatch) -> torch.Tensor:
        write, attend, index, mix = ops
        write.write_kv(self.latents, self.x, batch.token_page, batch.token_offset)
        index.pool_keys(
            self.key, self.key_gate, self.bias,
            pooled_pages=self.pooled, tails=self.tails, batch=batch,
        )  # fmt: skip
        selected = index.select(
            self.index_q, self.head_weights,
            pooled_pages=self.pooled, batch=batch, pool=POOL, top_k=TOP_K, scale=0.4,
        )  # fmt: skip
        out = attend.paged_mla(self.q, self.latents, batch=batch, scale=0.3, selected=selected).sum(
            1
        )
        weights, experts = mix.moe_route_softmax(out, self.gate, top_k=2)
        return out + mix.grouped_experts(out, weights, experts, self.up, self.down)


def test_a_replayed_step_follows_the_pages_at_its_addresses(device: torch.device) -> None:
    here, there = Layer(torch.device("cpu")), Layer(device)
    batch = to(batch_at(1), device)
    memory = ("latents", "pooled", "tails")
    call = replayable(lambda: there(kernels, batch), device)
    for name in memory:  # compiling has run it once
        getattr(there, name).copy_(getattr(here, name))
    made = torch.Generator().manual_seed(9)
    for step in range(len(SPANS)):
        now = batch_at(step)
        for field in fields(now):
            if isinstance(value := getattr(now, field.name), torch.Tensor):
                getattr(batch, field.name).copy_(value)
        for name in ("x", "key", "key_gate", "q", "index_q", "head_weights"):
            value = torch.randn(getattr(here, name).shape, generator=made)
            value[now.seats < 0] = 0.0 if name == "q" else NAN
            getattr(here, name).copy_(value)
            getattr(there, name).copy_(value)
        found, expected = call().cpu(), here([attention, attention, indexer, moe], now)
        live = now.seats >= 0
        torch.testing.assert_close(found[live], expected[live], **within("experts", torch.float32))
        for name in memory:
            torch.testing.assert_close(getattr(there, name).cpu(), getattr(here, name))
