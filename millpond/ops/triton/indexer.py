"""The pooled-key indexer: pools and tails written, pools scored and the best of them selected.

Contract: `millpond.ops.reference.indexer`. Scores are fp32 sums over heads of fp32 products; which
pools are the best is decided exactly on their bits: the threshold is found 8 bits at a time by
counting, equal scores go to the lower pool. A token's selection depends on no other token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millpond.ops.batch import ForwardBatch
from millpond.ops.triton.live import live
from millpond.ops.triton.shared import (
    LAUNCH,
    power_of_two,
    product,
    rounded,
    row_of_block,
    slot_stride,
    token_stride,
)
from millpond.ops.triton.splits import PAGE

SCORED = 64
"""Pools that a program scores."""

LINES = 128
"""Tokens by heads that it scores them for, of a prompt row."""

COUNTED = 2048
"""Scores that a program of the selection looks at together. None of these is measured yet."""


def pool_keys(
    key: torch.Tensor,
    gate: torch.Tensor,
    position_bias: torch.Tensor,
    *,
    pooled_pages: torch.Tensor,
    tails: torch.Tensor,
    batch: ForwardBatch,
) -> None:
    """As the reference, in two launches: pools read the tails that the second one overwrites."""
    count, size = key.shape
    pool, verify = position_bias.shape[0], batch.verify
    if not count:
        return
    shape = {
        "D": size, "DP": power_of_two(size), "POOL": pool, "RING": tails.shape[1],
    }  # fmt: skip
    rows = (batch.positions, batch.token_row, batch.seats)
    strides = (token_stride(key), token_stride(gate), slot_stride(tails))
    _pools[(count,)](
        key, gate, position_bias.contiguous(), pooled_pages, tails, *rows,
        batch.token_page, batch.token_offset, batch.row_start,
        *strides, slot_stride(pooled_pages), **shape, num_warps=1, **LAUNCH,
    )  # fmt: skip
    seats, drafts = (
        (batch.seats, batch.seats) if verify is None else (verify.seats, verify.num_drafts)
    )
    _tails[(count,)](
        key, gate, tails, *rows, batch.row_end, seats, drafts, batch.first_verify_token,
        1 if verify is None else verify.width, *strides, **shape, num_warps=1, **LAUNCH,
    )  # fmt: skip


def select(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    *,
    pooled_pages: torch.Tensor,
    batch: ForwardBatch,
    pool: int,
    top_k: int,
    scale: float,
    weight_scale: float = 1.0,
    first: int = 0,
) -> torch.Tensor | None:
    """As the reference, in two launches: scores of all pools, then the selection."""
    keep = top_k // pool
    if not first and all(end // pool <= keep for end in batch.ends):
        return None
    tokens, heads, size = query.shape
    table = batch.page_table
    most = table.shape[1] * (PAGE // pool)
    scores = torch.empty((tokens, most), dtype=torch.float32, device=query.device)
    selected = torch.empty((tokens, most * pool), dtype=torch.uint8, device=query.device)
    if tokens:
        padded = max(16, power_of_two(heads))
        queries = max(1, LINES // padded)
        inputs = (
            query, head_weights, pooled_pages, scores, batch.positions,
            batch.token_row, batch.row_end, table, table.stride(0), most, token_stride(query),
            token_stride(head_weights), slot_stride(pooled_pages), scale, weight_scale,
        )  # fmt: skip
        shape = {
            "HEADS": heads, "HP": padded, "D": size, "DP": max(16, power_of_two(size)),
            "POOL": pool, "TILE": PAGE, "SCORED": SCORED,
        }  # fmt: skip
        rows, first_token = batch.prefill.num_rows, batch.num_prefill_tokens
        ranges, cu_seqlens = triton.cdiv(most, SCORED), batch.prefill.cu_seqlens
        if rows:
            _scores[(ranges, first_token // queries + rows)](
                *inputs, cu_seqlens, rows, 0,
                **shape, CHUNK=True, QUERIES=queries, num_warps=4, **LAUNCH,
            )  # fmt: skip
        if tokens > first_token:
            _scores[(ranges, tokens - first_token)](
                *inputs, cu_seqlens, rows, first_token,
                **shape, CHUNK=False, QUERIES=1, num_warps=4, **LAUNCH,
            )  # fmt: skip
        _selection[(tokens,)](
            scores, selected, batch.positions, most, first,
            KEEP=keep, POOL=pool, BLOCK=COUNTED, num_warps=8, **LAUNCH,
        )  # fmt: skip
    return selected.view(torch.bool)


@live
def _pools(
    key, gate, position_bias, pooled_pages, tails, positions, token_row, row_seats, token_page,
    token_offset, row_start, key_stride, gate_stride, tail_stride, page_stride,
    D: tl.constexpr, DP: tl.constexpr, POOL: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """The key of the pool that one token completes, if it does."""
    KEPT: tl.constexpr = key.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    page = tl.load(token_page + token).to(tl.int64)
    if (page >= 0) & ((position + 1) % POOL == 0):
        row = tl.load(token_row + token).to(tl.int64)
        seat = tl.load(row_seats + row).to(tl.int64)
        start = tl.load(row_start + row).to(tl.int64)
        d = tl.arange(0, DP)
        top = tl.full([DP], float("-inf"), tl.float32)
        for member in tl.static_range(POOL):
            _, logit = _member(
                key, gate, position_bias, tails, token, position, start, seat, member, d,
                key_stride, gate_stride, tail_stride, D, POOL, RING,
            )  # fmt: skip
            top = tl.maximum(top, logit)
        total = tl.zeros([DP], tl.float32)
        for member in tl.static_range(POOL):
            _, logit = _member(
                key, gate, position_bias, tails, token, position, start, seat, member, d,
                key_stride, gate_stride, tail_stride, D, POOL, RING,
            )  # fmt: skip
            total += tl.exp(logit - top)
        pooled = tl.zeros([DP], tl.float32)
        for member in tl.static_range(POOL):
            value, logit = _member(
                key, gate, position_bias, tails, token, position, start, seat, member, d,
                key_stride, gate_stride, tail_stride, D, POOL, RING,
            )  # fmt: skip
            share = rounded(tl.exp(logit - top) / total, KEPT).to(tl.float32)
            pooled += rounded(share * value, KEPT).to(tl.float32)
        place = tl.load(token_offset + token).to(tl.int64) // POOL
        tl.store(
            pooled_pages + page * page_stride + place * D + d,
            rounded(pooled, pooled_pages.dtype.element_ty),
            mask=d < D,
        )


@triton.jit
def _member(
    key, gate, position_bias, tails, token, position, start, seat, member, d,
    key_stride, gate_stride, tail_stride,
    D: tl.constexpr, POOL: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Key and gate logit of a pool's member: of this forward, or from the seat's tail."""
    behind = POOL - 1 - member
    at = position - behind
    here = d < tl.where(at >= start, D, 0)
    there = d < tl.where((at < start) & (seat >= 0), D, 0)
    own = tl.maximum(token - behind, 0)
    tail = tails + tl.maximum(seat, 0) * tail_stride + (at % RING) * (2 * D) + d
    value = tl.load(key + own * key_stride + d, mask=here, other=0.0).to(tl.float32)
    logit = tl.load(gate + own * gate_stride + d, mask=here, other=0.0).to(tl.float32)
    old_value = tl.load(tail, mask=there, other=0.0).to(tl.float32)
    old_logit = tl.load(tail + D, mask=there, other=0.0).to(tl.float32)
    bias = tl.load(position_bias + member * D + d, mask=d < D, other=0.0).to(tl.float32)
    inside = at >= start
    return tl.where(inside, value, old_value), tl.where(inside, logit, old_logit) + bias


