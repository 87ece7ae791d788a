"""Attention over paged keys and values: chunk form by query blocks, single tokens by splits.

Contract: `millpond.ops.reference.attention`. A query folds tiles of 64 positions, one page each, in
rising order from position 0; weights are rounded to the model dtype before they meet the values,
maxima and sums stay fp32. A single token's tiles are folded in splits whose size follows from its
own position alone and which are then added at fixed places: its bytes depend on no neighbour, nor
on how many splits a launch has room for. fp32 operands are multiplied as three TF32 products.

A selection is first turned into each token's list of groups of 4 positions that hold a selected
one; what a token then folds are tiles of 16 such groups in rising order, wherever they lie.
"""

from __future__ import annotations

from math import e, log2

import torch
import triton
import triton.language as tl

from millpond.ops.batch import ForwardBatch
from millpond.ops.triton.layer_choices import GQA, MLA, AttentionChoice, attention_choice
from millpond.ops.triton.live import live
from millpond.ops.triton.overlap import await_previous, let_next_begin, overlap
from millpond.ops.triton.shared import (
    UNFUSED,
    head_stride,
    power_of_two,
    product,
    rounded,
    row_of_block,
    sigmoid,
    slot_stride,
    token_stride,
)

TILE = 64
"""Positions per tile; equals the page size."""


JOINED = 16
"""Splits of a single token that are added at a time."""

GROUPED = 4
"""Positions of a group: the published indexer's pool. Any selection is right, this one is tight."""

LISTED = 1024
"""Groups that a listing program looks at together."""


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
    return _attend(q, key_pages, value_pages, batch, scale, first, None, gate, GQA)


def paged_mla(
    q_latent: torch.Tensor,
    latent_pages: torch.Tensor,
    *,
    batch: ForwardBatch,
    scale: float,
    selected: torch.Tensor | None,
) -> torch.Tensor:
    """As the reference. Latents that a token does not select are hardly read for it."""
    pages = latent_pages[:, None]
    return _attend(q_latent, pages, pages, batch, scale, 0, selected, None, MLA)


def _attend(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    batch: ForwardBatch,
    scale: float,
    first: int,
    selected: torch.Tensor | None,
    gate: torch.Tensor | None,
    choice: AttentionChoice,
) -> torch.Tensor:
    choice = attention_choice(choice, q.device)
    tokens, heads, dim = q.shape
    kv_heads, value_dim = key_pages.shape[1], value_pages.shape[-1]
    group = heads // kv_heads
    out = torch.empty((tokens, heads, value_dim), dtype=q.dtype, device=q.device)
    table = batch.page_table
    mask = groups = sizes = table
    if selected is not None:
        mask = selected.view(torch.uint8)
        groups, sizes = _listed(mask, batch)
    pages = (
        key_pages, value_pages, mask, groups, sizes, table, batch.row_start, batch.row_end,
        slot_stride(key_pages), slot_stride(value_pages),
        table.stride(0), mask.stride(0), table.shape[1], first, scale * log2(e),
    )  # fmt: skip
    passing = out if gate is None else gate
    gates = (passing, passing.stride(0), head_stride(passing))
    gated = {"GATED": gate is not None}
    shape = {
        "KV_HEADS": kv_heads, "GROUP": group, "D": dim, "DP": max(16, power_of_two(dim)),
        "DV": value_dim, "DVP": max(16, power_of_two(value_dim)),
        "SAME": value_pages is key_pages, "SELECTED": selected is not None,
        "TILE": TILE, "SIZE": GROUPED,
    }  # fmt: skip

    whole = min(power_of_two(group), choice.lines)
    # As many lines with a selection as without: a token that selects all of its past is multiplied
    # by the same instructions when nobody beside it has more past than can be selected.
    queries = 1 if selected is not None else choice.lines // whole
    block = choice.lines // queries
    if batch.prefill.num_rows:
        rows = batch.prefill.num_rows
        blocks = batch.num_prefill_tokens // queries + rows
        _chunk[(blocks, kv_heads * triton.cdiv(group, block))](
            q, out, *gates, batch.prefill.cu_seqlens, rows, *pages, token_stride(q),
            **shape, **gated, HEADS_IN_BLOCK=block, QUERIES=queries,
            num_warps=choice.chunk_warps, num_stages=choice.chunk_stages, **UNFUSED,
        )  # fmt: skip

    first_token, verify = batch.num_prefill_tokens, batch.verify
    singles = tokens - first_token
    if singles:
        splits = min(triton.cdiv(table.shape[1], choice.split_tiles), choice.max_splits)
        stats = torch.empty((singles, splits, heads, 2), dtype=torch.float32, device=q.device)
        parts = stats.new_empty((singles, splits, heads, value_dim))
        seats, drafts = (
            (batch.seats, batch.seats) if verify is None else (verify.seats, verify.num_drafts)
        )
        places = (
            batch.positions, batch.token_row, seats, drafts, first_token,
            batch.first_verify_token, 1 if verify is None else verify.width,
        )  # fmt: skip
        split = {"SPLIT": choice.split_tiles, "MOST": choice.max_splits}
        block = max(16, whole)
        _singles[(singles, kv_heads * triton.cdiv(group, block), splits)](
            q, stats, parts, *places, *pages, splits, token_stride(q),
            **shape, **split, HEADS_IN_BLOCK=block,
            num_warps=choice.single_warps, num_stages=choice.single_stages, **UNFUSED,
            **overlap(q.device),
        )  # fmt: skip
        _join[(singles, heads)](
            stats, parts, out, *gates, *places, sizes, splits, table.shape[1],
            HEADS=heads, DV=value_dim, DVP=shape["DVP"], TILE=TILE, SIZE=GROUPED,
            SELECTED=selected is not None, JOINED=JOINED, **split, **gated,
            num_warps=4, **UNFUSED, **overlap(q.device),
        )  # fmt: skip
    return out


