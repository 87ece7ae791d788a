"""Grouped-query attention over paged keys and values: prompts by blocks of queries, decode and
verify rows by splits of their past.

Contract: `millpond.ops.reference.attention`. A query folds tiles of 64 positions, one page each, in
rising order from position 0; weights are rounded to the model dtype before they meet the values,
maxima and sums stay fp32. For splits see `millpond.ops.triton.splits`. fp32 operands are
multiplied as three TF32 products.
"""

from __future__ import annotations

from math import e, log2

import torch
import triton
import triton.language as tl

from millpond.ops.batch import ForwardBatch
from millpond.ops.triton.layer_choices import GQA, attention_choice
from millpond.ops.triton.live import live
from millpond.ops.triton.overlap import await_previous, let_next_begin, overlap
from millpond.ops.triton.shared import (
    UNFUSED,
    head_stride,
    power_of_two,
    product,
    rounded,
    row_of_block,
    slot_stride,
    token_stride,
)
from millpond.ops.triton.splits import (
    GROUPED,
    JOINED,
    PAGE,
    join,
    passed,
    span_of,
    tiles_of,
    verify_places,
)


def paged_gqa(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    *,
    batch: ForwardBatch,
    scale: float,
    gate: torch.Tensor | None = None,
    first: int = 0,
) -> torch.Tensor:
    """As the reference."""
    choice = attention_choice(GQA, q.device)
    tokens, heads, dim = q.shape
    kv_heads, value_dim = key_pages.shape[1], value_pages.shape[-1]
    group = heads // kv_heads
    out = torch.empty((tokens, heads, value_dim), dtype=q.dtype, device=q.device)
    table = batch.page_table
    pages = (
        key_pages, value_pages, table, batch.row_start, batch.row_end, slot_stride(key_pages),
        slot_stride(value_pages), table.stride(0), table.shape[1], first, scale * log2(e),
    )  # fmt: skip
    passing = out if gate is None else gate
    gates = (passing, passing.stride(0), head_stride(passing))
    gated = {"GATED": gate is not None}
    shape = {
        "KV_HEADS": kv_heads, "GROUP": group, "D": dim, "DP": max(16, power_of_two(dim)),
        "DV": value_dim, "DVP": max(16, power_of_two(value_dim)), "TILE": PAGE,
    }  # fmt: skip

    block = min(power_of_two(group), choice.lines)
    if batch.prefill.num_rows:
        rows, queries = batch.prefill.num_rows, choice.lines // block
        blocks = batch.num_prefill_tokens // queries + rows
        _chunk[(blocks, kv_heads * triton.cdiv(group, block))](
            q, out, *gates, batch.prefill.cu_seqlens, rows, *pages, token_stride(q),
            **shape, **gated, HEADS_IN_BLOCK=block, QUERIES=queries,
            num_warps=choice.chunk_warps, num_stages=choice.chunk_stages, **UNFUSED,
        )  # fmt: skip

    first_token = batch.num_prefill_tokens
    singles = tokens - first_token
    if singles:
        splits = min(triton.cdiv(table.shape[1], choice.split_tiles), choice.max_splits)
        stats = torch.empty((singles, splits, heads, 2), dtype=torch.float32, device=q.device)
        parts = stats.new_empty((singles, splits, heads, value_dim))
        places = (batch.positions, *verify_places(batch), first_token)
        split = {"SPLIT": choice.split_tiles, "MOST": choice.max_splits}
        block = max(16, block)
        _singles[(singles, kv_heads * triton.cdiv(group, block), splits)](
            q, stats, parts, *places, batch.token_row, *pages, splits, token_stride(q),
            **shape, **split, SIZE=GROUPED, HEADS_IN_BLOCK=block,
            num_warps=choice.single_warps, num_stages=choice.single_stages, **UNFUSED,
            **overlap(q.device),
        )  # fmt: skip
        join[(singles, heads)](
            stats, parts, out, *gates, *places, table, 0, splits, table.shape[1],
            HEADS=heads, DV=value_dim, DVP=shape["DVP"], TILE=PAGE, PAGE=PAGE, SIZE=GROUPED,
            LISTS=False, JOINED=JOINED, **split, **gated,
            num_warps=4, **UNFUSED, **overlap(q.device),
        )  # fmt: skip
    return out