@live
def _tails(
    key, gate, tails, positions, token_row, row_seats, row_end, verify_seats, num_drafts,
    first_verify, verify_width, key_stride, gate_stride, tail_stride,
    D: tl.constexpr, DP: tl.constexpr, POOL: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Key and gate of one token into its seat's tail, if its pool may stay open."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(token_row + token).to(tl.int64)
    seat = tl.load(row_seats + row).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    end = tl.load(row_end + row).to(tl.int64)
    kept = position >= end - end % POOL
    place = token - first_verify
    if place >= 0:
        drafts = tl.load(num_drafts + place // verify_width)
        filled = place % verify_width <= drafts
        kept = filled & (tl.load(verify_seats + place // verify_width) >= 0)
    if kept & (seat >= 0):
        d = tl.arange(0, DP)
        tail = tails + seat * tail_stride + (position % RING) * (2 * D) + d
        TAIL: tl.constexpr = tails.dtype.element_ty
        value = tl.load(key + token * key_stride + d, mask=d < D, other=0.0).to(tl.float32)
        logit = tl.load(gate + token * gate_stride + d, mask=d < D, other=0.0).to(tl.float32)
        tl.store(tail, rounded(value, TAIL), mask=d < D)
        tl.store(tail + D, rounded(logit, TAIL), mask=d < D)


@live
def _scores(
    query, head_weights, pooled_pages, scores, positions, token_row, row_end, page_table,
    table_stride, num_pools, query_stride, weight_stride, page_stride, scale, weight_scale,
    cu_seqlens, count, first_token,
    HEADS: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    POOL: tl.constexpr, TILE: tl.constexpr, SCORED: tl.constexpr, CHUNK: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    """SCORED pools for QUERIES tokens of a prompt row, or for a single token."""
    PER_PAGE: tl.constexpr = TILE // POOL
    if CHUNK:
        row = row_of_block(cu_seqlens, count, tl.program_id(1), QUERIES).to(tl.int64)
        begin = tl.load(cu_seqlens + row).to(tl.int64)
        first = begin + (tl.program_id(1) - (begin // QUERIES + row)) * QUERIES
        stop = tl.load(cu_seqlens + row + 1).to(tl.int64)
    else:
        first = (first_token + tl.program_id(1)).to(tl.int64)
        row = tl.load(token_row + first).to(tl.int64)
        stop = first + 1
    token = first + tl.arange(0, QUERIES)
    visible = tl.load(positions + token, mask=token < stop, other=-1).to(tl.int64) + 1
    if tl.program_id(0) * SCORED < tl.max(visible, 0) // POOL:
        pool = tl.program_id(0) * SCORED + tl.arange(0, SCORED)
        end = tl.load(row_end + row).to(tl.int64)
        page = tl.load(
            page_table + row * table_stride + pool // PER_PAGE, mask=pool < num_pools, other=-1
        ).to(tl.int64)
        d = tl.arange(0, DP)
        there = (page >= 0) & (pool * POOL + (POOL - 1) < end)
        keys = tl.load(
            pooled_pages
            + tl.maximum(page, 0)[:, None] * page_stride
            + (pool % PER_PAGE)[:, None] * D
            + d[None, :],
            mask=there[:, None] & (d < D)[None, :],
            other=0.0,
        )
        line = tl.arange(0, QUERIES * HP)
        owner = first + line // HP
        head = line % HP
        real = (owner < stop) & (head < HEADS)
        queries = tl.load(
            query + owner[:, None] * query_stride + head[:, None] * D + d[None, :],
            mask=real[:, None] & (d < D)[None, :],
            other=0.0,
        )
        weights = tl.load(head_weights + owner * weight_stride + head, mask=real, other=0.0)
        weights = weights.to(tl.float32) * weight_scale
        dots = product(queries, tl.trans(keys), queries.dtype, "tf32x3") * scale
        dots = weights[:, None] * tl.where(dots < 0.0, 0.0, dots)  # no maximum: a NaN stays one
        found = tl.sum(tl.reshape(dots, [QUERIES, HP, SCORED]), 1)
        tl.store(
            scores + token[:, None] * num_pools + pool[None, :],
            found,
            mask=(token < stop)[:, None] & (pool < num_pools)[None, :],
        )


@triton.jit
def _ranks(scores, pool, candidates, first, POOL: tl.constexpr):
    """Integers in the order of the scores; pools that hold a position before `first` are on top."""
    score = tl.load(scores + pool, mask=pool < candidates, other=0.0)
    score = tl.where(score == 0.0, 0.0, score)  # one zero
    score = tl.where(pool * POOL < first, float("inf"), score)
    bits = score.to(tl.uint32, bitcast=True)
    negative = (bits >> 31) != 0
    return tl.where(negative, ~bits, bits | 0x80000000)


@live
def _selection(
    scores, selected, positions, num_pools, first_position,
    KEEP: tl.constexpr, POOL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Which positions one token sees: the KEEP best of its pools, and its tail."""
    token = tl.program_id(0).to(tl.int64)
    visible = tl.load(positions + token).to(tl.int32) + 1
    candidates = tl.minimum(visible // POOL, num_pools)
    lane = tl.arange(0, BLOCK)
    bins = tl.arange(0, 256)
    own = scores + token * num_pools

    # The KEEP-th largest rank, 8 bits at a time: `threshold` are the bits found, `wanted` how many
    # are still to be taken among the ranks that begin with them.
    threshold = tl.zeros([1], tl.uint32)
    wanted = tl.full([1], KEEP, tl.int32)
    if candidates > KEEP:
        known = tl.zeros([1], tl.uint32)
        shift = tl.full([1], 32, tl.uint32)
        for _ in range(4):
            shift -= 8
            counts = tl.zeros([256], tl.int32)
            for begin in range(0, candidates, BLOCK):
                pool = begin + lane
                rank = _ranks(own, pool, candidates, first_position, POOL)
                alike = (pool < candidates) & ((rank & known) == threshold)
                digit = ((rank >> shift) & 255).to(tl.int32)
                counts += tl.histogram(digit, 256, mask=alike)
            above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # of a larger digit
            # The largest digit that, with all above it, reaches what is wanted.
            largest = tl.max(tl.where(above + counts >= wanted, bins, 0), 0)
            wanted -= tl.sum(tl.where(bins == largest, above, 0), 0)
            threshold = threshold | (largest.to(tl.uint32) << shift)
            known = known | (tl.full([1], 255, tl.uint32) << shift)

    taken = tl.zeros([1], tl.int32)
    for begin in range(0, num_pools, BLOCK):
        pool = begin + lane
        rank = _ranks(own, pool, candidates, first_position, POOL)
        inside = pool < candidates
        equal = (inside & (rank == threshold)).to(tl.int32)
        before = taken + tl.cumsum(equal, 0) - equal
        chosen = inside & ((rank > threshold) | ((equal != 0) & (before < wanted)))
        taken += tl.sum(equal, 0)
        if candidates <= KEEP:
            chosen = inside
        position = pool[:, None] * POOL + tl.arange(0, POOL)[None, :]
        tail = (position >= visible - visible % POOL) & (position < visible)
        seen = (chosen[:, None] | tail) & (position >= first_position)
        tl.store(
            selected + token * num_pools * POOL + position,
            seen.to(tl.uint8),
            mask=(pool < num_pools)[:, None],
        )
