"""Pools, tails and selections against the reference; ties, ranges, rows of all forms."""

from __future__ import annotations

import pytest
import torch

from millpond.ops.batch import ForwardBatch
from millpond.ops.reference import indexer as reference
from tests.ops.batches import make_batch, strided_bank
from tests.ops.triton.layers import DTYPES, NAN, far, mixed_batch, poisoned, to
from tests.ops.triton.side_by_side import equal_bytes

kernels = pytest.importorskip("millpond.ops.triton.indexer")
pytestmark = pytest.mark.usefixtures(poisoned.__name__)

POOL, DIM, HEADS, TOP_K, RING = 4, 24, 5, 24, 8
PAGES = 16
TABLES = [[3, 1], [2, 9], [5, 6, 4], [0], [10, 11], [-1], [12]]
SPANS = {"prefill": [(0, 30), (64, 5)], "decode": [(130, 3), (3, 1)]}
VERIFY = [(62, 2), (0, -1), (6, 1)]


def batch_of_all_forms() -> ForwardBatch:
    return mixed_batch(**SPANS, verify=VERIFY, tables=TABLES, seats=[2, 0, 1, 6, 4, -1, 5])


def filled(batch: ForwardBatch) -> torch.Tensor:
    """Which of the packed tokens are tokens [T]."""
    found = torch.ones(len(batch.positions), dtype=torch.bool)
    if batch.verify is not None:
        found[batch.first_verify_token :] = batch.verify.filled.flatten()
    return found


def random(*shape: int, dtype: torch.dtype, made: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(made)).to(dtype)