@triton.jit
def _vectors(pages, base, entry, there, D: tl.constexpr, DP: tl.constexpr):
    """A tile's vectors [TILE, DP]: entries of the page at `base`, zero where nothing is."""
    d = tl.arange(0, DP)
    mask = there[:, None]
    if D != DP:
        mask = mask & (d < D)[None, :]
    at = (base + entry * D)[:, None] + d[None, :]
    return tl.load(pages + at, mask=mask, other=0.0)


@triton.jit
def _fold(
    queries, position, top, total, mixed, tile, head, end, keys, values, pages_of_row,
    key_stride, value_stride, first_position, scale,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Fold one tile into every line's running maximum (of scores times log2 e), sum and mix.

    A line is a query and a head; its mix is the weighted sum of values.
    """
    lane = tl.arange(0, TILE)
    at = tile * TILE + lane
    page = tl.load(pages_of_row + tile).to(tl.int64)
    there = at < tl.where(page >= 0, end.to(tl.int32), 0)
    page = tl.maximum(page, 0)
    k = _vectors(keys, page * key_stride + head * (TILE * D), lane, there, D, DP)
    scores = product(queries, tl.trans(k), queries.dtype, "tf32x3")
    seen = (at[None, :] <= position[:, None]) & (at >= first_position)[None, :]
    scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1) * scale)
    finite = tl.where(new == float("-inf"), 0.0, new)
    shrink = tl.exp2(top - finite)
    weights = tl.exp2(tl.fma(scores, scale, -finite[:, None]))
    v = _vectors(values, page * value_stride + head * (TILE * DV), lane, there, DV, DVP)
    total = total * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None] + product(weights, v, queries.dtype, "tf32x3")
    return new, total, mixed


@triton.jit
def _fold_range(
    queries, position, begin, stop, head, end, keys, values, pages_of_row,
    key_stride, value_stride, first_position, scale,
    LINES: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Fold tiles begin .. stop - 1, rising, in one loop: with two, every wgmma is waited for."""
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    mixed = tl.zeros([LINES, DVP], tl.float32)
    for tile in range(begin, stop):
        top, total, mixed = _fold(
            queries, position, top, total, mixed, tile, head, end, keys, values, pages_of_row,
            key_stride, value_stride, first_position, scale, D, DP, DV, DVP, TILE,
        )  # fmt: skip
    return top, total, mixed


@live
def _chunk(
    q, out, gate, gate_stride, gate_head, cu_seqlens, count, keys, values, page_table,
    row_start, row_end, key_stride, value_stride, table_stride, num_pages, first_position, scale,
    q_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, TILE: tl.constexpr, GATED: tl.constexpr,
    HEADS_IN_BLOCK: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """QUERIES tokens of a prompt row by heads that share keys, all their past."""
    LINES: tl.constexpr = QUERIES * HEADS_IN_BLOCK
    BLOCKS: tl.constexpr = (GROUP + HEADS_IN_BLOCK - 1) // HEADS_IN_BLOCK
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest pasts begin first
    row = row_of_block(cu_seqlens, count, block, QUERIES)
    begin = tl.load(cu_seqlens + row).to(tl.int64)
    length = tl.load(cu_seqlens + row + 1).to(tl.int64) - begin
    first = (block - (begin // QUERIES + row)) * QUERIES
    if first < length:
        kv_head = tl.program_id(1) // BLOCKS
        line = tl.arange(0, LINES)
        step = first + line // HEADS_IN_BLOCK
        head = (tl.program_id(1) % BLOCKS) * HEADS_IN_BLOCK + line % HEADS_IN_BLOCK
        real = (step < length) & (head < GROUP)
        head += kv_head * GROUP
        d = tl.arange(0, DP)
        queries = tl.load(
            q + (begin + step)[:, None] * q_stride + head[:, None] * D + d[None, :],
            mask=real[:, None] & (d < D)[None, :],
            other=0.0,
        )
        start = tl.load(row_start + row).to(tl.int64)
        last = start + tl.minimum(first + QUERIES, length) - 1
        stop = tl.minimum(last // TILE + 1, num_pages).to(tl.int32)
        _top, total, mixed = _fold_range(
            queries, tl.where(real, start + step, -1).to(tl.int32), 0, stop, kv_head,
            tl.load(row_end + row).to(tl.int64), keys, values,
            page_table + row.to(tl.int64) * table_stride, key_stride, value_stride,
            first_position, scale, LINES, D, DP, DV, DVP, TILE,
        )  # fmt: skip
        mixed = mixed * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
        dv = tl.arange(0, DVP)
        place = (begin + step)[:, None] * (KV_HEADS * GROUP * DV) + head[:, None] * DV
        here = real[:, None] & (dv < DV)[None, :]
        if GATED:
            passing = (begin + step)[:, None] * gate_stride + head[:, None] * gate_head
            share = tl.load(gate + passing + dv[None, :], mask=here, other=0.0)
            mixed = passed(mixed, share.to(tl.float32), out.dtype.element_ty)
        tl.store(out + place + dv[None, :], rounded(mixed, out.dtype.element_ty), mask=here)


@live
def _singles(
    q, stats, parts, positions, verify_seats, num_drafts, first_verify, verify_width, first_token,
    token_row, keys, values, page_table, row_start, row_end,
    key_stride, value_stride, table_stride, num_pages, first_position, scale, split_stride,
    q_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr,
    SPLIT: tl.constexpr, MOST: tl.constexpr, HEADS_IN_BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token by heads that share keys, one split of its past."""
    BLOCKS: tl.constexpr = (GROUP + HEADS_IN_BLOCK - 1) // HEADS_IN_BLOCK
    if OVERLAP:
        let_next_begin()
        await_previous()
    token = tl.program_id(0)
    packed = (first_token + token).to(tl.int64)
    row = tl.load(token_row + packed).to(tl.int64)
    tiles = tiles_of(
        first_token + token, positions, verify_seats, num_drafts, first_verify, verify_width, -1,
        num_pages, TILE, TILE, SIZE,
    )  # fmt: skip
    span = span_of(tiles, SPLIT, MOST)
    begin = tl.program_id(2) * span
    if begin < tiles:
        kv_head = tl.program_id(1) // BLOCKS
        line = tl.arange(0, HEADS_IN_BLOCK)
        head = (tl.program_id(1) % BLOCKS) * HEADS_IN_BLOCK + line
        real = head < GROUP
        head += kv_head * GROUP
        d = tl.arange(0, DP)
        queries = tl.load(
            q + packed * q_stride + head[:, None] * D + d[None, :],
            mask=real[:, None] & (d < D)[None, :],
            other=0.0,
        )
        position = tl.load(positions + packed).to(tl.int32)
        top, total, mixed = _fold_range(
            queries, tl.where(real, position, -1), begin, tl.minimum(begin + span, tiles),
            kv_head, tl.load(row_end + row).to(tl.int64), keys, values,
            page_table + row * table_stride, key_stride, value_stride,
            first_position, scale, HEADS_IN_BLOCK, D, DP, DV, DVP, TILE,
        )  # fmt: skip
        place = (token.to(tl.int64) * split_stride + tl.program_id(2)) * (KV_HEADS * GROUP) + head
        tl.store(stats + place * 2, top, mask=real)
        tl.store(stats + place * 2 + 1, total, mask=real)
        dv = tl.arange(0, DVP)
        tl.store(
            parts + place[:, None] * DV + dv[None, :],
            mixed,
            mask=real[:, None] & (dv < DV)[None, :],
        )
