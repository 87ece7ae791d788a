"""Split attention for decode and verify rows: how the past is cut, and how parts are combined.

A token's tiles are cut into splits that programs fold side by side; `join` adds their partial
results. The size of a split follows from the token's own past, and splits are added in a fixed
order, so a token's bytes depend neither on its batch nor on how many splits a launch has room for.
Knows no keys and no values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millpond.ops.batch import ForwardBatch
from millpond.ops.triton.live import live
from millpond.ops.triton.overlap import await_previous, let_next_begin
from millpond.ops.triton.shared import rounded, sigmoid

PAGE = 64
"""Positions of a page."""

GROUPED = 4
"""Positions of a group, as many as the published indexer selects at a time. Other selections are
served as well, but with more positions read than selected."""

DOUBLED = tl.constexpr(16)
"""How often a split may be doubled: enough for any length."""

JOINED = 16
"""Splits that `join` adds at a time."""


def verify_places(batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Seats and numbers of drafts of verify rows, their first token, and tokens a row.

    Without verify rows the tensors are some of the batch, which are not used then.
    """
    verify = batch.verify
    if verify is None:
        return batch.seats, batch.seats, batch.first_verify_token, 1
    return verify.seats, verify.num_drafts, batch.first_verify_token, verify.width


@triton.jit
def is_filled(token, verify_seats, num_drafts, first_verify, verify_width):
    """Whether a token is real, not padding of a verify row."""
    place = token - first_verify
    row = tl.maximum(place, 0) // verify_width  # some row for tokens before them; not used
    seat = tl.load(verify_seats + row)
    drafts = tl.load(num_drafts + row)
    return (place < 0) | ((seat >= 0) & (place % verify_width <= drafts))


@triton.jit
def tiles_of(
    token, positions, verify_seats, num_drafts, first_verify, verify_width, size, num_pages,
    TILE: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """How many tiles a token folds: those of `size` groups, or of all its past if it is negative.

    0 for the padding of verify rows.
    """
    tiles = tl.load(positions + token).to(tl.int32) // TILE + 1
    filled = is_filled(token, verify_seats, num_drafts, first_verify, verify_width)
    tiles = tl.where(size < 0, tiles, (size * SIZE + TILE - 1) // TILE)
    return tl.minimum(tl.where(filled, tiles, 0), num_pages * (PAGE // TILE))


@triton.jit
def span_of(tiles, SPLIT: tl.constexpr, MOST: tl.constexpr):
    """Tiles of one split: SPLIT, doubled if that makes more than 8 splits, then until MOST do."""
    span = tl.where(tiles > 8 * SPLIT, 2 * SPLIT, SPLIT)
    for _ in tl.static_range(DOUBLED):  # unrolled: after a loop, each wgmma is waited for
        span = tl.where(span * MOST < tiles, 2 * span, span)
    return span


@triton.jit
def size_of(sizes, packed, listed, LISTS: tl.constexpr):
    """How many groups a token selects; negative: all of its past, as where nothing is listed."""
    size = -1
    if LISTS:
        size = tl.load(sizes + packed, mask=listed != 0, other=-1)
    return size


@triton.jit
def passed(mixed, gate, KEPT: tl.constexpr):
    """`mixed` times the sigmoid of `gate`, rounded as if the output had been stored in between."""
    share = rounded(sigmoid(gate), KEPT).to(tl.float32)
    return rounded(mixed, KEPT).to(tl.float32) * share


@live
def join(
    stats, parts, out, gate, gate_stride, gate_head, positions, verify_seats, num_drafts,
    first_verify, verify_width, first_token, sizes, listed, split_stride, num_pages,
    HEADS: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, TILE: tl.constexpr,
    PAGE: tl.constexpr, SIZE: tl.constexpr, LISTS: tl.constexpr, SPLIT: tl.constexpr,
    MOST: tl.constexpr, GATED: tl.constexpr, JOINED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one token and head, JOINED at a time; zeros where there is none.

    `stats` [singles, splits, heads, 2] fp32: maxima and sums of weights; `parts` [singles, splits,
    heads, DV] fp32: weighted sums of values.
    """
    if OVERLAP:
        let_next_begin()
        await_previous()
    token = tl.program_id(0)
    packed = (first_token + token).to(tl.int64)
    tiles = tiles_of(
        first_token + token, positions, verify_seats, num_drafts, first_verify, verify_width,
        size_of(sizes, packed, listed, LISTS), num_pages, TILE, PAGE, SIZE,
    )  # fmt: skip
    span = span_of(tiles, SPLIT, MOST)
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
    if GATED:
        passing = gate + packed * gate_stride + tl.program_id(1) * gate_head
        share = tl.load(passing + dv, mask=dv < DV, other=0.0).to(tl.float32)
        mixed = passed(mixed, share, out.dtype.element_ty)
    place = (packed * HEADS + tl.program_id(1)) * DV
    tl.store(out + place + dv, rounded(mixed, out.dtype.element_ty), mask=dv < DV)
