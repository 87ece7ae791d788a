"""Convolution and delta rule of decode and verify rows in two launches: tokens made ready, states.

Contract: `millpond.ops.reference.steps`. What a token needs before it meets a state is the same for
all value channels of its head: its key and query after convolution and norm, what its decay keeps,
its weight. The first kernel makes it once, in fp32, a program of one warp a head; the second reads
it and does nothing but what the state takes, so that its registers hold the state and most of its
instructions are multiply-adds. Places of a verify row are its pending drafts, then its own tokens,
without a gap. The functions are those of `conv` and `tokens`, and so are the bytes.

Where kernels overlap, the first lets the second begin after its own wait: what earlier kernels
wrote is then there for both, and the second loads states while the first is at work.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from millpond.ops.batch import RowSlots, VerifyRows
from millpond.ops.reference.delta import Gate
from millpond.ops.reference.steps import key_heads
from millpond.ops.triton.choices import token_choice
from millpond.ops.triton.overlap import await_previous, let_next_begin, overlap
from millpond.ops.triton.ready import in_spans, making, parts, ready_decode, ready_verify
from millpond.ops.triton.shared import (
    UNFUSED,
    cdiv,
    kernel,
    power_of_two,
    report_for,
    rounded,
    slot_stride,
    token_stride,
    told,
)
from millpond.ops.triton.tokens import (
    advance,
    load_state,
    over_keys,
    read_decayed,
    store_state,
)


def mix_decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    gate: Gate,
    window: torch.Tensor,
    bank: torch.Tensor,
    rows: RowSlots,
) -> torch.Tensor:
    """As the reference; each launch tells what it wrote."""
    count, exports = rows.num_rows, rows.export_slot.shape[0]
    shape = _layer_shape(x, decay, bank)
    made = _buffers(x.shape[0], x, shape)
    o = torch.empty((x.shape[0], shape["H"], shape["V"]), dtype=x.dtype, device=x.device)
    windows, states = (report_for(count + exports, x.device) for _ in range(2))
    if count:
        ready_decode[(parts(shape), count)](
            x, weight, decay, beta, *made, gate.a_log, gate.dt_bias, window,
            rows.cu_seqlens, rows.state_in, rows.state_out,
            rows.export_row, rows.export_offset, rows.export_slot, windows, count, exports,
            gate.lower_bound or 0.0,
            token_stride(x), token_stride(decay), token_stride(beta), window.stride(0),
            **shape, **making(gate, x, weight, window, shape),
            num_warps=1, **UNFUSED, **overlap(x.device),
        )  # fmt: skip
        folding = _folding(shape, x.device)
        _fold_decode[(cdiv(shape["V"], folding["BV"]), shape["H"], count)](
            *made, o, bank, rows.cu_seqlens, rows.state_in, rows.state_out,
            rows.export_row, rows.export_offset, rows.export_slot, states, count, exports,
            slot_stride(bank), **shape, **folding, **UNFUSED, **overlap(x.device),
        )  # fmt: skip
    rows.written.record_report(windows)
    rows.written.record_report(states)
    return o


def mix_verify(
    x: torch.Tensor,
    weight: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    gate: Gate,
    window: torch.Tensor,
    bank: torch.Tensor,
    ring: torch.Tensor,
    ring_decay: torch.Tensor,
    ring_beta: torch.Tensor,
    rows: VerifyRows,
) -> torch.Tensor:
    """As the reference; how many tokens are folded is read on the device."""
    count, most = rows.num_rows, rows.width - 1
    shape = _layer_shape(x, decay, bank)
    made = _buffers(count * (2 * most + 1), x, shape)
    o = torch.empty((x.shape[0], shape["H"], shape["V"]), dtype=x.dtype, device=x.device)
    windows, states = (report_for(2 * count, x.device) for _ in range(2))
    if count:
        ready_verify[(parts(shape), count)](
            x, weight, decay, beta, *made, gate.a_log, gate.dt_bias, window,
            ring, ring_decay, ring_beta, rows.state_in, rows.state_out, rows.base,
            rows.pending, rows.num_drafts, rows.parity, rows.seats,
            rows.export_end, rows.export_slot, windows, count, gate.lower_bound or 0.0,
            token_stride(x), token_stride(decay), token_stride(beta), window.stride(0),
            slot_stride(ring), slot_stride(ring_decay), slot_stride(ring_beta),
            MOST=most, STEPS=min(power_of_two(2 * most + 1), 4), **shape,
            **making(gate, x, weight, window, shape), num_warps=1, **UNFUSED, **overlap(x.device),
        )  # fmt: skip
        folding = _folding(shape, x.device)
        _fold_verify[(cdiv(shape["V"], folding["BV"]), shape["H"], count)](
            *made, o, bank, rows.state_in, rows.state_out, rows.base,
            rows.pending, rows.num_drafts, rows.seats,
            rows.export_end, rows.export_slot, states, count, slot_stride(bank),
            MOST=most, STEPS=power_of_two(2 * most + 1), **shape, **folding,
            maxnreg=token_choice(x.device).verify_registers, **UNFUSED, **overlap(x.device),
        )  # fmt: skip
    rows.written.record_report(windows)
    rows.written.record_report(states)
    return o


def _layer_shape(x: torch.Tensor, decay: torch.Tensor, bank: torch.Tensor) -> dict[str, Any]:
    """The constants of both kernels; all follow from the model."""
    heads, v_dim, k_dim = bank.shape[1:]
    return {
        "H": heads,
        "HK": key_heads(x.shape[1], bank),
        "K": k_dim,
        "V": v_dim,
        "SPAN": max(power_of_two(k_dim) // 4, 1),
        "BY_CHANNEL": decay.ndim == 3,
    }


def _folding(shape: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Further constants of the second kernel, and its number of warps."""
    choice = token_choice(device)
    values = min(choice.values, power_of_two(shape["V"]))
    return {
        "BV": values,
        "FULL": 4 * shape["SPAN"] == shape["K"] and shape["V"] % values == 0,
        "DOUBLED": shape["SPAN"] * values < 128 * choice.warps,
        "num_warps": choice.warps,
    }


