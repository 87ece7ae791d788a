"""The first launch for decode and verify rows: tokens made ready for the states they meet.

A program is one warp and makes one head's queries, keys, values or gates of all tokens of a row: it
walks the convolution with the window in registers, the next input on its way, and leaves windows
and the drafts' rings as `conv` does. Knows no state; `steps` says what becomes of it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from millpond.ops.reference.delta import NORM_EPS, Gate
from millpond.ops.triton.conv import conv_shape, convolved, keep_inputs, old_input, tap
from millpond.ops.triton.overlap import await_previous, let_next_begin
from millpond.ops.triton.shared import (
    aligned,
    kernel,
    log_decay,
    power_of_two,
    rounded,
    sigmoid,
    told,
)
from millpond.ops.triton.tokens import unit


def parts(shape: dict[str, Any]) -> int:
    """Programs of one row that make its tokens ready: queries, keys, values, and gates by head."""
    return int(2 * shape["HK"] + 2 * shape["H"])


def making(
    gate: Gate,
    x: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    shape: dict[str, Any],
) -> dict[str, Any]:
    """What the first kernel specialises on besides."""
    whole = shape["K"] % 16 == 0 and shape["V"] % 16 == 0
    return {
        "VSPAN": max(power_of_two(shape["V"]) // 4, 1),
        "C": x.shape[1],
        **conv_shape(weight, window),
        "BOUNDED": gate.lower_bound is not None,
        "ALIGNED": aligned(x) and whole,
        "EPS": NORM_EPS,
    }


@triton.jit
def _load_raw(at, c, n, there, ALIGNED: tl.constexpr):
    """Channels c of one token, where n < there."""
    places = at + c
    if ALIGNED:
        places = tl.multiple_of(places, (16, 16))
    return tl.load(places, mask=n < there, other=0.0)


@triton.jit
def _load_input(
    x, ring, step, replayed, end, c, n, x_stride,
    C: tl.constexpr, SIZE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Input `step` of a row: the ring's pending drafts, then the row's own at x."""
    if step < replayed:
        value = _load_raw(ring + step * C, c, n, SIZE, ALIGNED).to(x.dtype.element_ty)
    else:
        there = tl.where(step < end, SIZE, 0)
        value = _load_raw(x + (step - replayed) * x_stride, c, n, there, ALIGNED)
    return value


