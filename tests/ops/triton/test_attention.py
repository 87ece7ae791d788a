"""Paged attention's kernels against the reference: all forms of rows, and what no row may touch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from millpond.ops.batch import ForwardBatch
from millpond.ops.reference import attention as reference
from millpond.ops.reference.dense import rope_tables
from tests.ops.batches import make_batch, strided_bank
from tests.ops.triton.layers import DTYPES, NAN, far, mixed_batch, poisoned, to
from tests.ops.triton.side_by_side import equal_bytes
from tests.ops.triton.tolerances import within

kernels = pytest.importorskip("millpond.ops.triton.attention")
latent = pytest.importorskip("millpond.ops.triton.latent")
writes = pytest.importorskip("millpond.ops.triton.writes")
pytestmark = pytest.mark.usefixtures(poisoned.__name__)

PAGES = 16
TABLES = [[3, 1], [2, 9], [5, 6, 4], [0], [10, 11], [-1], [12]]
SPANS = {"prefill": [(0, 70), (64, 5)], "decode": [(130, 3), (0, 1)]}
VERIFY = [(62, 2), (0, -1), (5, 0)]
SCALE = 0.3


def batch_of_all_forms() -> ForwardBatch:
    return mixed_batch(**SPANS, verify=VERIFY, tables=TABLES)


def filled_pages(
    batch: ForwardBatch, shape: tuple[int, ...], dtype: torch.dtype, made: int
) -> torch.Tensor:
    """Pages [Pg, *shape] (64 entries on the axis before the last), NaN where no row has a token."""
    pages = strided_bank(PAGES, shape, dtype)
    pages.copy_(torch.randn(pages.shape, generator=torch.Generator().manual_seed(made)).to(dtype))
    there = torch.zeros(PAGES, 64, dtype=torch.bool)
    for table, end in zip(batch.page_table.tolist(), batch.ends, strict=True):
        for position in range(end):
            if table[position // 64] >= 0:
                there[table[position // 64], position % 64] = True
    there = there.view(PAGES, *[1] * (len(shape) - 2), 64, 1)
    return pages.copy_(torch.where(there, pages, NAN))


def random(*shape: int, dtype: torch.dtype, made: int = 7) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(made)).to(dtype)


@pytest.mark.parametrize(
    ("heads", "first", "dtype"),
    [
        ((6, 2), 0, torch.float32),
        ((6, 2), 0, torch.bfloat16),
        ((3, 3), 0, torch.float32),
        ((6, 2), 1, torch.float32),
    ],
    ids=str,
)
def test_gqa_of_all_forms_equals_the_reference(
    heads: tuple[int, int], first: int, dtype: torch.dtype, device: torch.device
) -> None:
    batch = batch_of_all_forms()
    keys = filled_pages(batch, (heads[1], 64, 16), dtype, 1)
    values = filled_pages(batch, (heads[1], 64, 24), dtype, 2)
    q = random(len(batch.positions), heads[0], 16, dtype=dtype)
    named = {"scale": SCALE, "first": first}
    expected = reference.paged_gqa(q, keys, values, batch=batch, **named)
    found = kernels.paged_gqa(
        q.to(device), keys.to(device), values.to(device), batch=to(batch, device), **named
    )
    assert found.isfinite().all()
    torch.testing.assert_close(found.cpu(), expected, **within("attention", dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_passes_what_was_attended_to(dtype: torch.dtype, device: torch.device) -> None:
    batch = batch_of_all_forms()
    keys = filled_pages(batch, (2, 64, 16), dtype, 1)
    both = random(len(batch.positions), 6, 32, dtype=dtype)
    both[0, 0, 16:] = 50.0
    q, gate = both[..., :16].contiguous(), both[..., 16:]
    expected = reference.paged_gqa(q, keys, keys, batch=batch, scale=SCALE, gate=gate)
    keys = keys.to(device)
    found = kernels.paged_gqa(
        q.to(device), keys, keys, batch=to(batch, device), scale=SCALE,
        gate=both.to(device)[..., 16:],
    )  # fmt: skip
    torch.testing.assert_close(found.cpu(), expected, **within("gated attention", dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_queries_and_keys_are_turned_and_keys_and_values_written(
    kv_heads: int, dtype: torch.dtype, device: torch.device
) -> None:
    pages, offsets = torch.tensor([3, -1, 0, 3]), torch.tensor([63, 5, 0, 1])
    heads, dim, half = 2 * kv_heads, 24, 4
    cos, sin = rope_tables(torch.tensor([0, 5, 1000, 131071]), 2 * half, 1e6)
    weights = [random(dim, dtype=dtype, made=made) for made in (1, 2)]
    wide = random(4, (2 * heads + 2 * kv_heads) * dim + 8, dtype=dtype, made=3)

    def call(op: Callable[..., torch.Tensor | None], on: torch.device, asked: bool) -> list:
        key, value, both, _ = wide.to(on).split(
            (kv_heads * dim, kv_heads * dim, 2 * heads * dim, 8), 1
        )
        caches = [strided_bank(4, (kv_heads, 64, dim), dtype).fill_(NAN).to(on) for _ in "kv"]
        query = both.unflatten(1, (heads, 2, dim))[:, :, 0] if asked else None
        out = op(
            query, key.unflatten(1, (kv_heads, dim)), value.unflatten(1, (kv_heads, dim)),
            *[w.to(on) for w in weights], cos.to(on), sin.to(on), eps=1e-6,
            key_pages=caches[0], value_pages=caches[1],
            token_page=pages.to(on), token_offset=offsets.to(on),
        )  # fmt: skip
        return [None if x is None else x.cpu() for x in (out, *caches)]

    for asked in (True, False):
        expected = call(reference.turn_and_write, torch.device("cpu"), asked)
        found = call(writes.turn_and_write, device, asked)
        assert (found[0] is None) is not asked
        assert equal_bytes(found[2], expected[2])
        for ours, theirs in zip(found[not asked :], expected[not asked :], strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True, **within("turned", dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "selected"])
def test_mla_of_all_forms_equals_the_reference(
    sparse: bool, dtype: torch.dtype, device: torch.device
) -> None:
    spans = {"prefill": [(64, 13)], "decode": [(130, 3), (0, 1)]}
    batch = mixed_batch(**spans, verify=VERIFY, tables=TABLES[1:])
    pages = filled_pages(batch, (64, 40), dtype, 1)
    q = random(len(batch.positions), 5, 40, dtype=dtype)
    selected = None
    if sparse:
        selected = torch.zeros(len(q), batch.page_table.shape[1] * 64, dtype=torch.bool)
        selected[:, ::7] = True
        selected[:3, :64] = False  # a tile of nothing, then one of something
        selected[4] = False  # nothing at all
    named = {"scale": SCALE}
    expected = reference.paged_mla(q, pages, batch=batch, selected=selected, **named)
    found = latent.paged_mla(
        q.to(device), pages.to(device), batch=to(batch, device),
        selected=None if selected is None else selected.to(device), **named,
    )  # fmt: skip
    torch.testing.assert_close(found.cpu(), expected, **within("attention", dtype))
    if sparse:
        assert not found[4].any()


def test_latents_far_from_what_is_selected_are_not_read(device: torch.device) -> None:
    dtype = torch.float32
    batch = make_batch((), [(190, 1)], tables=[[5, 6, 4]])
    pages = filled_pages(batch, (64, 16), dtype, 1)
    selected = torch.zeros(1, 192, dtype=torch.bool)
    selected[0, torch.arange(0, 180, 9)] = True  # 20 groups of 4: two tiles
    selected[0, 191] = True  # after the token
    q = random(1, 3, 16, dtype=dtype)
    named = {"scale": SCALE}
    expected = reference.paged_mla(q, pages, batch=batch, selected=selected, **named)
    near = selected.view(-1, 4).any(1).repeat_interleave(4)
    pages[[5, 6, 4]] = torch.where(near.view(3, 64, 1), pages[[5, 6, 4]], NAN)
    found = latent.paged_mla(
        q.to(device), pages.to(device), batch=to(batch, device), selected=selected.to(device),
        **named,
    )  # fmt: skip
    torch.testing.assert_close(found.cpu(), expected, **within("attention", dtype))


def test_a_split_past_adds_up_and_follows_from_the_position_alone(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "GQA", replace(kernels.GQA, split_tiles=1, max_splits=2, lines=16))
    dtype = torch.float32
    tables = [[5, 3, 6, 4], [8, 9, 10], [2]]
    batch = make_batch((), [(250, 2), (129, 1), (63, 1)], tables=tables)
    keys = filled_pages(batch, (1, 64, 16), dtype, 1)
    q = random(4, 2, 16, dtype=dtype)
    expected = reference.paged_gqa(q, keys, keys, batch=batch, scale=SCALE)
    keys = keys.to(device)
    found = kernels.paged_gqa(q.to(device), keys, keys, batch=to(batch, device), scale=SCALE)
    torch.testing.assert_close(found.cpu(), expected, **within("attention", dtype))
    at = 0
    for (start, count), table in zip([(250, 2), (129, 1), (63, 1)], tables, strict=True):
        wider = [*table, -1, -1, -1]  # room for more splits than the row has
        alone = make_batch((), [(start, count)], tables=[wider])
        part = kernels.paged_gqa(
            q[at : at + count].to(device), keys, keys, batch=to(alone, device), scale=SCALE
        )
        assert equal_bytes(part.cpu(), found[at : at + count].cpu())
        at += count


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_row_has_the_same_bytes_alone_cut_or_beside_a_broken_one(
    dtype: torch.dtype, device: torch.device
) -> None:
    both = make_batch([(0, 30), (0, 75)], tables=[[7], [2, 5]])
    keys = filled_pages(both, (1, 64, 16), dtype, 1)
    keys[7] = NAN
    q = random(105, 6, 16, dtype=dtype).to(device)
    keys = keys.to(device)

    def attend(batch: ForwardBatch, queries: torch.Tensor) -> torch.Tensor:
        moved = to(batch, device)
        return kernels.paged_gqa(queries, keys, keys, batch=moved, scale=SCALE).cpu()

    whole = attend(both, q)
    assert whole[:30].isnan().all()
    alone = attend(make_batch([(0, 75)], tables=[[2, 5]]), q[30:])
    assert equal_bytes(whole[30:], alone)
    tail = attend(make_batch([(64, 11)], tables=[[2, 5]]), q[94:])
    assert equal_bytes(whole[94:], tail)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_go_to_their_page_and_offset_and_those_of_no_page_nowhere(
    dtype: torch.dtype, device: torch.device
) -> None:
    pages, offsets = torch.tensor([3, -1, 0, 3]), torch.tensor([63, 5, 0, 1])
    for shape, token in (((64, 40), (40,)), ((3, 64, 12), (3, 12))):
        wide = random(4, 36 + 8, dtype=torch.float32)
        values = wide[:, 4 : 4 + 36].view(4, 3, 12) if len(token) == 2 else wide[:, :40]
        expected, found = (strided_bank(4, shape, dtype).fill_(NAN) for _ in "ab")
        reference.write_kv(expected, values, pages, offsets)
        there = found.to(device)
        writes.write_kv(there, values.to(device), pages.to(device), offsets.to(device))
        assert equal_bytes(there.cpu(), expected)


def test_pages_may_begin_beyond_two_to_the_31_elements(device: torch.device) -> None:
    dtype = torch.bfloat16
    batch = make_batch([(64, 2)], [(64, 1)], tables=[[2, 1], [0, 2]])
    keys = random(3, 1, 64, 16, dtype=dtype)
    q = random(3, 1, 16, dtype=dtype)
    away = far(keys.to(device))
    new = random(3, 1, 16, dtype=dtype, made=8)
    reference.write_kv(keys, new, batch.token_page, batch.token_offset)
    moved = to(batch, device)
    writes.write_kv(away, new.to(device), moved.token_page, moved.token_offset)
    assert equal_bytes(away.cpu(), keys)
    expected = reference.paged_gqa(q, keys, keys, batch=batch, scale=SCALE)
    found = kernels.paged_gqa(q.to(device), away, away, batch=moved, scale=SCALE)
    torch.testing.assert_close(found.cpu(), expected, **within("attention", dtype))
    found = latent.paged_mla(q.to(device), away[:, 0], batch=moved, scale=SCALE, selected=None)
    torch.testing.assert_close(found.cpu(), expected, **within("attention", dtype))