def whole(*shape: int, dtype: torch.dtype, made: int) -> torch.Tensor:
    """Small whole numbers: their sums of products are exact in any order."""
    made_by = torch.Generator().manual_seed(made)
    return torch.randint(-3, 4, shape, generator=made_by).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pools_and_tails_equal_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    batch = batch_of_all_forms()
    key, gate = (random(len(batch.positions), DIM, dtype=dtype, made=made) for made in (1, 2))
    key[~filled(batch)] = NAN
    bias = random(POOL, DIM, dtype=dtype, made=3)
    pooled = [strided_bank(PAGES, (64 // POOL, DIM), dtype).fill_(NAN) for _ in "ab"]
    tails = [strided_bank(7, (RING, 2, DIM), dtype) for _ in "ab"]
    reference.pool_keys(key, gate, bias, pooled_pages=pooled[0], tails=tails[0], batch=batch)
    there = [v.to(device) for v in (pooled[1], tails[1])]
    kernels.pool_keys(
        key.to(device), gate.to(device), bias.to(device),
        pooled_pages=there[0], tails=there[1], batch=to(batch, device),
    )  # fmt: skip
    assert equal_bytes(there[1].cpu(), tails[0])
    found, expected = there[0].cpu(), pooled[0]
    assert torch.equal(found.isnan(), expected.isnan())
    close = {"rtol": 2**-7, "atol": 2**-8} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found, expected, equal_nan=True, **close)


@pytest.mark.parametrize(
    ("first", "dtype"), [(0, torch.float32), (1, torch.float32), (0, torch.bfloat16)], ids=str
)
def test_the_selected_positions_are_those_of_the_reference(
    first: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "COUNTED", 32)  # two looks at the longest row
    batch = batch_of_all_forms()
    query = whole(len(batch.positions), HEADS, DIM, dtype=dtype, made=1)
    weights = whole(len(batch.positions), HEADS, dtype=torch.float32, made=2)
    pages = strided_bank(PAGES, (64 // POOL, DIM), dtype)
    pages.copy_(whole(*pages.shape, dtype=dtype, made=3))
    for table, end in zip(TABLES, batch.ends, strict=True):
        for page in range(len(table)):  # nobody reads an unfinished pool
            pages[table[page], max(end // POOL - page * 16, 0) :] = NAN
    named = {"batch": batch, "pool": POOL, "top_k": TOP_K, "scale": 0.5, "first": first}
    expected = reference.select(query, weights, pooled_pages=pages, **named)
    named["batch"] = to(batch, device)
    found = kernels.select(
        query.to(device), weights.to(device), pooled_pages=pages.to(device), **named
    )
    assert found is not None
    assert expected is not None
    real = filled(batch)
    assert torch.equal(found.cpu()[real], expected[real])


def test_without_weights_all_pools_tie_and_short_rows_need_no_mask(device: torch.device) -> None:
    dtype = torch.float32
    pages = random(4, 64 // POOL, DIM, dtype=dtype, made=1).to(device)
    long, short = make_batch([(64, 39)], tables=[[2, 1]]), make_batch([(0, 27)], tables=[[2]])
    query = random(39, HEADS, DIM, dtype=dtype, made=2).to(device)
    weights = -torch.zeros(39, HEADS, device=device)
    weights[::2] = 0.0
    named = {"pooled_pages": pages, "pool": POOL, "top_k": TOP_K, "scale": 1.0}
    found = kernels.select(query, weights, batch=to(long, device), **named)
    expected = torch.zeros(128, dtype=torch.bool)
    expected[:TOP_K] = True
    expected[100:103] = True
    assert torch.equal(found[38].cpu(), expected)
    none = kernels.select(query[:27], weights[:27], batch=to(short, device), **named)
    assert none is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_selects_the_same_alone(dtype: torch.dtype, device: torch.device) -> None:
    pages = random(6, 64 // POOL, DIM, dtype=dtype, made=1).to(device)
    query = random(5, HEADS, DIM, dtype=dtype, made=2).to(device)
    weights = random(5, HEADS, dtype=torch.float32, made=3).to(device)
    named = {"pooled_pages": pages, "pool": POOL, "top_k": TOP_K, "scale": 0.3}
    both = make_batch((), [(150, 3), (70, 2)], tables=[[1, 3, 0], [4, 2]])
    alone = make_batch((), [(70, 2)], tables=[[4, 2]])
    found = kernels.select(query, weights, batch=to(both, device), **named)
    part = kernels.select(query[3:], weights[3:], batch=to(alone, device), **named)
    assert torch.equal(found[3:, :128], part)
    assert not found[3:, 128:].any()


def test_pages_and_tails_may_begin_beyond_two_to_the_31_elements(device: torch.device) -> None:
    dtype = torch.bfloat16
    batch = make_batch((), [(3, 2), (66, 2)], tables=[[2], [0, 1]], seats=[2, 0])
    key, gate = (random(4, DIM, dtype=dtype, made=made) for made in (1, 2))
    bias = random(POOL, DIM, dtype=dtype, made=3)
    pooled, tails = (
        random(3, 16, DIM, dtype=dtype, made=4),
        random(3, RING, 2, DIM, dtype=dtype, made=5),
    )
    there = far(pooled.to(device)), far(tails.to(device))
    reference.pool_keys(key, gate, bias, pooled_pages=pooled, tails=tails, batch=batch)
    moved = to(batch, device)
    kernels.pool_keys(
        key.to(device), gate.to(device), bias.to(device),
        pooled_pages=there[0], tails=there[1], batch=moved,
    )  # fmt: skip
    assert equal_bytes(there[1].cpu(), tails)
    torch.testing.assert_close(there[0].cpu(), pooled, rtol=2**-7, atol=2**-8)
    query, weights = random(4, HEADS, DIM, dtype=dtype, made=6), torch.ones(4, HEADS)
    named = {"pool": POOL, "top_k": TOP_K, "scale": 1.0}
    near = there[0].contiguous()
    found = kernels.select(
        query.to(device), weights.to(device), pooled_pages=there[0], batch=moved, **named
    )
    expected = kernels.select(
        query.to(device), weights.to(device), pooled_pages=near, batch=moved, **named
    )
    assert torch.equal(found, expected)
