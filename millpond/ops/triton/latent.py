"""Latent attention (MLA) over paged latents, with or without a selection of positions.

Contract: `millpond.ops.reference.attention`. A latent is both key and value. A program has one
token and a block of its heads, and folds positions tile by tile in rising order.

A token that attends to all of its past finds its latents by the page table; one that selects finds
them by a list of groups of 4 positions, each with the place of its latents and a bit for each that
is selected. Both ways differ in addresses only and are one compiled kernel, so that a token that
selects all of its past has exactly the bytes of one that does not select, whoever is in the batch.
Two kernels would not have that: in which order Triton sums a matrix product depends on the code
around it, even on the width of an integer that an address is computed from.
"""

from __future__ import annotations

from math import e, log2

import torch
import triton
import triton.language as tl

from millpond.ops.batch import ForwardBatch
from millpond.ops.triton.layer_choices import MLA, attention_choice
from millpond.ops.triton.live import live
from millpond.ops.triton.overlap import await_previous, let_next_begin, overlap
from millpond.ops.triton.shared import (
    UNFUSED,
    power_of_two,
    product,
    rounded,
    slot_stride,
    token_stride,
)
from millpond.ops.triton.splits import (
    GROUPED,
    JOINED,
    PAGE,
    is_filled,
    join,
    size_of,
    span_of,
    tiles_of,
    verify_places,
)

LISTED = 1024
"""Groups that the kernel which lists them looks at in one pass."""

MOST_PAGES = 2**31 // (PAGE // GROUPED << GROUPED)
"""The most pages with which a group's number and its four bits fit 31 bits."""


