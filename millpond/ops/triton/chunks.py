"""The delta rule of prompt rows, 64 tokens at a time on the absolute grid, from slot to slot.

Contract and formulas: `millpond.ops.reference.delta`. Two launches. `_prepare` does what chunks do
without a state, all in parallel: per chunk and head the solutions u and w of the triangular system,
queries and keys with their decay, and query-key products. `_recur` runs along the chunks of one row
with a part of one head's state in registers; exports are stores between two chunks.

Decay. Every exponent is a sum of log decays of consecutive tokens, never a difference of two sums:
terms of one sign lose nothing, so fp32 is enough where the reference needs fp64. A chunk is worked
through in four sub-blocks of 16 tokens. Keys of earlier sub-blocks carry their decay up to the end
of the last one, and end up as the keys that the state takes in.

Rounding. State, decay, beta, norms and all sums are fp32. Matrix operands: in a bf16 model bf16,
except in the triangular solve, where they are TF32; otherwise three TF32 products stand for each
fp32 one. u, w, decayed queries and keys and their products are stored in the operands' type.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millpond.ops.batch import RowSlots
from millpond.ops.reference.delta import CHUNK, Gate
from millpond.ops.triton.choices import TokenChoice, chunk_choice
from millpond.ops.triton.shared import (
    LAUNCH,
    kernel,
    log_decay,
    no_report,
    power_of_two,
    product,
    rounded,
    row_of_block,
    sigmoid,
    slot_stride,
    tell,
    token_stride,
)
from millpond.ops.triton.tokens import head_shape, load_gate, load_state, store_state

SMALLEST_TILE = 16
"""Matrix products need at least this many rows, columns and terms."""

FAST_BOUND = -10.0
"""With log decays of at least this, a sub-block's decay around its middle fits fp32 and bf16."""


