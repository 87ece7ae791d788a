"""The delta rule token by token, from slot to slot: decode rows, and verify rows with their rings.

Contract and arithmetic: `millpond.ops.reference.delta.delta_decode` and `.verify.delta_verify`. A
program holds the states of one head for some value channels, all key channels of them, in fp32
registers: the slot is read once and written once. Both ops fold a token with the same function on
the same tile, so that speculation and plain decode fold the same tokens to the same bytes. q, k, v
may be views of wider rows.
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
    LAUNCH,
    kernel,
    log_decay,
    no_report,
    power_of_two,
    rounded,
    sigmoid,
    slot_stride,
    tell,
    token_stride,
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
    report = no_report(count, exports, v.device)
    shape = head_shape(k, v, decay, gate, choice)
    if count:
        _decode[(triton.cdiv(shape["V"], shape["BV"]), shape["H"], count)](
            q, k, v, decay, beta, o, gate.a_log, gate.dt_bias, bank,
            rows.cu_seqlens, rows.state_in, rows.state_out,
            rows.export_row, rows.export_offset, rows.export_slot, report, count, exports,
            gate.lower_bound or 0.0,
            token_stride(q), token_stride(k), token_stride(v), token_stride(decay),
            token_stride(beta), slot_stride(bank),
            **shape, num_warps=choice.warps, **LAUNCH,
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
    report = no_report(count, count, v.device)
    shape = head_shape(k, v, decay, gate, choice)
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
            MOST=most, **shape, num_warps=choice.warps, **LAUNCH,
        )  # fmt: skip
    rows.written.record(*report)
    return o


def head_shape(
    k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, gate: Gate, choice: TokenChoice
) -> dict[str, Any]:
    """What the kernels specialise on, all of it the model's: heads, sizes, the kind of decay."""
    heads, v_dim = v.shape[1:]
    key_heads, k_dim = k.shape[1:]
    return {
        "H": heads,
        "HK": key_heads,
        "K": k_dim,
        "V": v_dim,
        "KP": power_of_two(k_dim),
        "BV": min(choice.values, power_of_two(v_dim)),
        "BY_CHANNEL": decay.ndim == 3,
        "BOUNDED": gate.lower_bound is not None,
        "EPS": NORM_EPS,
    }


@triton.jit
def unit(x, EPS: tl.constexpr):
    """x [K] to unit length, in fp32."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + EPS)


@triton.jit
def fold_token(
    s, k, v, decay, beta, rate, bias, bound, keys, values,
    K: tl.constexpr, V: tl.constexpr,
    BY_CHANNEL: tl.constexpr, BOUNDED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """s [BV, KP] after one more token; k, v, decay, beta point at that token's values of the head.

    `bias` is [KP] when the decay is by channel, else one number.
    """
    kn = unit(tl.load(k + keys, mask=keys < K, other=0.0).to(tl.float32), EPS)
    vs = tl.load(v + values, mask=values < V, other=0.0).to(tl.float32)
    weight = sigmoid(tl.load(beta).to(tl.float32))
    if BY_CHANNEL:
        raw = tl.load(decay + keys, mask=keys < K, other=0.0).to(tl.float32)
        s = s * tl.exp(log_decay(raw, rate, bias, bound, BOUNDED))[None, :]
    else:
        raw = tl.load(decay).to(tl.float32)
        s = s * tl.exp(log_decay(raw, rate, bias, bound, BOUNDED))
    error = weight * (vs - tl.sum(s * kn[None, :], 1))
    return s + error[:, None] * kn[None, :]


@triton.jit
def read_state(s, q, keys, K: tl.constexpr, EPS: tl.constexpr):
    """What the token's query reads of s [BV, KP]: [BV]."""
    qn = unit(tl.load(q + keys, mask=keys < K, other=0.0).to(tl.float32), EPS) * (K**-0.5)
    return tl.sum(s * qn[None, :], 1)


@triton.jit
def load_state(bank, slot, head, keys, values, stride, K: tl.constexpr, V: tl.constexpr):
    """One head's rows `values` of a slot [BV, KP] fp32; zero where there is no slot."""
    inside = (values < tl.where(slot >= 0, V, 0))[:, None] & (keys < K)[None, :]
    at = bank + tl.maximum(slot, 0) * stride + head * (V * K)
    return tl.load(at + values[:, None] * K + keys[None, :], mask=inside, other=0.0)


@triton.jit
def store_state(bank, slot, s, head, keys, values, stride, K: tl.constexpr, V: tl.constexpr):
    """s [BV, KP] into one head's rows of a slot, unless there is none.

    Small tiles are held by several threads each: all have read the slot before one overwrites it.
    """
    tl.debug_barrier()
    inside = (values < tl.where(slot >= 0, V, 0))[:, None] & (keys < K)[None, :]
    at = bank + tl.maximum(slot, 0) * stride + head * (V * K)
    tl.store(at + values[:, None] * K + keys[None, :], s, mask=inside)


