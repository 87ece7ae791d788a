"""Paged attention against plain softmax attention in fp64, with NaN wherever nothing was stored."""

from __future__ import annotations

import pytest
import torch

from millpond.ops.batch import ForwardBatch
from millpond.ops.reference.attention import paged_gqa, paged_mla, write_kv
from tests.ops.batches import make_batch, strided_bank

TABLES = [[3, 7, 1], [2, 9], [5, 6, 4, 8], [0]]
SPANS = {"prefill": [(0, 130), (64, 20)], "decode": [(200, 3), (0, 1)]}
PAGES = 12


def formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, seen: torch.Tensor
) -> torch.Tensor:
    """q [T, Hq, D], k, v [S, Hkv, D], seen [T, S] -> [T, Hq, D] in fp64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), k) * scale
    return torch.einsum("hts,shd->thd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


def nan_pages(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return strided_bank(PAGES, shape, dtype).fill_(float("nan"))


def store(cache: torch.Tensor, values: list[torch.Tensor], tables: list[list[int]]) -> None:
    for row, table in zip(values, tables, strict=True):
        position = torch.arange(len(row))
        write_kv(cache, row, torch.tensor(table)[position // 64], position % 64)


def by_row(batch: ForwardBatch) -> list[tuple[slice, torch.Tensor]]:
    """For each row: where its tokens lie, and which positions each of them sees."""
    found, at = [], 0
    for start, end in zip(batch.starts, batch.ends, strict=True):
        seen = torch.arange(end) <= torch.arange(start, end)[:, None]
        found.append((slice(at, at + end - start), seen))
        at += end - start
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(6, 2), (1, 1), (20, 1)])
def test_gqa_is_causal_attention_over_each_rows_pages(
    heads: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    batch = make_batch(**SPANS, tables=TABLES)
    keys, values = (
        [torch.randn(end, heads[1], size).to(dtype) for end in batch.ends] for size in (16, 24)
    )
    key_pages, value_pages = (nan_pages(heads[1], 64, size, dtype=dtype) for size in (16, 24))
    store(key_pages, keys, TABLES)
    store(value_pages, values, TABLES)
    q = torch.randn(len(batch.positions), heads[0], 16).to(dtype)
    o = paged_gqa(q, key_pages, value_pages, batch=batch, scale=0.3)
    assert o.dtype == dtype
    for row, (at, seen) in enumerate(by_row(batch)):
        expected = formula(q[at], keys[row], values[row], 0.3, seen)
        tolerance = 2e-6 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(o[at].double(), expected, atol=tolerance / 4, rtol=tolerance)


def test_mla_attends_to_the_selected_latents_only() -> None:
    torch.manual_seed(0)
    batch = make_batch(**SPANS, tables=TABLES)
    latents = [torch.randn(end, 16) for end in batch.ends]
    pages = nan_pages(64, 16)
    store(pages, latents, TABLES)
    q = torch.randn(len(batch.positions), 5, 16)
    past = torch.arange(4 * 64) <= batch.positions[:, None]
    chosen = (torch.rand(past.shape) < 0.1) & past
    chosen[:, 0] = True  # something for every token, the rest far apart
    chosen[10] = False
    dense = paged_mla(q, pages, batch=batch, scale=0.3, selected=None)
    sparse = paged_mla(q, pages, batch=batch, scale=0.3, selected=chosen)
    for row, (at, seen) in enumerate(by_row(batch)):
        keys = latents[row][:, None]
        expected = formula(q[at], keys, keys, 0.3, seen)
        torch.testing.assert_close(dense[at].double(), expected, atol=1e-6, rtol=2e-6)
        expected = formula(q[at], keys, keys, 0.3, seen & chosen[at, : seen.shape[1]])
        expected = expected.nan_to_num(0.0)  # a token that may see nothing gets zeros
        torch.testing.assert_close(sparse[at].double(), expected, atol=1e-6, rtol=2e-6)
    assert not sparse[10].any()
    assert torch.equal(paged_mla(q, pages, batch=batch, scale=0.3, selected=past), dense)


def test_tokens_without_a_page_are_not_stored() -> None:
    cache = torch.zeros(2, 64, 4)
    write_kv(cache, torch.ones(2, 4), torch.tensor([-1, 1]), torch.tensor([5, 63]))
    assert cache.sum() == 4
    assert cache[1, 63].sum() == 4
    by_head = torch.zeros(2, 3, 64, 4)
    write_kv(by_head, torch.ones(2, 3, 4), torch.tensor([-1, 0]), torch.tensor([5, 2]))
    assert by_head.sum() == 12
    assert by_head[0, :, 2].sum() == 12


def test_a_broken_row_does_not_touch_its_neighbours() -> None:
    torch.manual_seed(0)
    batch = make_batch([(0, 70)], [(70, 1)], tables=[[0, 1], [2, 3]])
    keys = strided_bank(PAGES, (2, 64, 16))
    q = torch.randn(71, 4, 16)
    clean = paged_gqa(q, keys, keys, batch=batch, scale=0.3)
    keys[0].fill_(float("nan"))
    broken = paged_gqa(q, keys, keys, batch=batch, scale=0.3)
    assert broken[:70].isnan().all()
    assert torch.equal(broken[70], clean[70])