def delta_prefill(
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
    """As the reference; an export off the grid that is not its row's end is not written, and not
    reported. Its workspace is 64 * (3 K + V + 64) operands a head for every 64 tokens begun."""
    choice = chunk_choice(v.device)
    count, exports = rows.num_rows, rows.export_slot.shape[0]
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    report = no_report(count, exports, v.device)
    if not count:
        rows.written.record(*report)
        return o
    shape = head_shape(k, v, decay, gate, TokenChoice(choice.values, choice.warps))
    heads, k_dim, v_dim = shape["H"], shape["K"], shape["V"]
    if shape["KP"] < SMALLEST_TILE:
        shape["KP"] = SMALLEST_TILE
    shape["BV"] = max(shape["BV"], SMALLEST_TILE)
    narrow = v.dtype == torch.bfloat16  # fp16 has not the range
    operands = torch.bfloat16 if narrow else torch.float32
    products = {
        "OPERAND": tl.bfloat16 if narrow else tl.float32,
        "PRECISION": "tf32" if narrow else "tf32x3",
    }
    blocks = v.shape[0] // CHUNK + count

    def workspace(*sizes: int, dtype: torch.dtype = operands) -> torch.Tensor:
        return torch.empty((blocks, heads, *sizes), dtype=dtype, device=v.device)

    u, w = workspace(v_dim, CHUNK), workspace(CHUNK, k_dim)
    q_in, k_out = workspace(CHUNK, k_dim), workspace(CHUNK, k_dim)
    qk = workspace(CHUNK, CHUNK)
    carry = workspace(k_dim if shape["BY_CHANNEL"] else 1, dtype=torch.float32)
    bounded = gate.lower_bound is not None and gate.lower_bound >= FAST_BOUND
    _prepare[(blocks, heads)](
        q, k, v, decay, beta, gate.a_log, gate.dt_bias, u, w, q_in, k_out, qk, carry,
        rows.cu_seqlens, count, gate.lower_bound or 0.0,
        token_stride(q), token_stride(k), token_stride(v), token_stride(decay),
        token_stride(beta),
        **{name: value for name, value in shape.items() if name != "BV"},
        VP=max(power_of_two(v_dim), SMALLEST_TILE), AROUND_MIDDLE=narrow and bounded,
        **products, num_warps=choice.prepare_warps, **LAUNCH,
    )  # fmt: skip
    _recur[(triton.cdiv(v_dim, shape["BV"]), heads, count)](
        u, w, q_in, k_out, qk, carry, o, bank, rows.cu_seqlens, rows.state_in, rows.state_out,
        rows.export_row, rows.export_offset, rows.export_slot, report, count, exports,
        slot_stride(bank),
        **{n: shape[n] for n in ("H", "K", "V", "KP", "BV", "BY_CHANNEL")},
        **products, num_warps=choice.warps, num_stages=choice.stages if narrow else 1, **LAUNCH,
    )  # fmt: skip
    rows.written.record(*report)
    return o


@triton.jit
def _sums(g, KP: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """Log decays g [16, KP], or [16] when one for the head -> three sums, [16 or 1, KP or 1].

    Up to and with each token, of those after each token, and of all: each adds terms of one sign.
    """
    i = tl.arange(0, 16)
    if BY_CHANNEL:
        before = (i[:, None] >= i[None, :]).to(tl.float32)
        after = (i[:, None] < i[None, :]).to(tl.float32)
        since = tl.dot(before, g, input_precision="tf32x3")
        rest = tl.dot(after, g, input_precision="tf32x3")
        total = tl.sum(g, 0)[None, :]
    else:
        since = tl.sum(tl.where(i[:, None] >= i[None, :], g[None, :], 0.0), 1)[:, None]
        rest = tl.sum(tl.where(i[:, None] < i[None, :], g[None, :], 0.0), 1)[:, None]
        total = tl.sum(g, 0) + tl.zeros([1, 1], tl.float32)
    return since, rest, total


@triton.jit
def _within(
    q, k, g, since, KP: tl.constexpr, BY_CHANNEL: tl.constexpr, AROUND_MIDDLE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """k_i . k_j and q_i . k_j with the decay from j to i, of one sub-block: [16, 16] each.

    Only elements with j <= i are meant; the others are anything, also infinite.
    """
    i = tl.arange(0, 16)
    if not BY_CHANNEL:
        # g[t] where j < t, summed over t <= i.
        between = tl.cumsum(tl.where(i[:, None] > i[None, :], g[:, None], 0.0), 0)
        factor = tl.exp(between)
        kk = product(k, tl.trans(k), OPERAND, PRECISION) * factor
        qk = product(q, tl.trans(k), OPERAND, PRECISION) * factor
    elif AROUND_MIDDLE:
        middle = tl.sum(tl.where((i == 7)[:, None], since, 0.0), 0)[None, :]
        left = tl.exp(since - middle)
        right = tl.trans(k * tl.exp(middle - since))
        kk = product(k * left, right, OPERAND, PRECISION)
        qk = product(q * left, right, OPERAND, PRECISION)
    else:
        kk = tl.zeros([16, 16], tl.float32)
        qk = tl.zeros([16, 16], tl.float32)
        between = tl.zeros([16, KP], tl.float32)  # of row i: log decays after token j up to i
        for back in range(16):
            j = 15 - back
            here = (i == j)[:, None]
            right = tl.sum(tl.where(here, k, 0.0), 0)[None, :] * tl.exp(between)
            column = (i == j)[None, :]
            kk = tl.where(column, tl.sum(k * right, 1)[:, None], kk)
            qk = tl.where(column, tl.sum(q * right, 1)[:, None], qk)
            next_g = tl.sum(tl.where(here, g, 0.0), 0)[None, :]
            between = tl.where((i >= j)[:, None], between + next_g, 0.0)
    return kk, qk


@triton.jit
def _unit_lower_inverse(a):
    """(I + a)^-1 for a [16, 16] strictly lower, row after row: stable where powers of a are not."""
    i = tl.arange(0, 16)
    inverse = (i[:, None] == i[None, :]).to(tl.float32)
    for row in range(1, 16):
        here = (i == row)[:, None]
        factors = tl.sum(tl.where(here, a, 0.0), 0)
        known = tl.sum(factors[:, None] * inverse, 0)
        inverse = tl.where(here, inverse - known[None, :], inverse)
    return inverse


@triton.jit
def _earlier(
    k_since, q_since, carried, weight, u, w, kk_u, kk_w, qk_at, column: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Against one earlier sub-block: what it takes from u and w of this one, and the stored qk."""
    i = tl.arange(0, 16)
    right = tl.trans(carried)
    a = weight[:, None] * product(k_since, right, OPERAND, PRECISION)
    qk = product(q_since, right, OPERAND, PRECISION)
    tl.store(qk_at + i[:, None] * 64 + column + i[None, :], rounded(qk, qk_at.dtype.element_ty))
    kk_u += product(a, u, tl.float32, PRECISION)
    kk_w += product(a, w, tl.float32, PRECISION)
    return kk_u, kk_w


@kernel
def _prepare(
    q, k, v, decay, beta, a_log, dt_bias, u, w, q_in, k_out, qk, carry, cu_seqlens, num_rows, bound,
    q_stride, k_stride, v_stride, decay_stride, beta_stride,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, BY_CHANNEL: tl.constexpr, BOUNDED: tl.constexpr, EPS: tl.constexpr,
    AROUND_MIDDLE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one row, one head: everything that needs no state."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    row = row_of_block(cu_seqlens, num_rows, block, 64)
    begin = tl.load(cu_seqlens + row).to(tl.int64)
    length = tl.load(cu_seqlens + row + 1).to(tl.int64) - begin
    first = (block - (begin // 64 + row)) * 64
    if first < length:
        i = tl.arange(0, 16)
        keys = tl.arange(0, KP)
        values = tl.arange(0, VP)
        key_head = head // (H // HK)
        rate, bias = load_gate(a_log, dt_bias, head, keys, K, BY_CHANNEL)
        at = (block.to(tl.int64) * H + head) * 64  # first token in the workspace
        keys_at = i[:, None] * K + keys[None, :]
        values_at = values[None, :] * 64 + i[:, None]
        inside_k = (i >= 0)[:, None] & (keys < K)[None, :]
        inside_v = (i >= 0)[:, None] & (values < V)[None, :]
        kind = w.dtype.element_ty

        # u, w and carried keys of the sub-blocks done; those to come are not used.
        u0 = tl.zeros([16, VP], tl.float32)
        w0 = tl.zeros([16, KP], tl.float32)
        c0 = tl.zeros([16, KP], tl.float32)
        u1, w1, c1 = u0, w0, c0
        u2, w2, c2 = u0, w0, c0
        before = tl.zeros([1, KP if BY_CHANNEL else 1], tl.float32)  # log decay of the chunk so far
        for sub in tl.static_range(4):
            left = length - first - sub * 16  # tokens of the row from here on
            token = begin + first + sub * 16 + i
            live = i < left
            live_k = live[:, None] & (keys < K)[None, :]
            live_v = live[:, None] & (values < V)[None, :]
            k_raw = tl.load(
                k + token[:, None] * k_stride + key_head * K + keys[None, :],
                mask=live_k, other=0.0,
            ).to(tl.float32)  # fmt: skip
            q_raw = tl.load(
                q + token[:, None] * q_stride + key_head * K + keys[None, :],
                mask=live_k, other=0.0,
            ).to(tl.float32)  # fmt: skip
            ks = k_raw * tl.rsqrt(tl.sum(k_raw * k_raw, 1) + EPS)[:, None]
            qs = q_raw * (tl.rsqrt(tl.sum(q_raw * q_raw, 1) + EPS) * (K**-0.5))[:, None]
            weight = tl.load(beta + token * beta_stride + head, mask=live, other=0.0)
            weight = tl.where(live, sigmoid(weight.to(tl.float32)), 0.0)
            if BY_CHANNEL:
                raw = tl.load(
                    decay + token[:, None] * decay_stride + head * K + keys[None, :],
                    mask=live_k, other=0.0,
                ).to(tl.float32)  # fmt: skip
                g = tl.where(live_k, log_decay(raw, rate, bias[None, :], bound, BOUNDED), 0.0)
            else:
                raw = tl.load(decay + token * decay_stride + head, mask=live, other=0.0)
                g = tl.where(live, log_decay(raw.to(tl.float32), rate, bias, bound, BOUNDED), 0.0)
            since, rest, total = _sums(g, KP, BY_CHANNEL)
            kk, qk_own = _within(
                qs, ks, g, since, KP, BY_CHANNEL, AROUND_MIDDLE, OPERAND, PRECISION
            )
            lower = i[:, None] > i[None, :]
            inverse = _unit_lower_inverse(tl.where(lower, weight[:, None] * kk, 0.0))
            qk_own = tl.where(lower | (i[:, None] == i[None, :]), qk_own, 0.0)
            qk_at = qk + (at + sub * 16) * 64
            here = qk_at + i[:, None] * 64 + i[None, :]
            tl.store(here + sub * 16, rounded(qk_own, qk.dtype.element_ty))
            for later in tl.static_range(sub + 1, 4):
                tl.store(here + later * 16, tl.zeros([16, 16], qk.dtype.element_ty))

            decayed = tl.exp(since + before)
            k_since = ks * tl.exp(since)
            q_since = qs * tl.exp(since)
            tl.store(
                q_in + (at + sub * 16) * K + keys_at, rounded(qs * decayed, kind), mask=inside_k
            )
            known_u = tl.zeros([16, VP], tl.float32)
            known_w = tl.zeros([16, KP], tl.float32)
            if sub > 0:
                known_u, known_w = _earlier(
                    k_since, q_since, c0, weight, u0, w0, known_u, known_w, qk_at, 0,
                    OPERAND, PRECISION,
                )  # fmt: skip
            if sub > 1:
                known_u, known_w = _earlier(
                    k_since, q_since, c1, weight, u1, w1, known_u, known_w, qk_at, 16,
                    OPERAND, PRECISION,
                )  # fmt: skip
            if sub > 2:
                known_u, known_w = _earlier(
                    k_since, q_since, c2, weight, u2, w2, known_u, known_w, qk_at, 32,
                    OPERAND, PRECISION,
                )  # fmt: skip
            vs = tl.load(
                v + token[:, None] * v_stride + head * V + values[None, :], mask=live_v, other=0.0
            ).to(tl.float32)
            u_own = product(inverse, weight[:, None] * vs - known_u, tl.float32, PRECISION)
            w_own = product(
                inverse, weight[:, None] * ks * decayed - known_w, tl.float32, PRECISION
            )
            tl.store(u + at * V + sub * 16 + values_at, rounded(u_own, kind), mask=inside_v)
            tl.store(w + (at + sub * 16) * K + keys_at, rounded(w_own, kind), mask=inside_k)

            # Keys of all sub-blocks so far, with their decay up to the end of this one.
            fall = tl.exp(total)
            c0, c1, c2 = c0 * fall, c1 * fall, c2 * fall
            carried = ks * tl.exp(rest)
            if sub == 0:
                u0, w0, c0 = u_own, w_own, carried
            if sub == 1:
                u1, w1, c1 = u_own, w_own, carried
            if sub == 2:
                u2, w2, c2 = u_own, w_own, carried
            if sub == 3:
                tl.store(k_out + (at + 0) * K + keys_at, rounded(c0, kind), mask=inside_k)
                tl.store(k_out + (at + 16) * K + keys_at, rounded(c1, kind), mask=inside_k)
                tl.store(k_out + (at + 32) * K + keys_at, rounded(c2, kind), mask=inside_k)
                tl.store(k_out + (at + 48) * K + keys_at, rounded(carried, kind), mask=inside_k)
            before += total
        if BY_CHANNEL:
            here = carry + (block.to(tl.int64) * H + head) * K + keys[None, :]
            tl.store(here, tl.exp(before), mask=(keys < K)[None, :])
        else:
            one = tl.zeros([1, 1], tl.int32)
            tl.store(carry + (block.to(tl.int64) * H + head) + one, tl.exp(before))


@triton.jit
def _tile(at, inside, WHOLE: tl.constexpr):
    """A tile of the workspace, zero outside; a mask that is not needed is in the way of copies."""
    if WHOLE:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=inside, other=0.0)
    return tile


@triton.jit
def _next_stop(export_row, export_offset, num_exports, row, length, last, own):
    """The next place where a row's state is wanted, as chunks * (exports + 1) + which.

    The lowest one above `last`; `own`, the row's end, is the highest. Exports need no order.
    """
    found = own
    for e0 in range(0, num_exports, 64):
        e = e0 + tl.arange(0, 64)
        there = e < num_exports
        of_row = tl.load(export_row + e, mask=there, other=-1) == row
        offset = tl.load(export_offset + e, mask=there, other=0).to(tl.int64)
        whole = (offset // 64) * 64 == offset
        fits = of_row & (offset >= 1) & (offset <= length) & (whole | (offset == length))
        stop = ((offset + 63) // 64) * (num_exports + 1) + e
        found = tl.minimum(found, tl.min(tl.where(fits & (stop > last), stop, own), 0))
    return found


@kernel
def _recur(
    u, w, q_in, k_out, qk, carry, o, bank, cu_seqlens, state_in, state_out,
    export_row, export_offset, export_slot, report, num_rows, num_exports, bank_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    BY_CHANNEL: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One row and head, BV value channels, along the chunks; stops where a state is wanted.

    The state is the left operand of every product, and so never leaves the registers.
    """
    head = tl.program_id(1)
    row = tl.program_id(2)
    first = (tl.program_id(0) == 0) & (head == 0)
    keys = tl.arange(0, KP)
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    token = tl.arange(0, 64)
    begin = tl.load(cu_seqlens + row).to(tl.int64)
    length = tl.load(cu_seqlens + row + 1).to(tl.int64) - begin
    block = begin // 64 + row
    s = load_state(
        bank, tl.load(state_in + row).to(tl.int64), head, keys, values, bank_stride, K, V
    )
    keys_at = token[:, None] * K + keys[None, :]
    values_at = values[:, None] * 64 + token[None, :]
    pairs_at = token[:, None] * 64 + token[None, :]
    own = ((length + 63) // 64) * (num_exports + 1) + num_exports
    done = (length * 0).to(tl.int32)
    last = length * 0 - 1
    while last < own:
        stop = _next_stop(export_row, export_offset, num_exports, row, length, last, own)
        until = (stop // (num_exports + 1)).to(tl.int32)
        for chunk in range(done, until):
            at = ((block + chunk) * H + head) * 64
            ws = _tile(w + at * K + keys_at, (keys < K)[None, :], K == KP)
            qs = _tile(q_in + at * K + keys_at, (keys < K)[None, :], K == KP)
            ks = _tile(k_out + at * K + keys_at, (keys < K)[None, :], K == KP)
            us = _tile(u + at * V + values_at, (values < V)[:, None], V % BV == 0)
            pairs = tl.load(qk + at * 64 + pairs_at)
            if BY_CHANNEL:
                fall = tl.load(carry + (at // 64) * K + keys, mask=keys < K, other=0.0)[None, :]
            else:
                fall = tl.load(carry + at // 64)
            left = rounded(s, OPERAND)
            fresh = us.to(tl.float32) - product(left, tl.trans(ws), OPERAND, PRECISION)
            taken = rounded(fresh, OPERAND)
            out = product(left, tl.trans(qs), OPERAND, PRECISION)
            out += product(taken, tl.trans(pairs), OPERAND, PRECISION)
            s = s * fall + product(taken, ks, OPERAND, PRECISION)
            place = chunk * 64 + token
            to = o + ((begin + place)[None, :] * H + head) * V + values[:, None]
            tl.store(
                to, rounded(out, o.dtype.element_ty),
                mask=(values < V)[:, None] & (place < length)[None, :],
            )  # fmt: skip
        e = stop - (stop // (num_exports + 1)) * (num_exports + 1)
        if e == num_exports:
            to_slot = tl.load(state_out + row).to(tl.int64)
            store_state(bank, to_slot, s, head, keys, values, bank_stride, K, V)
            tell(report, row, num_rows + num_exports, to_slot, length, first)
        else:
            to_slot = tl.load(export_slot + e).to(tl.int64)
            offset = tl.load(export_offset + e).to(tl.int64)
            store_state(bank, to_slot, s, head, keys, values, bank_stride, K, V)
            tell(report, num_rows + e, num_rows + num_exports, to_slot, offset, first)
        done = until
        last = stop