@triton.jit
def load_gate(a_log, dt_bias, head, keys, K: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """The rate, and the bias: [KP] when the decay is by channel, else one number."""
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
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    BV: tl.constexpr, BY_CHANNEL: tl.constexpr, BOUNDED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One row and head, BV value channels."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    first = (tl.program_id(0) == 0) & (head == 0)
    keys = tl.arange(0, KP)
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    rate, bias = load_gate(a_log, dt_bias, head, keys, K, BY_CHANNEL)
    begin = tl.load(cu_seqlens + row).to(tl.int64)
    length = tl.load(cu_seqlens + row + 1).to(tl.int64) - begin
    s = load_state(
        bank, tl.load(state_in + row).to(tl.int64), head, keys, values, bank_stride, K, V
    )
    key_head = head // (H // HK)
    of_decay = head * K if BY_CHANNEL else head
    for step in range(length):
        at = begin + step
        s = fold_token(
            s, k + at * k_stride + key_head * K, v + at * v_stride + head * V,
            decay + at * decay_stride + of_decay, beta + at * beta_stride + head,
            rate, bias, bound, keys, values, K, V, BY_CHANNEL, BOUNDED, EPS,
        )  # fmt: skip
        read = read_state(s, q + at * q_stride + key_head * K, keys, K, EPS)
        out = o + (at * H + head) * V + values
        tl.store(out, rounded(read, o.dtype.element_ty), mask=values < V)
        for e in range(num_exports):
            offset = tl.load(export_offset + e).to(tl.int64)
            if (tl.load(export_row + e) == row) & (offset == step + 1):
                to = tl.load(export_slot + e).to(tl.int64)
                store_state(bank, to, s, head, keys, values, bank_stride, K, V)
                tell(report, num_rows + e, num_rows + num_exports, to, offset, first)
    to = tl.load(state_out + row).to(tl.int64)
    store_state(bank, to, s, head, keys, values, bank_stride, K, V)
    tell(report, row, num_rows + num_exports, to, length, first)


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
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    BV: tl.constexpr, BY_CHANNEL: tl.constexpr, BOUNDED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One verify row and head, BV value channels: replay, the certain token, one write, drafts."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    wide = row.to(tl.int64)
    first = (tl.program_id(0) == 0) & (head == 0)
    keys = tl.arange(0, KP)
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    seat = tl.load(seats + row).to(tl.int64)
    begin = wide * (MOST + 1)
    filled = 0
    if seat >= 0:
        rate, bias = load_gate(a_log, dt_bias, head, keys, K, BY_CHANNEL)
        replayed = tl.load(pending + row).to(tl.int32)
        drafts = tl.load(num_drafts + row).to(tl.int32)
        export = tl.load(export_slot + row).to(tl.int64)
        passed = tl.load(export_end + row).to(tl.int64) - tl.load(base + row).to(tl.int64)
        held = tl.load(parity + row).to(tl.int64) * MOST
        left = MOST - held
        key_head = head // (H // HK)
        of_decay = head * K if BY_CHANNEL else head
        per_token = H * K if BY_CHANNEL else H
        ring_d = ring_decay + seat * ring_decay_stride + of_decay
        ring_b = ring_beta + seat * ring_beta_stride + head
        s = load_state(
            bank, tl.load(state_in + row).to(tl.int64), head, keys, values, bank_stride, K, V
        )
        for step in range(replayed):
            at = wide * MOST + step
            s = fold_token(
                s, old_k + at * old_k_stride + key_head * K, old_v + at * old_v_stride + head * V,
                ring_d + (held + step) * per_token, ring_b + (held + step) * H,
                rate, bias, bound, keys, values, K, V, BY_CHANNEL, BOUNDED, EPS,
            )  # fmt: skip
            if step + 1 == passed:
                store_state(bank, export, s, head, keys, values, bank_stride, K, V)
        s = fold_token(
            s, k + begin * k_stride + key_head * K, v + begin * v_stride + head * V,
            decay + begin * decay_stride + of_decay, beta + begin * beta_stride + head,
            rate, bias, bound, keys, values, K, V, BY_CHANNEL, BOUNDED, EPS,
        )  # fmt: skip
        to = tl.load(state_out + row).to(tl.int64)
        store_state(bank, to, s, head, keys, values, bank_stride, K, V)
        tell(report, row, 2 * num_rows, to, replayed + 1, first)
        if passed == replayed + 1:
            store_state(bank, export, s, head, keys, values, bank_stride, K, V)
        reached = (passed >= 1) & (passed <= replayed + 1)
        tell(report, num_rows + row, 2 * num_rows, export, passed, first & reached)
        read = read_state(s, q + begin * q_stride + key_head * K, keys, K, EPS)
        tl.store(
            o + (begin * H + head) * V + values, rounded(read, o.dtype.element_ty),
            mask=values < V,
        )  # fmt: skip
        for draft in range(drafts):
            at = begin + draft + 1
            raw_decay = decay + at * decay_stride + of_decay
            raw_beta = beta + at * beta_stride + head
            s = fold_token(
                s, k + at * k_stride + key_head * K, v + at * v_stride + head * V,
                raw_decay, raw_beta,
                rate, bias, bound, keys, values, K, V, BY_CHANNEL, BOUNDED, EPS,
            )  # fmt: skip
            read = read_state(s, q + at * q_stride + key_head * K, keys, K, EPS)
            tl.store(
                o + (at * H + head) * V + values, rounded(read, o.dtype.element_ty),
                mask=values < V,
            )  # fmt: skip
            if tl.program_id(0) == 0:
                if BY_CHANNEL:
                    _leave(ring_d, (left + draft) * per_token, raw_decay, K, KP)
                else:
                    _leave(ring_d, (left + draft) * per_token, raw_decay, 1, 1)
                _leave(ring_b, (left + draft) * H, raw_beta, 1, 1)
        filled = drafts + 1
    for place in range(filled, MOST + 1):
        nothing = tl.zeros([BV], o.dtype.element_ty)
        tl.store(o + ((begin + place) * H + head) * V + values, nothing, mask=values < V)