def _buffers(places: int, x: torch.Tensor, shape: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Buffers between the two kernels, for `places` tokens each: unit queries and keys, factors of
    decay, weights (beta) and values. All but the values are fp32.
    """

    def empty(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty((places, *size), dtype=dtype, device=x.device)

    keys, heads, k_dim = shape["HK"], shape["H"], shape["K"]
    kept = (heads, k_dim) if shape["BY_CHANNEL"] else (heads,)
    return (
        empty(keys, k_dim), empty(keys, k_dim), empty(*kept), empty(heads),
        empty(heads, shape["V"], dtype=x.dtype),
    )  # fmt: skip


@triton.jit
def _load_ready(at, n, K: tl.constexpr, FULL: tl.constexpr):
    """A query, a key or what is kept of it [4, SPAN]."""
    if FULL:
        x = tl.load(at + n)
    else:
        x = tl.load(at + n, mask=n < K, other=0.0)
    return x


@triton.jit
def _load_token(
    ready_k, keeps, weights, ready_v, place, head, key_head, n, values,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BY_CHANNEL: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Unit key, value, what decay keeps, and weight of the token at a place."""
    kn = _load_ready(ready_k + (place * HK + key_head) * K, n, K, FULL)
    if BY_CHANNEL:
        keep = _load_ready(keeps + (place * H + head) * K, n, K, FULL)
    else:
        keep = tl.load(keeps + place * H + head)
    at = ready_v + (place * H + head) * V + values
    vs = tl.load(at, mask=values < V, other=0.0).to(tl.float32)
    return kn, vs, keep, tl.load(weights + place * H + head)


@triton.jit
def _ask_for(
    ready_q, ready_k, keeps, place, count, head, key_head,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, BY_CHANNEL: tl.constexpr,
    SECTORS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Have the vectors of `count` places brought near while the state is on its way, one element of
    every 32 bytes. Nothing is stored, but a compiler must not know that."""
    step = tl.arange(0, STEPS)[:, None]
    i = tl.minimum(tl.arange(0, SECTORS)[None, :] * 8, K - 1)
    of_key = ((place + step) * HK + key_head) * K + i
    q = tl.load(ready_q + of_key, mask=step < count, other=0.0)
    k = tl.load(ready_k + of_key, mask=step < count, other=0.0)
    never = step < tl.where(count < 0, STEPS, 0)
    if BY_CHANNEL:
        of_head = ((place + step) * H + head) * K + i
        keep = tl.load(keeps + of_head, mask=step < count, other=0.0)
        tl.store(keeps + of_head, keep, mask=never)
    tl.store(ready_q + of_key, q, mask=never)
    tl.store(ready_k + of_key, k, mask=never)


@kernel
def _fold_decode(
    ready_q, ready_k, keeps, weights, ready_v, o, bank, cu_seqlens, state_in, state_out,
    export_row, export_offset, export_slot, report, num_rows, num_exports, bank_stride,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SPAN: tl.constexpr,
    BY_CHANNEL: tl.constexpr, BV: tl.constexpr, FULL: tl.constexpr, DOUBLED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row and head, BV value channels."""
    if OVERLAP:
        let_next_begin()
    head = tl.program_id(1)
    row = tl.program_id(2)
    first = (tl.program_id(0) == 0) & (head == 0)
    of = num_rows + num_exports
    n = in_spans(SPAN)
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    key_head = head // (H // HK)
    begin = tl.load(cu_seqlens + row).to(tl.int64)
    length = tl.load(cu_seqlens + row + 1).to(tl.int64) - begin
    slot = tl.load(state_in + row).to(tl.int64)
    to = tl.load(state_out + row).to(tl.int64)
    s = load_state(bank, slot, head, values, bank_stride, K, V, SPAN, FULL)
    if OVERLAP:
        await_previous()
    for step in range(length):
        at = begin + step
        kn, vs, keep, weight = _load_token(
            ready_k, keeps, weights, ready_v, at, head, key_head, n, values,
            H, HK, K, V, BY_CHANNEL, FULL,
        )  # fmt: skip
        qn = _load_ready(ready_q + (at * HK + key_head) * K, n, K, FULL)
        error = weight * (vs - read_decayed(s, kn, keep, BY_CHANNEL))
        read = tl.fma(error, over_keys(kn * qn), read_decayed(s, qn, keep, BY_CHANNEL))
        s = advance(s, error, kn, keep, BY_CHANNEL)
        out = o + (at * H + head) * V + values
        tl.store(out, rounded(read, o.dtype.element_ty), mask=values < V)
        for e in range(num_exports):
            offset = tl.load(export_offset + e).to(tl.int64)
            if (tl.load(export_row + e) == row) & (offset == step + 1):
                export = tl.load(export_slot + e).to(tl.int64)
                store_state(bank, export, s, head, values, bank_stride, K, V, SPAN, FULL, DOUBLED)
    store_state(bank, to, s, head, values, bank_stride, K, V, SPAN, FULL, DOUBLED)
    told(report, row, of, to, length, True, first)
    for e in range(num_exports):
        if tl.load(export_row + e) == row:
            offset = tl.load(export_offset + e).to(tl.int64)
            reached = (offset >= 1) & (offset <= length)
            told(report, num_rows + e, of, tl.load(export_slot + e), offset, reached, first)


@kernel
def _fold_verify(
    ready_q, ready_k, keeps, weights, ready_v, o, bank, state_in, state_out, base,
    pending, num_drafts, seats, export_end, export_slot, report, num_rows, bank_stride,
    MOST: tl.constexpr, STEPS: tl.constexpr,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SPAN: tl.constexpr,
    BY_CHANNEL: tl.constexpr, BV: tl.constexpr, FULL: tl.constexpr, DOUBLED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One verify row and head, BV value channels: replay, the certain token, one write, drafts.

    All tokens take the same path, so that the code of a token is there once.
    """
    if OVERLAP:
        let_next_begin()
    head = tl.program_id(1)
    row = tl.program_id(2)
    wide = row.to(tl.int64)
    first = (tl.program_id(0) == 0) & (head == 0)
    n = in_spans(SPAN)
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    key_head = head // (H // HK)
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
        place = wide * (2 * MOST + 1) + replayed
        s = load_state(bank, slot, head, values, bank_stride, K, V, SPAN, FULL)
        if OVERLAP:
            await_previous()
        _ask_for(
            ready_q, ready_k, keeps, wide * (2 * MOST + 1), replayed + 1 + drafts, head, key_head,
            H, HK, K, BY_CHANNEL, (SPAN + 1) // 2, STEPS,
        )  # fmt: skip
        for own in range(-replayed.to(tl.int32), drafts + 1):
            kn, vs, keep, weight = _load_token(
                ready_k, keeps, weights, ready_v, place + own, head, key_head, n, values,
                H, HK, K, V, BY_CHANNEL, FULL,
            )  # fmt: skip
            if own < 0:
                error = weight * (vs - read_decayed(s, kn, keep, BY_CHANNEL))
            else:
                qn = _load_ready(ready_q + ((place + own) * HK + key_head) * K, n, K, FULL)
                error = weight * (vs - read_decayed(s, kn, keep, BY_CHANNEL))
                read = tl.fma(error, over_keys(kn * qn), read_decayed(s, qn, keep, BY_CHANNEL))
                out = o + ((begin + own) * H + head) * V + values
                tl.store(out, rounded(read, o.dtype.element_ty), mask=values < V)
            if (own < drafts) | (own == 0):  # nobody looks at what the last draft leaves
                s = advance(s, error, kn, keep, BY_CHANNEL)
            if own == 0:
                store_state(bank, to, s, head, values, bank_stride, K, V, SPAN, FULL, DOUBLED)
            if (own <= 0) & (passed == replayed + own + 1):
                store_state(bank, export, s, head, values, bank_stride, K, V, SPAN, FULL, DOUBLED)
        filled = drafts + 1
    elif OVERLAP:
        await_previous()  # or this kernel could end before the one it follows
    reached = (passed >= 1) & (passed <= replayed + 1)
    told(report, row, 2 * num_rows, to, replayed + 1, seat >= 0, first)
    told(report, num_rows + row, 2 * num_rows, export, passed, (seat >= 0) & reached, first)
    for empty in range(filled, MOST + 1):
        nothing = tl.zeros([BV], o.dtype.element_ty)
        tl.store(o + ((begin + empty) * H + head) * V + values, nothing, mask=values < V)