@triton.jit
def _make_vectors(
    x, ring_from, ring_to, out, out_stride, factor, weight, window, slot, to, export,
    replayed, end, passed, row, export_row, export_offset, export_slot, num_exports,
    c, n, x_stride, window_stride,
    C: tl.constexpr, W: tl.constexpr, TAP_C: tl.constexpr, TAP_W: tl.constexpr,
    OLD_C: tl.constexpr, OLD_W: tl.constexpr, SIZE: tl.constexpr, UNIT: tl.constexpr,
    VERIFY: tl.constexpr, ALIGNED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Channels c of all tokens of a row after the convolution, to unit length times `factor` if
    they are a key's or a query's; the windows, and what drafts leave in the ring."""
    kind = x.dtype.element_ty
    coming = _load_input(x, ring_from, 0, replayed, end, c, n, x_stride, C, SIZE, ALIGNED)
    x3 = old_input(window, slot, c, n, window_stride, SIZE, 3, W, OLD_C, OLD_W).to(kind)
    x2 = old_input(window, slot, c, n, window_stride, SIZE, 2, W, OLD_C, OLD_W).to(kind)
    x1 = old_input(window, slot, c, n, window_stride, SIZE, 1, W, OLD_C, OLD_W).to(kind)
    w3 = tap(weight, c, n, SIZE, 3, W, TAP_C, TAP_W)
    w2 = tap(weight, c, n, SIZE, 2, W, TAP_C, TAP_W)
    w1 = tap(weight, c, n, SIZE, 1, W, TAP_C, TAP_W)
    w0 = tap(weight, c, n, SIZE, 0, W, TAP_C, TAP_W)
    for step in range(end):
        x0 = coming
        coming = _load_input(
            x, ring_from, step + 1, replayed, end, c, n, x_stride, C, SIZE, ALIGNED
        )
        y = rounded(convolved(w3, w2, w1, w0, x3, x2, x1, x0), kind)
        if UNIT:
            y = unit(y.to(tl.float32), EPS) * factor
        tl.store(out + step * out_stride + n, y, mask=n < SIZE)
        x3, x2, x1 = x2, x1, x0
        if VERIFY:
            own = step - replayed
            if own > 0:
                left = ring_to + (own - 1) * C + c
                tl.store(left, x0.to(ring_to.dtype.element_ty), mask=n < SIZE)
            if own == 0:
                keep_inputs(window, to, x3, x2, x1, c, n, window_stride, SIZE, W, OLD_C, OLD_W)
            if (own <= 0) & (step + 1 == passed):
                keep_inputs(window, export, x3, x2, x1, c, n, window_stride, SIZE, W, OLD_C, OLD_W)
        else:
            for e in range(num_exports):
                offset = tl.load(export_offset + e).to(tl.int64)
                if (tl.load(export_row + e) == row) & (offset == step + 1):
                    at = tl.load(export_slot + e).to(tl.int64)
                    keep_inputs(window, at, x3, x2, x1, c, n, window_stride, SIZE, W, OLD_C, OLD_W)
    if not VERIFY:
        keep_inputs(window, to, x3, x2, x1, c, n, window_stride, SIZE, W, OLD_C, OLD_W)


@triton.jit
def _make_gates(
    decay, beta, kept_decay, kept_beta, left_decay, left_beta, keeps, weights, a_log, dt_bias,
    head, bound, replayed, end, decay_stride, beta_stride,
    H: tl.constexpr, SIZE: tl.constexpr, PLACES: tl.constexpr, STEPS: tl.constexpr,
    BOUNDED: tl.constexpr, VERIFY: tl.constexpr,
):  # fmt: skip
    """What the decay keeps and the weight of all tokens of one row and head, some at a time; what
    drafts leave in the rings. SIZE decays a head."""
    i = tl.arange(0, PLACES)[None, :]
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    for begin in range(0, end, STEPS):
        at = begin + tl.arange(0, STEPS)[:, None]
        own = at - replayed
        there = at < end
        raw = tl.load(
            decay + own * decay_stride + i, mask=there & (own >= 0) & (i < SIZE), other=0.0
        )
        raw_beta = tl.load(beta + own * beta_stride, mask=there & (own >= 0), other=0.0)
        if VERIFY:
            held = kept_decay + at * (H * SIZE) + i
            old = tl.load(held, mask=there & (own < 0) & (i < SIZE), other=0.0)
            raw = tl.where(own < 0, old.to(raw.dtype), raw)
            old_beta = tl.load(kept_beta + at * H, mask=there & (own < 0), other=0.0)
            raw_beta = tl.where(own < 0, old_beta.to(raw_beta.dtype), raw_beta)
            draft = there & (own > 0)
            tl.store(
                left_decay + (own - 1) * (H * SIZE) + i, raw.to(left_decay.dtype.element_ty),
                mask=draft & (i < SIZE),
            )  # fmt: skip
            tl.store(left_beta + (own - 1) * H, raw_beta.to(left_beta.dtype.element_ty), mask=draft)
        keep = tl.exp(log_decay(raw.to(tl.float32), rate, bias, bound, BOUNDED))
        tl.store(keeps + at * (H * SIZE) + i, keep, mask=there & (i < SIZE))
        tl.store(weights + at * H, sigmoid(raw_beta.to(tl.float32)), mask=there)


@triton.jit
def in_spans(SPAN: tl.constexpr):
    """0 .. 4 SPAN - 1 as [4, SPAN]."""
    return tl.arange(0, 4)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]


@kernel
def ready_decode(
    x, weight, decay, beta, ready_q, ready_k, keeps, weights, ready_v, a_log, dt_bias, window,
    cu_seqlens, state_in, state_out, export_row, export_offset, export_slot, report,
    num_rows, num_exports, bound, x_stride, decay_stride, beta_stride, window_stride,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SPAN: tl.constexpr,
    BY_CHANNEL: tl.constexpr, VSPAN: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    TAP_C: tl.constexpr, TAP_W: tl.constexpr, OLD_C: tl.constexpr, OLD_W: tl.constexpr,
    BOUNDED: tl.constexpr, ALIGNED: tl.constexpr, EPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One head's queries, keys, values or gates of all tokens of one row."""
    if OVERLAP:
        await_previous()
        let_next_begin()
    part = tl.program_id(0)
    row = tl.program_id(1)
    first = part == 0
    of = num_rows + num_exports
    begin = tl.load(cu_seqlens + row).to(tl.int64)
    length = tl.load(cu_seqlens + row + 1).to(tl.int64) - begin
    slot = tl.load(state_in + row).to(tl.int64)
    to = tl.load(state_out + row).to(tl.int64)
    tokens = x + begin * x_stride
    none = length * 0
    if part < 2 * HK:
        n = in_spans(SPAN)
        out = ready_k + (begin * HK + part - HK) * K
        if part < HK:
            out = ready_q + (begin * HK + part) * K
        factor = tl.where(part < HK, K**-0.5, 1.0)
        _make_vectors(
            tokens, x, x, out, HK * K, factor, weight, window, slot, to, to, none, length, none,
            row, export_row, export_offset, export_slot, num_exports, part * K + n, n, x_stride,
            window_stride, C, W, TAP_C, TAP_W, OLD_C, OLD_W, K, True, False, ALIGNED, EPS,
        )  # fmt: skip
    elif part < 2 * HK + H:
        head = part - 2 * HK
        n = in_spans(VSPAN)
        _make_vectors(
            tokens, x, x, ready_v + (begin * H + head) * V, H * V, 1.0, weight, window, slot, to,
            to, none, length, none, row, export_row, export_offset, export_slot, num_exports,
            2 * HK * K + head * V + n, n, x_stride, window_stride,
            C, W, TAP_C, TAP_W, OLD_C, OLD_W, V, False, False, ALIGNED, EPS,
        )  # fmt: skip
    else:
        head = part - 2 * HK - H
        SIZE: tl.constexpr = K if BY_CHANNEL else 1
        _make_gates(
            decay + begin * decay_stride + head * SIZE, beta + begin * beta_stride + head,
            decay, beta, decay, beta, keeps + (begin * H + head) * SIZE, weights + begin * H + head,
            a_log, dt_bias, head, bound, none, length, decay_stride, beta_stride,
            H, SIZE, 4 * SPAN if BY_CHANNEL else 1, 1, BOUNDED, False,
        )  # fmt: skip
    told(report, row, of, to, length, True, first)
    for e in range(num_exports):
        if tl.load(export_row + e) == row:
            offset = tl.load(export_offset + e).to(tl.int64)
            reached = (offset >= 1) & (offset <= length)
            told(report, num_rows + e, of, tl.load(export_slot + e), offset, reached, first)


@kernel
def ready_verify(
    x, weight, decay, beta, ready_q, ready_k, keeps, weights, ready_v, a_log, dt_bias, window,
    ring, ring_decay, ring_beta, state_in, state_out, base, pending, num_drafts, parity, seats,
    export_end, export_slot, report, num_rows, bound, x_stride, decay_stride, beta_stride,
    window_stride, ring_stride, ring_decay_stride, ring_beta_stride,
    MOST: tl.constexpr, STEPS: tl.constexpr,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SPAN: tl.constexpr,
    BY_CHANNEL: tl.constexpr, VSPAN: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    TAP_C: tl.constexpr, TAP_W: tl.constexpr, OLD_C: tl.constexpr, OLD_W: tl.constexpr,
    BOUNDED: tl.constexpr, ALIGNED: tl.constexpr, EPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One head's queries, keys, values or gates of all tokens of one verify row."""
    if OVERLAP:
        await_previous()
        let_next_begin()
    part = tl.program_id(0)
    row = tl.program_id(1)
    first = part == 0
    wide = row.to(tl.int64)
    seat = tl.load(seats + row).to(tl.int64)
    slot = tl.load(state_in + row).to(tl.int64)
    to = tl.load(state_out + row).to(tl.int64)
    export = tl.load(export_slot + row).to(tl.int64)
    passed = tl.load(export_end + row).to(tl.int64) - tl.load(base + row).to(tl.int64)
    replayed = tl.load(pending + row).to(tl.int64)
    end = replayed + 1 + tl.load(num_drafts + row).to(tl.int64)
    held = tl.load(parity + row).to(tl.int64) * MOST
    if seat >= 0:
        begin = wide * (MOST + 1)
        place = wide * (2 * MOST + 1)
        tokens = x + begin * x_stride
        of_seat = ring + seat * ring_stride
        ring_from = of_seat + held * C
        ring_to = of_seat + (MOST - held) * C
        if part < 2 * HK:
            n = in_spans(SPAN)
            out = ready_k + (place * HK + part - HK) * K
            if part < HK:
                out = ready_q + (place * HK + part) * K
            factor = tl.where(part < HK, K**-0.5, 1.0)
            _make_vectors(
                tokens, ring_from, ring_to, out, HK * K, factor, weight, window, slot, to, export,
                replayed, end, passed, row, seats, seats, seats, 0, part * K + n, n, x_stride,
                window_stride, C, W, TAP_C, TAP_W, OLD_C, OLD_W, K, True, True, ALIGNED, EPS,
            )  # fmt: skip
        elif part < 2 * HK + H:
            head = part - 2 * HK
            n = in_spans(VSPAN)
            _make_vectors(
                tokens, ring_from, ring_to, ready_v + (place * H + head) * V, H * V, 1.0, weight,
                window, slot, to, export, replayed, end, passed, row, seats, seats, seats, 0,
                2 * HK * K + head * V + n, n, x_stride, window_stride,
                C, W, TAP_C, TAP_W, OLD_C, OLD_W, V, False, True, ALIGNED, EPS,
            )  # fmt: skip
        else:
            head = part - 2 * HK - H
            SIZE: tl.constexpr = K if BY_CHANNEL else 1
            at_decay = ring_decay + seat * ring_decay_stride + head * SIZE
            at_beta = ring_beta + seat * ring_beta_stride + head
            _make_gates(
                decay + begin * decay_stride + head * SIZE, beta + begin * beta_stride + head,
                at_decay + held * (H * SIZE), at_beta + held * H,
                at_decay + (MOST - held) * (H * SIZE), at_beta + (MOST - held) * H,
                keeps + (place * H + head) * SIZE, weights + place * H + head,
                a_log, dt_bias, head, bound, replayed, end, decay_stride, beta_stride,
                H, SIZE, 4 * SPAN if BY_CHANNEL else 1, STEPS, BOUNDED, True,
            )  # fmt: skip
    reached = (passed >= 1) & (passed <= replayed + 1)
    told(report, row, 2 * num_rows, to, replayed + 1, seat >= 0, first)
    told(report, num_rows + row, 2 * num_rows, export, passed, (seat >= 0) & reached, first)