def paged_mla(
    q_latent: torch.Tensor,
    latent_pages: torch.Tensor,
    *,
    batch: ForwardBatch,
    scale: float,
    selected: torch.Tensor | None,
) -> torch.Tensor:
    """As the reference; latents that no position of a listed group needs are not read.

    Raises `ValueError` when the pool has more than `MOST_PAGES` pages.
    """
    if latent_pages.shape[0] > MOST_PAGES:
        raise ValueError(f"{latent_pages.shape[0]} pages: lists reach {MOST_PAGES}")
    choice = attention_choice(MLA, q_latent.device)
    tokens, heads, dim = q_latent.shape
    num_pages = batch.page_table.shape[1]
    out = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
    table = batch.page_table.view(torch.int32)
    groups = sizes = table
    if selected is not None:
        groups, sizes = _listed(selected.view(torch.uint8), batch)
    pages = (
        latent_pages, groups, sizes, int(selected is not None), table, batch.positions,
        batch.token_row, slot_stride(latent_pages), table.stride(0), num_pages,
        scale * log2(e), token_stride(q_latent),
    )  # fmt: skip
    block = max(16, min(power_of_two(heads), choice.lines))
    shape = {
        "HEADS": heads, "D": dim, "DP": max(16, power_of_two(dim)), "PAGE": PAGE,
        "SIZE": GROUPED, "HEADS_IN_BLOCK": block,
    }  # fmt: skip
    blocks, first_token = triton.cdiv(heads, block), batch.num_prefill_tokens
    if first_token:
        _prompts[(first_token, blocks)](
            q_latent, out, *pages, **shape, TILE=PAGE, THREADS=32 * choice.chunk_warps,
            num_warps=choice.chunk_warps, num_stages=choice.chunk_stages, **UNFUSED,
        )  # fmt: skip
    singles = tokens - first_token
    if singles:
        tiles = num_pages * (PAGE // choice.single_tile)
        splits = min(triton.cdiv(tiles, choice.split_tiles), choice.max_splits)
        stats = torch.empty((singles, splits, heads, 2), dtype=torch.float32, device=out.device)
        parts = stats.new_empty((singles, splits, heads, dim))
        places = (*verify_places(batch), first_token)
        split = {
            "SPLIT": choice.split_tiles, "MOST": choice.max_splits, "TILE": choice.single_tile,
        }  # fmt: skip
        _singles[(singles, blocks, splits)](
            q_latent, stats, parts, *places, *pages, splits, **shape, **split,
            THREADS=32 * choice.single_warps,
            num_warps=choice.single_warps, num_stages=choice.single_stages, **UNFUSED,
            **overlap(out.device),
        )  # fmt: skip
        join[(singles, heads)](
            stats, parts, out, out, 0, 0, batch.positions, *places, sizes,
            int(selected is not None), splits, num_pages,
            HEADS=heads, DV=dim, DVP=shape["DP"], PAGE=PAGE, SIZE=GROUPED, LISTS=True,
            JOINED=JOINED, GATED=False, **split, num_warps=4, **UNFUSED, **overlap(out.device),
        )  # fmt: skip
    return out


def _listed(mask: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The groups that a mask selects: [T, P * 16] int32, rising, and their number [T] int32.

    `mask` is [T, P * 64] uint8. The number is -1 where a token selects all it sees. A group
    is (page * 16 + its number in the page) << 4, plus a bit for each position selected.
    """
    tokens = mask.shape[0]
    groups = torch.empty((tokens, mask.shape[1] // GROUPED), dtype=torch.int32, device=mask.device)
    sizes = torch.empty((tokens,), dtype=torch.int32, device=mask.device)
    table = batch.page_table
    if tokens:
        _list[(tokens,)](
            mask, groups, sizes, batch.positions, batch.token_row, *verify_places(batch), table,
            mask.stride(0), table.stride(0), table.shape[1],
            PAGE=PAGE, SIZE=GROUPED, BLOCK=LISTED, num_warps=4, **UNFUSED,
        )  # fmt: skip
    return groups, sizes


@live
def _list(
    selected, groups, sizes, positions, token_row, verify_seats, num_drafts, first_verify,
    verify_width, page_table, selected_stride, table_stride, num_pages,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """List one token's groups of SIZE positions with any that it selects and sees.

    Their number is -1 when it selects all that it sees.
    """
    token = tl.program_id(0).to(tl.int64)
    stop = tl.load(positions + token).to(tl.int32) + 1
    filled = is_filled(token, verify_seats, num_drafts, first_verify, verify_width)
    stop = tl.minimum(tl.where(filled, stop, 0), num_pages * PAGE)
    pages_of_row = page_table + tl.load(token_row + token).to(tl.int64) * table_stride
    count = 0
    chosen_in_all = 0
    for begin in range(0, (stop + SIZE - 1) // SIZE, BLOCK):
        group = begin + tl.arange(0, BLOCK)
        member = tl.arange(0, SIZE)[None, :]
        at = group[:, None] * SIZE + member
        chosen = tl.load(selected + token * selected_stride + at, mask=at < stop, other=0) != 0
        bits = tl.sum(chosen.to(tl.int32) << member, 1)
        page = tl.load(pages_of_row + group * SIZE // PAGE, mask=bits != 0, other=-1).to(tl.int32)
        some = (page >= 0).to(tl.int32)
        rank = count + tl.cumsum(some, 0) - some
        place = page * (PAGE // SIZE) + group % (PAGE // SIZE)
        tl.store(
            groups + token * num_pages * (PAGE // SIZE) + rank, (place << SIZE) | bits,
            mask=some != 0,
        )  # fmt: skip
        count += tl.sum(some, 0)
        chosen_in_all += tl.sum(tl.sum(chosen.to(tl.int32), 1), 0)
    tl.store(sizes + token, tl.where(chosen_in_all == stop, -1, count))


@triton.jit
def _past(
    packed, size, position, groups, page_table, token_row, table_stride, num_pages,
    PAGE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """How many positions a token folds, and the address of its page table or list of groups."""
    row = tl.load(token_row + packed).to(tl.int64)
    whole = size < 0
    count = tl.where(whole, tl.minimum(position + 1, num_pages * PAGE), size * SIZE)
    words = tl.where(
        whole, page_table + row * table_stride, groups + packed * num_pages * (PAGE // SIZE)
    )
    return count, words


@triton.jit
def _words(
    tile, count, whole, words,
    TILE: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """The group of each position of a tile [TILE]; negative where the position is not attended to.

    Every thread loads one. If fewer did, Triton would repeat the load for each layout it needs.
    """
    PER_PAGE: tl.constexpr = PAGE // SIZE
    lane = tl.arange(0, TILE)[:, None] + tl.zeros([1, THREADS // TILE], tl.int32)
    group = lane // SIZE
    # A page's number is the lower half of its 64 bits.
    first = tl.where(whole, tile // (PAGE // TILE) * 2, tile * (TILE // SIZE))
    word = tl.load(
        words + first + tl.where(whole, 0, group), mask=tile * TILE + lane < count, other=-1
    )
    in_page = tile % (PAGE // TILE) * (TILE // SIZE) + group
    every = (1 << SIZE) - 1
    word = tl.where(whole, word * (PER_PAGE << SIZE) + (in_page << SIZE) + every, word)
    return tl.max(tl.where((word >> (lane % SIZE)) & 1 != 0, word, -1), 1)


@triton.jit
def _places(
    word, page_stride,
    D: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Offsets, in elements, of the latents of a tile's positions [TILE], given their groups."""
    PER_PAGE: tl.constexpr = PAGE // SIZE
    group = word >> SIZE  # shifted and masked, for a division would ask for the sign
    page = group >> (PER_PAGE.bit_length() - 1)
    entry = (group & (PER_PAGE - 1)) * SIZE + tl.arange(0, TILE) % SIZE
    return page.to(tl.int64) * page_stride + entry * D


@triton.jit
def _fold_range(
    queries, begin, stop, count, whole, words, latents, page_stride, scale,
    LINES: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    PAGE: tl.constexpr, SIZE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Online softmax over tiles begin .. stop - 1 of one token, in that order.

    Returns of every line (head) the maximum of scores times log2 e, the sum of weights, and the
    weighted sum of latents, all fp32.
    """
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    mixed = tl.zeros([LINES, DP], tl.float32)
    d = tl.arange(0, DP)
    word = _words(begin, count, whole, words, TILE, PAGE, SIZE, THREADS)
    for tile in range(begin, stop):
        place, seen = _places(word, page_stride, D, TILE, PAGE, SIZE), word >= 0
        word = _words(tile + 1, count, whole, words, TILE, PAGE, SIZE, THREADS)
        there = seen[:, None]
        if D != DP:
            there = there & (d < D)[None, :]
        latent = tl.load(latents + place[:, None] + d[None, :], mask=there, other=0.0)
        scores = product(queries, tl.trans(latent), queries.dtype, "tf32x3")
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1) * scale)
        finite = tl.where(new == float("-inf"), 0.0, new)
        shrink = tl.exp2(top - finite)
        weights = tl.exp2(tl.fma(scores, scale, -finite[:, None]))
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + product(weights, latent, queries.dtype, "tf32x3")
        top = new
    return top, total, mixed


@triton.jit
def _queries(
    q, packed, q_stride, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    HEADS_IN_BLOCK: tl.constexpr,
):  # fmt: skip
    """One token's queries of a block of heads [HEADS_IN_BLOCK, DP], and these heads."""
    head = tl.program_id(1) * HEADS_IN_BLOCK + tl.arange(0, HEADS_IN_BLOCK)
    d = tl.arange(0, DP)
    queries = tl.load(
        q + packed * q_stride + head[:, None] * D + d[None, :],
        mask=(head < HEADS)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    return queries, head


@live
def _prompts(
    q, out, latents, groups, sizes, listed, page_table, positions, token_row, page_stride,
    table_stride, num_pages, scale, q_stride,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    PAGE: tl.constexpr, SIZE: tl.constexpr, HEADS_IN_BLOCK: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """One token of a prompt row: its output over all that it attends to."""
    packed = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)  # the longest pasts first
    size = size_of(sizes, packed, listed, True)
    count, words = _past(
        packed, size, tl.load(positions + packed).to(tl.int32), groups, page_table, token_row,
        table_stride, num_pages, PAGE, SIZE,
    )  # fmt: skip
    queries, head = _queries(q, packed, q_stride, HEADS, D, DP, HEADS_IN_BLOCK)
    _top, total, mixed = _fold_range(
        queries, 0, (count + TILE - 1) // TILE, count, size < 0, words, latents, page_stride,
        scale, HEADS_IN_BLOCK, D, DP, TILE, PAGE, SIZE, THREADS,
    )  # fmt: skip
    mixed = mixed * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    d = tl.arange(0, DP)
    tl.store(
        out + (packed * HEADS + head)[:, None] * D + d[None, :],
        rounded(mixed, out.dtype.element_ty),
        mask=(head < HEADS)[:, None] & (d < D)[None, :],
    )


@live
def _singles(
    q, stats, parts, verify_seats, num_drafts, first_verify, verify_width, first_token,
    latents, groups, sizes, listed, page_table, positions, token_row, page_stride,
    table_stride, num_pages, scale, q_stride, split_stride,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    PAGE: tl.constexpr, SIZE: tl.constexpr, HEADS_IN_BLOCK: tl.constexpr, THREADS: tl.constexpr,
    SPLIT: tl.constexpr, MOST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token of a decode or verify row: partial results over one split of its tiles."""
    if OVERLAP:
        let_next_begin()
        await_previous()
    token = tl.program_id(0)
    packed = (first_token + token).to(tl.int64)
    size = size_of(sizes, packed, listed, True)
    tiles = tiles_of(
        first_token + token, positions, verify_seats, num_drafts, first_verify, verify_width, size,
        num_pages, TILE, PAGE, SIZE,
    )  # fmt: skip
    span = span_of(tiles, SPLIT, MOST)
    begin = tl.program_id(2) * span
    if begin < tiles:
        count, words = _past(
            packed, size, tl.load(positions + packed).to(tl.int32), groups, page_table,
            token_row, table_stride, num_pages, PAGE, SIZE,
        )  # fmt: skip
        queries, head = _queries(q, packed, q_stride, HEADS, D, DP, HEADS_IN_BLOCK)
        top, total, mixed = _fold_range(
            queries, begin, tl.minimum(begin + span, tiles), count, size < 0, words, latents,
            page_stride, scale, HEADS_IN_BLOCK, D, DP, TILE, PAGE, SIZE, THREADS,
        )  # fmt: skip
        place = (token.to(tl.int64) * split_stride + tl.program_id(2)) * HEADS + head
        real = head < HEADS
        d = tl.arange(0, DP)
        tl.store(stats + place * 2, top, mask=real)
        tl.store(stats + place * 2 + 1, total, mask=real)
        tl.store(
            parts + place[:, None] * D + d[None, :], mixed,
            mask=real[:, None] & (d < D)[None, :],
        )  # fmt: skip