def _listed(mask: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Of mask [T, P * 64] uint8: groups [T, P * 16] int32, rising, and how many there are [T]."""
    tokens, verify = mask.shape[0], batch.verify
    groups = torch.empty((tokens, mask.shape[1] // GROUPED), dtype=torch.int32, device=mask.device)
    sizes = torch.empty((tokens,), dtype=torch.int32, device=mask.device)
    seats, drafts = (
        (batch.seats, batch.seats) if verify is None else (verify.seats, verify.num_drafts)
    )
    if tokens:
        _list[(tokens,)](
            mask, groups, sizes, batch.positions, seats, drafts, batch.first_verify_token,
            1 if verify is None else verify.width, mask.stride(0), batch.page_table.shape[1],
            TILE=TILE, SIZE=GROUPED, BLOCK=LISTED, num_warps=4, **UNFUSED,
        )  # fmt: skip
    return groups, sizes


@live
def _list(
    selected, groups, sizes, positions, verify_seats, num_drafts, first_verify, verify_width,
    selected_stride, num_pages,
    TILE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The groups of SIZE positions of which one token selects any it sees."""
    token = tl.program_id(0).to(tl.int64)
    stop = tl.load(positions + token).to(tl.int32) + 1
    place = token - first_verify
    if place >= 0:
        filled = place % verify_width <= tl.load(num_drafts + place // verify_width)
        filled = filled & (tl.load(verify_seats + place // verify_width) >= 0)
        stop = tl.where(filled, stop, 0)
    stop = tl.minimum(stop, num_pages * TILE)
    count = 0
    for begin in range(0, (stop + SIZE - 1) // SIZE, BLOCK):
        group = begin + tl.arange(0, BLOCK)
        at = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        chosen = tl.load(selected + token * selected_stride + at, mask=at < stop, other=0)
        some = (tl.max(chosen.to(tl.int32), 1) > 0).to(tl.int32)
        rank = count + tl.cumsum(some, 0) - some
        tl.store(groups + token * num_pages * (TILE // SIZE) + rank, group, mask=some != 0)
        count += tl.sum(some, 0)
    tl.store(sizes + token, count)


@triton.jit
def _vectors(pages, base, entry, there, D: tl.constexpr, DP: tl.constexpr):
    """A tile's vectors [TILE, DP]: entries of a page at `base`, or of pages at bases of their own.

    Zero where nothing is.
    """
    d = tl.arange(0, DP)
    mask = there[:, None]
    if D != DP:
        mask = mask & (d < D)[None, :]
    at = (base + entry * D)[:, None] + d[None, :]
    return tl.load(pages + at, mask=mask, other=0.0)


@triton.jit
def _fold(
    queries, position, top, total, mixed, tile, head, end, groups, size, mask_of_token,
    keys, values, pages_of_row, key_stride, value_stride, first_position, scale,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    SAME: tl.constexpr, SELECTED: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr,
    SEEN: tl.constexpr,
):  # fmt: skip
    """One tile into the running maximum (of scores times log2 e), sum and mix of every line.

    SEEN: every line sees all of it.
    """
    lane = tl.arange(0, TILE)
    if SELECTED:
        listed = tile * (TILE // SIZE) + lane // SIZE
        group = tl.load(groups + listed, mask=listed < size, other=0)
        at = group * SIZE + lane % SIZE
        chosen = tl.load(mask_of_token + at, mask=(listed < size) & (at < end), other=0) != 0
        page = tl.load(pages_of_row + at // TILE, mask=chosen, other=-1).to(tl.int64)
        there = chosen & (page >= 0)
        entry = at % TILE
    else:
        at = tile * TILE + lane
        page = tl.load(pages_of_row + tile).to(tl.int64)
        there = at < tl.where(page >= 0, end, 0)
        entry = lane
    page = tl.maximum(page, 0)
    k = _vectors(keys, page * key_stride + head * (TILE * D), entry, there, D, DP)
    scores = product(queries, tl.trans(k), queries.dtype, "tf32x3")
    if not SEEN:
        seen = (at[None, :] <= position[:, None]) & (at >= first_position)[None, :]
        if SELECTED:
            seen = seen & chosen[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1) * scale)
    finite = tl.where(new == float("-inf"), 0.0, new)
    shrink = tl.exp2(top - finite)
    weights = tl.exp2(tl.fma(scores, scale, -finite[:, None]))
    if SAME:
        v = k
    else:
        v = _vectors(values, page * value_stride + head * (TILE * DV), entry, there, DV, DVP)
    total = total * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None] + product(weights, v, queries.dtype, "tf32x3")
    return new, total, mixed


@triton.jit
def _fold_range(
    queries, position, begin, full, stop, head, end, groups, size, mask_of_token,
    keys, values, pages_of_row, key_stride, value_stride, first_position, scale,
    LINES: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    SAME: tl.constexpr, SELECTED: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Tiles begin .. stop - 1, in that order; every line sees all of those before `full`."""
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    mixed = tl.zeros([LINES, DVP], tl.float32)
    for tile in range(begin, full):
        top, total, mixed = _fold(
            queries, position, top, total, mixed, tile, head, end, groups, size, mask_of_token,
            keys, values, pages_of_row, key_stride, value_stride, first_position, scale,
            D, DP, DV, DVP, SAME, SELECTED, TILE, SIZE, True,
        )  # fmt: skip
    for tile in range(full, stop):
        top, total, mixed = _fold(
            queries, position, top, total, mixed, tile, head, end, groups, size, mask_of_token,
            keys, values, pages_of_row, key_stride, value_stride, first_position, scale,
            D, DP, DV, DVP, SAME, SELECTED, TILE, SIZE, False,
        )  # fmt: skip
    return top, total, mixed


@triton.jit
def _passed(mixed, gate, KEPT: tl.constexpr):
    """What a sigmoid of `gate` lets through; roundings as of an output that was stored."""
    share = rounded(sigmoid(gate), KEPT).to(tl.float32)
    return rounded(mixed, KEPT).to(tl.float32) * share


@live
def _chunk(
    q, out, gate, gate_stride, gate_head, cu_seqlens, count,
    keys, values, selected, groups, sizes, page_table,
    row_start, row_end,
    key_stride, value_stride, table_stride, selected_stride, num_pages, first_position, scale,
    q_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, SAME: tl.constexpr, SELECTED: tl.constexpr,
    TILE: tl.constexpr, SIZE: tl.constexpr, GATED: tl.constexpr,
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
        full = ((start + first + 1) // TILE).to(tl.int32)
        size = 0
        if SELECTED:
            size = tl.load(sizes + begin + first)
            stop = (size * SIZE + TILE - 1) // TILE
            full = 0
        full = tl.where(first_position > 0, 0, tl.minimum(full, stop))
        _top, total, mixed = _fold_range(
            queries, tl.where(real, start + step, -1), 0, full, stop, kv_head,
            tl.load(row_end + row).to(tl.int64),
            groups + (begin + first) * num_pages * (TILE // SIZE), size,
            selected + (begin + first) * selected_stride,
            keys, values, page_table + row.to(tl.int64) * table_stride, key_stride, value_stride,
            first_position, scale, LINES, D, DP, DV, DVP, SAME, SELECTED, TILE, SIZE,
        )  # fmt: skip
        mixed = mixed * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
        dv = tl.arange(0, DVP)
        place = (begin + step)[:, None] * (KV_HEADS * GROUP * DV) + head[:, None] * DV
        here = real[:, None] & (dv < DV)[None, :]
        if GATED:
            passing = (begin + step)[:, None] * gate_stride + head[:, None] * gate_head
            share = tl.load(gate + passing + dv[None, :], mask=here, other=0.0)
            mixed = _passed(mixed, share.to(tl.float32), out.dtype.element_ty)
        tl.store(out + place + dv[None, :], rounded(mixed, out.dtype.element_ty), mask=here)


@triton.jit
def _tiles_of(
    token, positions, verify_seats, num_drafts, first_token, first_verify, verify_width, sizes,
    num_pages, TILE: tl.constexpr, SELECTED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Tiles that a single token folds; none for the padding of verify rows."""
    if SELECTED:
        return (tl.load(sizes + first_token + token) * SIZE + TILE - 1) // TILE
    tiles = tl.load(positions + first_token + token).to(tl.int32) // TILE + 1
    place = token + first_token - first_verify
    row = tl.maximum(place, 0) // verify_width  # of any row, where there is none to be asked
    seat = tl.load(verify_seats + row)
    drafts = tl.load(num_drafts + row)
    filled = (place < 0) | ((seat >= 0) & (place % verify_width <= drafts))
    return tl.minimum(tl.where(filled, tiles, 0), num_pages)


@triton.jit
def _span_of(tiles, SPLIT: tl.constexpr, MOST: tl.constexpr):
    """Tiles of one split: SPLIT, doubled beyond 8 splits, then until MOST are enough."""
    span = SPLIT
    if tiles > 8 * SPLIT:
        span = 2 * SPLIT
    while span * MOST < tiles:
        span *= 2
    return span


@live
def _singles(
    q, stats, parts, positions, token_row, verify_seats, num_drafts, first_token, first_verify,
    verify_width, keys, values, selected, groups, sizes, page_table,
    row_start, row_end,
    key_stride, value_stride, table_stride, selected_stride, num_pages, first_position, scale,
    split_stride, q_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, SAME: tl.constexpr, SELECTED: tl.constexpr,
    TILE: tl.constexpr, SIZE: tl.constexpr, SPLIT: tl.constexpr, MOST: tl.constexpr,
    HEADS_IN_BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token by heads that share keys, one split of its past."""
    BLOCKS: tl.constexpr = (GROUP + HEADS_IN_BLOCK - 1) // HEADS_IN_BLOCK
    if OVERLAP:
        let_next_begin()
        await_previous()
    token = tl.program_id(0)
    packed = (first_token + token).to(tl.int64)
    row = tl.load(token_row + packed).to(tl.int64)
    tiles = _tiles_of(
        token, positions, verify_seats, num_drafts, first_token, first_verify, verify_width,
        sizes, num_pages, TILE, SELECTED, SIZE,
    )  # fmt: skip
    span = _span_of(tiles, SPLIT, MOST)
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
        position = tl.load(positions + packed).to(tl.int64)
        size = 0
        if SELECTED:
            size = tl.load(sizes + packed)
        top, total, mixed = _fold_range(
            queries, tl.where(real, position, -1), begin, begin, tl.minimum(begin + span, tiles),
            kv_head,
            tl.load(row_end + row).to(tl.int64), groups + packed * num_pages * (TILE // SIZE), size,
            selected + packed * selected_stride,
            keys, values, page_table + row * table_stride, key_stride, value_stride,
            first_position, scale, HEADS_IN_BLOCK, D, DP, DV, DVP, SAME, SELECTED, TILE, SIZE,
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


@live
def _join(
    stats, parts, out, gate, gate_stride, gate_head, positions, token_row, verify_seats, num_drafts,
    first_token, first_verify, verify_width, sizes, split_stride, num_pages,
    HEADS: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, TILE: tl.constexpr,
    SIZE: tl.constexpr, SELECTED: tl.constexpr, SPLIT: tl.constexpr, MOST: tl.constexpr,
    GATED: tl.constexpr, JOINED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The splits of one token and head, JOINED at a time; zeros where there is none."""
    if OVERLAP:
        let_next_begin()
        await_previous()
    token = tl.program_id(0)
    tiles = _tiles_of(
        token, positions, verify_seats, num_drafts, first_token, first_verify, verify_width,
        sizes, num_pages, TILE, SELECTED, SIZE,
    )  # fmt: skip
    span = _span_of(tiles, SPLIT, MOST)
    splits = (tiles + span - 1) // span
    dv = tl.arange(0, DVP)
    lane = tl.arange(0, JOINED)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([DVP], tl.float32)
    for first in range(0, splits, JOINED):
        split = first + lane
        here = split < splits
        place = (token.to(tl.int64) * split_stride + split) * HEADS + tl.program_id(1)
        other = tl.load(stats + place * 2, mask=here, other=float("-inf"))
        weight = tl.load(stats + place * 2 + 1, mask=here, other=0.0)
        part = tl.load(
            parts + place[:, None] * DV + dv[None, :],
            mask=here[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        new = tl.maximum(top, tl.max(other, 0))
        finite = tl.where(new == float("-inf"), 0.0, new)
        shrink, grow = tl.exp2(top - finite), tl.exp2(other - finite)
        total = total * shrink + tl.sum(weight * grow, 0)
        mixed = mixed * shrink + tl.sum(part * grow[:, None], 0)
        top = new
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    packed = (first_token + token).to(tl.int64)
    if GATED:
        passing = gate + packed * gate_stride + tl.program_id(1) * gate_head
        share = tl.load(passing + dv, mask=dv < DV, other=0.0).to(tl.float32)
        mixed = _passed(mixed, share, out.dtype.element_ty)
    place = (packed * HEADS + tl.program_id(1)) * DV
    tl.store(out + place + dv, rounded(mixed, out.dtype.element_ty), mask=dv < DV)
