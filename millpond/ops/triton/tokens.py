"""The delta rule token by token, from slot to slot: decode rows, and verify rows with their rings.

Contract and arithmetic: `millpond.ops.reference.delta.delta_decode` and `.verify.delta_verify`. A
program holds the states of one head for some value channels, all key channels of them, in fp32
registers: the slot is read once and written once. Both ops advance a state with the same function
on the same tile, so that speculation and plain decode fold the same tokens to the same bytes and
read the same outputs. q, k, v may be views of wider rows.

What bounds verify is not its bytes but the sums over keys, two a token. So a row of the tile lies
in few threads: the tile is four of [BV, K / 4], for which Triton gives a row to K / 16 threads, and
the same ones in each; most of a sum is then made within a thread, by multiply-adds across the four,
the rest in log2(K / 16) shuffles. And a token's two sums are of the state before it, S D k and
S D q (D its decay), so neither waits for the other: its output is S D q + (q k) e with e its error,
and the state itself is touched once more only, S D + e k^T. A form with all sums of a run of tokens
at once (small matrices) would read the state less often, but round otherwise than plain decode
does; it was slower, too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from millpond.ops.batch import RowSlots, VerifyRows
from millpond.ops.reference.delta import NORM_EPS, Gate
from millpond.ops.triton.choices import TokenChoice, token_choice
from millpond.ops.triton.shared import (
    UNFUSED,
    aligned,
    kernel,
    log_decay,
    power_of_two,
    report_for,
    rounded,
    sigmoid,
    slot_stride,
    token_stride,
    told,
)


def delta_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    gate: Gate,
    bank: torch.Tensor,
    rows: RowSlots,
) -> torch.Tensor:
    """As the reference, in one launch."""
    choice = token_choice(v.device)
    count, exports = rows.num_rows, rows.export_slot.shape[0]
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    report = report_for(count + exports, v.device)
    shape = head_shape(q, k, v, decay, gate, choice)
    if count:
        _decode[(triton.cdiv(shape["V"], shape["BV"]), shape["H"], count)](
            q, k, v, decay, beta, o, gate.a_log, gate.dt_bias, bank,
            rows.cu_seqlens, rows.state_in, rows.state_out,
            rows.export_row, rows.export_offset, rows.export_slot, report, count, exports,
            gate.lower_bound or 0.0,
            token_stride(q), token_stride(k), token_stride(v), token_stride(decay),
            token_stride(beta), slot_stride(bank),
            **shape, num_warps=choice.warps, **UNFUSED,
        )  # fmt: skip
    rows.written.record(*report)
    return o


def delta_verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    pending: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    gate: Gate,
    bank: torch.Tensor,
    ring_decay: torch.Tensor,
    ring_beta: torch.Tensor,
    rows: VerifyRows,
) -> torch.Tensor:
    """As the reference, in one launch; how many tokens are folded is read on the device."""
    choice = token_choice(v.device)
    count, most = rows.num_rows, rows.width - 1
    _, old_k, old_v = (x.flatten(0, 1) for x in pending)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    report = report_for(2 * count, v.device)
    shape = head_shape(q, k, v, decay, gate, choice, old_k, ring_decay)
    if count:
        _verify[(triton.cdiv(shape["V"], shape["BV"]), shape["H"], count)](
            q, k, v, decay, beta, o, old_k, old_v, gate.a_log, gate.dt_bias, bank,
            ring_decay, ring_beta, rows.state_in, rows.state_out, rows.base,
            rows.pending, rows.num_drafts, rows.parity, rows.seats,
            rows.export_end, rows.export_slot, report, count,
            gate.lower_bound or 0.0,
            token_stride(q), token_stride(k), token_stride(v), token_stride(decay),
            token_stride(beta), token_stride(old_k), token_stride(old_v),
            slot_stride(bank), slot_stride(ring_decay), slot_stride(ring_beta),
            MOST=most, **shape, num_warps=choice.warps, **UNFUSED,
        )  # fmt: skip
    rows.written.record(*report)
    return o


def head_shape(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    gate: Gate,
    choice: TokenChoice,
    *others: torch.Tensor,
) -> dict[str, Any]:
    """What the kernels specialise on, all of it the model's: heads, sizes, the kind of decay."""
    heads, v_dim = v.shape[1:]
    key_heads, k_dim = k.shape[1:]
    span = max(power_of_two(k_dim) // 4, 1)
    values = min(choice.values, power_of_two(v_dim))
    by_channel = decay.ndim == 3
    vectors = (q, k, *others) if by_channel else (q, k, *others[:1])
    return {
        "H": heads,
        "HK": key_heads,
        "K": k_dim,
        "V": v_dim,
        "SPAN": span,
        "BV": values,
        "BY_CHANNEL": by_channel,
        "BOUNDED": gate.lower_bound is not None,
        "ALIGNED": aligned(*vectors, *((decay,) if by_channel else ())) and k_dim % 16 == 0,
        "FULL": 4 * span == k_dim and v_dim % values == 0,
        # Fewer elements than the threads can hold: some are held by several.
        "DOUBLED": span * values < 128 * choice.warps,
        "EPS": NORM_EPS,
    }


@triton.jit
def over_keys(x):
    """x [4, SPAN] summed."""
    return tl.sum(tl.sum(x, 0), 0)


@triton.jit
def in_four(x):
    """x [4, SPAN] as four of [SPAN], as the tiles of a state have their keys."""
    pairs = tl.reshape(tl.trans(x), (x.shape[1], 2, 2))
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def read_by(s, x):
    """s, four of [BV, SPAN], times x, four of [SPAN]: [BV]."""
    total = s[0] * x[0][None, :]
    total = tl.fma(s[1], x[1][None, :], total)
    total = tl.fma(s[2], x[2][None, :], total)
    total = tl.fma(s[3], x[3][None, :], total)
    return tl.sum(total, 1)


@triton.jit
def load_keys(at, keys, K: tl.constexpr, ALIGNED: tl.constexpr):
    """A vector of K channels [4, SPAN], in fp32."""
    places = at + keys
    if ALIGNED:
        places = tl.multiple_of(places, (16, 16))
    if 4 * keys.shape[1] == K:
        x = tl.load(places)
    else:
        x = tl.load(places, mask=keys < K, other=0.0)
    return x.to(tl.float32)


@triton.jit
def unit(x, EPS: tl.constexpr):
    """x [4, SPAN] to unit length."""
    return x * tl.rsqrt(over_keys(x * x) + EPS)


@triton.jit
def load_token(
    k, v, decay, beta, rate, bias, bound, keys, values,
    K: tl.constexpr, V: tl.constexpr, BY_CHANNEL: tl.constexpr, BOUNDED: tl.constexpr,
    ALIGNED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Unit key, value, what decay keeps, and weight of the token that the pointers are at.

    `bias` and what is kept are [4, SPAN] when the decay is by channel, else one number.
    """
    kn = unit(load_keys(k, keys, K, ALIGNED), EPS)
    vs = tl.load(v + values, mask=values < V, other=0.0).to(tl.float32)
    weight = sigmoid(tl.load(beta).to(tl.float32))
    if BY_CHANNEL:
        raw = load_keys(decay, keys, K, ALIGNED)
    else:
        raw = tl.load(decay).to(tl.float32)
    return kn, vs, tl.exp(log_decay(raw, rate, bias, bound, BOUNDED)), weight


@triton.jit
def load_query(q, keys, K: tl.constexpr, ALIGNED: tl.constexpr, EPS: tl.constexpr):
    """The token's query [4, SPAN], scaled."""
    return unit(load_keys(q, keys, K, ALIGNED), EPS) * (K**-0.5)


@triton.jit
def read_decayed(s, x, keep, BY_CHANNEL: tl.constexpr):
    """What x [4, SPAN] reads of s, four of [BV, SPAN], after the decay: [BV]."""
    if BY_CHANNEL:
        read = read_by(s, in_four(keep * x))
    else:
        read = keep * read_by(s, in_four(x))
    return read


@triton.jit
def advance(s, error, kn, keep, BY_CHANNEL: tl.constexpr):
    """s, four of [BV, SPAN], after a token of this error [BV]."""
    e = error[:, None]
    k = in_four(kn)
    if BY_CHANNEL:
        d = in_four(keep)
        s0 = tl.fma(e, k[0][None, :], s[0] * d[0][None, :])
        s1 = tl.fma(e, k[1][None, :], s[1] * d[1][None, :])
        s2 = tl.fma(e, k[2][None, :], s[2] * d[2][None, :])
        s3 = tl.fma(e, k[3][None, :], s[3] * d[3][None, :])
    else:
        s0 = tl.fma(e, k[0][None, :], s[0] * keep)
        s1 = tl.fma(e, k[1][None, :], s[1] * keep)
        s2 = tl.fma(e, k[2][None, :], s[2] * keep)
        s3 = tl.fma(e, k[3][None, :], s[3] * keep)
    return s0, s1, s2, s3


@triton.jit
def tile_places(head, values, K: tl.constexpr, V: tl.constexpr, SPAN: tl.constexpr):
    """Where the first of a tile's four lies in a slot, [BV, SPAN]; the others follow each other."""
    return head * (V * K) + values[:, None] * K + tl.arange(0, SPAN)[None, :]


@triton.jit
def _inside(slot, values, four, K: tl.constexpr, V: tl.constexpr, SPAN: tl.constexpr):
    """Which elements of one of a tile's four there are: none without a slot."""
    there = values < tl.where(slot >= 0, V, 0)
    return there[:, None] & (four * SPAN + tl.arange(0, SPAN) < K)[None, :]


@triton.jit
def load_state(
    bank, slot, head, values, stride,
    K: tl.constexpr, V: tl.constexpr, SPAN: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One head's rows `values` of a slot, four of [BV, SPAN] fp32; zero where there is no slot."""
    at = bank + tl.maximum(slot, 0) * stride + tile_places(head, values, K, V, SPAN)
    if FULL:
        if slot >= 0:
            s0 = tl.load(at, eviction_policy="evict_first")
            s1 = tl.load(at + SPAN, eviction_policy="evict_first")
            s2 = tl.load(at + 2 * SPAN, eviction_policy="evict_first")
            s3 = tl.load(at + 3 * SPAN, eviction_policy="evict_first")
        else:
            s0 = tl.zeros([values.shape[0], SPAN], tl.float32)
            s1 = tl.zeros([values.shape[0], SPAN], tl.float32)
            s2 = tl.zeros([values.shape[0], SPAN], tl.float32)
            s3 = tl.zeros([values.shape[0], SPAN], tl.float32)
    else:
        s0 = tl.load(at, mask=_inside(slot, values, 0, K, V, SPAN), other=0.0)
        s1 = tl.load(at + SPAN, mask=_inside(slot, values, 1, K, V, SPAN), other=0.0)
        s2 = tl.load(at + 2 * SPAN, mask=_inside(slot, values, 2, K, V, SPAN), other=0.0)
        s3 = tl.load(at + 3 * SPAN, mask=_inside(slot, values, 3, K, V, SPAN), other=0.0)
    return s0, s1, s2, s3


@triton.jit
def store_state(
    bank, slot, s, head, values, stride,
    K: tl.constexpr, V: tl.constexpr, SPAN: tl.constexpr, FULL: tl.constexpr,
    DOUBLED: tl.constexpr,
):  # fmt: skip
    """s, four of [BV, SPAN], into one head's rows of a slot, unless there is none.

    Where elements are held by several threads each, all have read the slot before one overwrites
    it.
    """
    if DOUBLED:
        tl.debug_barrier()
    at = bank + tl.maximum(slot, 0) * stride + tile_places(head, values, K, V, SPAN)
    if FULL:
        if slot >= 0:
            tl.store(at, s[0], eviction_policy="evict_first")
            tl.store(at + SPAN, s[1], eviction_policy="evict_first")
            tl.store(at + 2 * SPAN, s[2], eviction_policy="evict_first")
            tl.store(at + 3 * SPAN, s[3], eviction_policy="evict_first")
    else:
        tl.store(at, s[0], mask=_inside(slot, values, 0, K, V, SPAN))
        tl.store(at + SPAN, s[1], mask=_inside(slot, values, 1, K, V, SPAN))
        tl.store(at + 2 * SPAN, s[2], mask=_inside(slot, values, 2, K, V, SPAN))
        tl.store(at + 3 * SPAN, s[3], mask=_inside(slot, values, 3, K, V, SPAN))


@triton.jit
def load_gate(a_log, dt_bias, head, keys, K: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """The rate, and the bias: [4, SPAN] when the decay is by channel, else one number."""
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    if BY_CHANNEL:
        bias = tl.load(dt_bias + head * K + keys, mask=keys < K, other=0.0).to(tl.float32)
    else:
        bias = tl.load(dt_bias + head).to(tl.float32)
    return rate, bias


@kernel
def _decode(
    q, k, v, decay, beta, o, a_log, dt_bias, bank,
    cu_seqlens, state_in, state_out, export_row, export_offset, export_slot, report,
    num_rows, num_exports, bound,
    q_stride, k_stride, v_stride, decay_stride, beta_stride, bank_stride,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    SPAN: tl.constexpr, BV: tl.constexpr,
    BY_CHANNEL: tl.constexpr, BOUNDED: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr,
    DOUBLED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One row and head, BV value channels."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    first = (tl.program_id(0) == 0) & (head == 0)
    of = num_rows + num_exports
    keys = tl.arange(0, 4)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    rate, bias = load_gate(a_log, dt_bias, head, keys, K, BY_CHANNEL)
    begin = tl.load(cu_seqlens + row).to(tl.int64)
    length = tl.load(cu_seqlens + row + 1).to(tl.int64) - begin
    slot = tl.load(state_in + row).to(tl.int64)
    s = load_state(bank, slot, head, values, bank_stride, K, V, SPAN, FULL)
    key_head = head // (H // HK)
    of_decay = head * K if BY_CHANNEL else head
    for step in range(length):
        at = begin + step
        kn, vs, keep, weight = load_token(
            k + at * k_stride + key_head * K, v + at * v_stride + head * V,
            decay + at * decay_stride + of_decay, beta + at * beta_stride + head,
            rate, bias, bound, keys, values, K, V, BY_CHANNEL, BOUNDED, ALIGNED, EPS,
        )  # fmt: skip
        qn = load_query(q + at * q_stride + key_head * K, keys, K, ALIGNED, EPS)
        error = weight * (vs - read_decayed(s, kn, keep, BY_CHANNEL))
        read = tl.fma(error, over_keys(kn * qn), read_decayed(s, qn, keep, BY_CHANNEL))
        s = advance(s, error, kn, keep, BY_CHANNEL)
        out = o + (at * H + head) * V + values
        tl.store(out, rounded(read, o.dtype.element_ty), mask=values < V)
        for e in range(num_exports):
            offset = tl.load(export_offset + e).to(tl.int64)
            if (tl.load(export_row + e) == row) & (offset == step + 1):
                to = tl.load(export_slot + e).to(tl.int64)
                store_state(bank, to, s, head, values, bank_stride, K, V, SPAN, FULL, DOUBLED)
    to = tl.load(state_out + row).to(tl.int64)
    store_state(bank, to, s, head, values, bank_stride, K, V, SPAN, FULL, DOUBLED)
    told(report, row, of, to, length, True, first)
    for e in range(num_exports):
        if tl.load(export_row + e) == row:
            offset = tl.load(export_offset + e).to(tl.int64)
            reached = (offset >= 1) & (offset <= length)
            told(report, num_rows + e, of, tl.load(export_slot + e), offset, reached, first)


@triton.jit
def _leave(ring, at, raw, SIZE: tl.constexpr, PLACES: tl.constexpr):
    """Copy `SIZE` raw values of a token into a ring."""
    i = tl.arange(0, PLACES)
    value = tl.load(raw + i, mask=i < SIZE, other=0.0)
    tl.store(ring + at + i, value.to(ring.dtype.element_ty), mask=i < SIZE)


@kernel
def _verify(
    q, k, v, decay, beta, o, old_k, old_v, a_log, dt_bias, bank, ring_decay, ring_beta,
    state_in, state_out, base, pending, num_drafts, parity, seats,
    export_end, export_slot, report, num_rows, bound,
    q_stride, k_stride, v_stride, decay_stride, beta_stride, old_k_stride, old_v_stride,
    bank_stride, ring_decay_stride, ring_beta_stride,
    MOST: tl.constexpr,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    SPAN: tl.constexpr, BV: tl.constexpr,
    BY_CHANNEL: tl.constexpr, BOUNDED: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr,
    DOUBLED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One verify row and head, BV value channels: replay, the certain token, one write, drafts.

    All tokens take the same path, so that the code of a token is there once.
    """
    head = tl.program_id(1)
    row = tl.program_id(2)
    wide = row.to(tl.int64)
    first = (tl.program_id(0) == 0) & (head == 0)
    keys = tl.arange(0, 4)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    seat = tl.load(seats + row).to(tl.int64)
    slot = tl.load(state_in + row).to(tl.int64)
    to = tl.load(state_out + row).to(tl.int64)
    export = tl.load(export_slot + row).to(tl.int64)
    passed = tl.load(export_end + row).to(tl.int64) - tl.load(base + row).to(tl.int64)
    replayed = tl.load(pending + row).to(tl.int64)
    begin = wide * (MOST + 1)
    filled = 0
    if seat >= 0:
        drafts = tl.load(num_drafts + row).to(tl.int32)
        rate, bias = load_gate(a_log, dt_bias, head, keys, K, BY_CHANNEL)
        held = tl.load(parity + row).to(tl.int64) * MOST
        left = MOST - held
        key_head = head // (H // HK)
        of_decay = head * K if BY_CHANNEL else head
        per_token = H * K if BY_CHANNEL else H
        ring_d = ring_decay + seat * ring_decay_stride + of_decay
        ring_b = ring_beta + seat * ring_beta_stride + head
        s = load_state(bank, slot, head, values, bank_stride, K, V, SPAN, FULL)
        for own in range(-replayed.to(tl.int32), drafts + 1):
            if own < 0:
                entry = replayed + own
                of_pending = wide * MOST + entry
                at_k = old_k + of_pending * old_k_stride + key_head * K
                at_v = old_v + of_pending * old_v_stride + head * V
                at_decay = ring_d + (held + entry) * per_token
                at_beta = ring_b + (held + entry) * H
            else:
                at = begin + own
                at_k = k + at * k_stride + key_head * K
                at_v = v + at * v_stride + head * V
                at_decay = decay + at * decay_stride + of_decay
                at_beta = beta + at * beta_stride + head
            kn, vs, keep, weight = load_token(
                at_k, at_v, at_decay, at_beta,
                rate, bias, bound, keys, values, K, V, BY_CHANNEL, BOUNDED, ALIGNED, EPS,
            )  # fmt: skip
            if own < 0:
                error = weight * (vs - read_decayed(s, kn, keep, BY_CHANNEL))
            else:
                at = begin + own
                qn = load_query(q + at * q_stride + key_head * K, keys, K, ALIGNED, EPS)
                error = weight * (vs - read_decayed(s, kn, keep, BY_CHANNEL))
                read = tl.fma(error, over_keys(kn * qn), read_decayed(s, qn, keep, BY_CHANNEL))
                out = o + (at * H + head) * V + values
                tl.store(out, rounded(read, o.dtype.element_ty), mask=values < V)
            if (own < drafts) | (own == 0):  # nobody looks at what the last draft leaves
                s = advance(s, error, kn, keep, BY_CHANNEL)
            if own == 0:
                store_state(bank, to, s, head, values, bank_stride, K, V, SPAN, FULL, DOUBLED)
            if (own <= 0) & (passed == replayed + own + 1):
                store_state(bank, export, s, head, values, bank_stride, K, V, SPAN, FULL, DOUBLED)
            if (own > 0) & (tl.program_id(0) == 0):
                if BY_CHANNEL:
                    _leave(ring_d, (left + own - 1) * per_token, at_decay, K, 4 * SPAN)
                else:
                    _leave(ring_d, (left + own - 1) * per_token, at_decay, 1, 1)
                _leave(ring_b, (left + own - 1) * H, at_beta, 1, 1)
        filled = drafts + 1
    reached = (passed >= 1) & (passed <= replayed + 1)
    told(report, row, 2 * num_rows, to, replayed + 1, seat >= 0, first)
    told(report, num_rows + row, 2 * num_rows, export, passed, (seat >= 0) & reached, first)
    for place in range(filled, MOST + 1):
        nothing = tl.zeros([BV], o.dtype.element_ty)
        tl.store(o + ((begin + place) * H + head) * V + values, nothing, mask=values < V)
