"""The pooled indexer, token by token: incremental pools and tails against pools from scratch."""

from __future__ import annotations

import pytest
import torch

from millpond.ops.batch import ForwardBatch
from millpond.ops.reference.indexer import pool_keys, select
from tests.ops.batches import make_batch, strided_bank

POOL, DIM, HEADS, TOP_K, SCALE = 4, 8, 16, 24, 0.35
LENGTH, TABLE, SEAT = 211, [5, 2, 7, 3], 1


class Sequence:
    """One sequence of raw keys and gates, queries and head weights."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(2)
        self.key, self.gate = torch.randn(2, LENGTH, DIM).to(dtype)
        self.query = torch.randn(LENGTH, HEADS, DIM).to(dtype)
        self.weights = torch.randn(LENGTH, HEADS)
        self.bias = torch.randn(POOL, DIM).to(dtype)
        self.pooled_pages = strided_bank(8, (64 // POOL, DIM), dtype).fill_(float("nan"))
        self.tails = strided_bank(3, (POOL, 2, DIM), dtype).fill_(float("nan"))

    def fold(self, prefill=(), decode=()) -> tuple[ForwardBatch, torch.Tensor | None]:
        spans = [*prefill, *decode]
        batch = make_batch(prefill, decode, tables=[TABLE] * len(spans), seats=[SEAT] * len(spans))
        at = batch.positions
        pool_keys(
            self.key[at], self.gate[at], self.bias,
            pooled_pages=self.pooled_pages, tails=self.tails, batch=batch,
        )  # fmt: skip
        chosen = select(
            self.query[at], self.weights[at],
            pooled_pages=self.pooled_pages, batch=batch, pool=POOL, top_k=TOP_K, scale=SCALE,
        )  # fmt: skip
        return batch, chosen

    def pooled(self, count: int) -> torch.Tensor:
        """The keys of the first `count` pools in fp64: [count, D]."""
        shape = (count, POOL, DIM)
        gate = self.gate[: count * POOL].double().view(shape) + self.bias.double()
        return (gate.softmax(1) * self.key[: count * POOL].double().view(shape)).sum(1)

    def expected(self, t: int) -> torch.Tensor:
        """Which of the 256 positions token `t` sees, from the definition."""
        count = (t + 1) // POOL
        scores = torch.einsum("hd,pd->hp", self.query[t].double(), self.pooled(count)) * SCALE
        scores = (self.weights[t].double()[:, None] * scores.relu()).sum(0)
        seen = torch.zeros(256, dtype=torch.bool)
        for p in scores.topk(min(TOP_K // POOL, count)).indices.tolist():
            seen[p * POOL : (p + 1) * POOL] = True
        seen[count * POOL : t + 1] = True
        return seen


@pytest.mark.parametrize("cut", [64, 128, 192])
def test_prefill_then_single_tokens_select_as_the_definition_says(cut: int) -> None:
    sequence = Sequence()
    seen = []
    for begin in range(0, cut, 64):
        _, chosen = sequence.fold(prefill=[(begin, 64)])
        if chosen is None:
            chosen = torch.arange(256) <= torch.arange(begin, begin + 64)[:, None]
        seen.append(chosen)
    at = cut
    while at < LENGTH:
        count = min((1, 1, 3, 5, 2)[at % 5], LENGTH - at)
        seen.append(sequence.fold(decode=[(at, count)])[1])
        at += count
    for t, row in enumerate(torch.cat([s for s in seen if s is not None])):
        assert torch.equal(row[: t + 1], sequence.expected(t)[: t + 1]), t
        assert not row[t + 1 :].any()
    pooled = sequence.pooled_pages[TABLE].reshape(-1, DIM)
    count = LENGTH // POOL
    torch.testing.assert_close(
        pooled[:count].double(), sequence.pooled(count), atol=1e-6, rtol=1e-6
    )
    assert pooled[count:].isnan().all()


def test_ways_to_fold_give_the_same_bytes() -> None:
    whole, cut = Sequence(), Sequence()
    whole.fold(prefill=[(0, LENGTH)])
    cut.fold(prefill=[(0, 128)])
    cut.fold(prefill=[(128, 64)])
    for t in range(192, LENGTH):
        cut.fold(decode=[(t, 1)])
    assert torch.equal(whole.pooled_pages.nan_to_num(7.0), cut.pooled_pages.nan_to_num(7.0))
    unfinished = LENGTH % POOL
    assert torch.equal(whole.tails[SEAT, :unfinished], cut.tails[SEAT, :unfinished])
    assert whole.tails[[0, 2]].isnan().all()


def test_short_rows_need_no_selection_and_a_long_one_selects_for_all() -> None:
    sequence = Sequence()
    _, chosen = sequence.fold(prefill=[(0, TOP_K + POOL - 1)])
    assert chosen is None
    _, chosen = sequence.fold(prefill=[(0, TOP_K + POOL)])
    assert chosen is not None
    short = TOP_K + POOL - 1
    dense = torch.arange(256) <= torch.arange(short)[:, None]
    assert torch.equal(chosen[:short], dense)
    assert chosen[short].sum() == TOP_K  # a query at the end of a pool has no tail of its own


def test_equal_scores_go_to_the_lower_pool() -> None:
    sequence = Sequence()
    sequence.weights.zero_()
    _, chosen = sequence.fold(prefill=[(0, LENGTH)])
    assert chosen is not None
    expected = torch.zeros(256, dtype=torch.bool)
    expected[:TOP_K] = True
    expected[LENGTH - LENGTH % POOL : LENGTH] = True
    assert torch.equal(chosen[-1], expected)


def test_a_seat_of_none_is_neither_read_nor_written() -> None:
    sequence = Sequence()
    batch = make_batch((), [(3, 1)], tables=[TABLE], seats=[-1])
    pool_keys(
        sequence.key[3:4], sequence.gate[3:4], sequence.bias,
        pooled_pages=sequence.pooled_pages, tails=sequence.tails, batch=batch,
    )  # fmt: skip
    assert sequence.tails.isnan().all()
    assert sequence.pooled_pages[TABLE[0], 0].isfinite().all()


def test_model_dtype_pools_round_shares_then_products() -> None:
    sequence = Sequence(torch.bfloat16)
    sequence.fold(prefill=[(0, LENGTH)])
    pooled = sequence.pooled_pages[TABLE].reshape(-1, DIM)[: LENGTH // POOL]
    count = LENGTH // POOL
    gate, key = (x[: count * POOL].view(count, POOL, DIM) for x in (sequence.gate, sequence.key))
    share = (gate.float() + sequence.bias.float()).softmax(1).bfloat16()
    products = (share * key).float()
    expected = (products[:, 0] + products[:, 1] + products[:, 2] + products[:, 3]).bfloat16()
    assert torch.equal(pooled, expected)
