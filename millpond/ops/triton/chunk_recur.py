"""The delta rule along the chunks of a row, from slot to slot, with what `chunk_prepare` made.

A program holds all key channels and some value channels of one head's state, fp32, in registers,
where it and what becomes of it are the left operands of every product.
Where a state is wanted on the way the loop over chunks ends, and begins anew after it is stored:
tested inside, it would cost every chunk more than that costs an export. Knows nothing of decay
inputs, beta or norms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from millpond.ops.triton.shared import kernel, product, rounded, tell


@triton.jit
def _load_state(bank, slot, head, keys, values, stride, K: tl.constexpr, V: tl.constexpr):
    """One head's rows `values` of a slot [BV, KP] fp32; zero where there is no slot."""
    inside = (values < tl.where(slot >= 0, V, 0))[:, None] & (keys < K)[None, :]
    at = bank + tl.maximum(slot, 0) * stride + head * (V * K)
    return tl.load(at + values[:, None] * K + keys[None, :], mask=inside, other=0.0)


@triton.jit
def _store_state(bank, slot, s, head, keys, values, stride, K: tl.constexpr, V: tl.constexpr):
    """s [BV, KP] into one head's rows of a slot, unless there is none."""
    inside = (values < tl.where(slot >= 0, V, 0))[:, None] & (keys < K)[None, :]
    at = bank + tl.maximum(slot, 0) * stride + head * (V * K)
    tl.store(at + values[:, None] * K + keys[None, :], s, mask=inside)


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
    q_at, k_at, v_at, work, scales, o_at, bank, cu_seqlens, state_in, state_out,
    export_row, export_offset, export_slot, report, num_rows, num_exports,
    q_stride, k_stride, v_stride, bank_stride,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    BV: tl.constexpr, BY_CHANNEL: tl.constexpr, RECORD: tl.constexpr, NUMBERS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row and head, BV value channels, along the chunks."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    first = (tl.program_id(0) == 0) & (head == 0)
    key_head = head // (H // HK)
    keys = tl.arange(0, KP)
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    i = tl.arange(0, 64)
    begin = tl.load(cu_seqlens + row).to(tl.int64)
    length = tl.load(cu_seqlens + row + 1).to(tl.int64) - begin
    block = begin // 64 + row
    s = _load_state(
        bank, tl.load(state_in + row).to(tl.int64), head, keys, values, bank_stride, K, V
    )
    n = tl.arange(0, 16)
    own_value = tl.program_id(0) * BV + 16 * tl.arange(0, BV // 16)[None, :, None, None]
    own_value += n[None, None, :, None]
    own_token = 16 * tl.arange(0, 4)[:, None, None, None] + n[None, None, None, :]
    tile_at = i[:, None] * K + keys[None, :]
    pair_at = i[:, None] * 64 + i[None, :]
    some_keys = (keys < K)[None, :]
    own = ((length + 63) // 64) * (num_exports + 1) + num_exports
    done = (length * 0).to(tl.int32)
    last = length * 0 - 1
    while last < own:
        stop = _next_stop(export_row, export_offset, num_exports, row, length, last, own)
        to_chunk = (stop // (num_exports + 1)).to(tl.int32)
        for chunk in tl.range(done, to_chunk, num_stages=STAGES):
            record = work + ((block + chunk) * H + head) * RECORD
            numbers = scales + ((block + chunk) * H + head) * NUMBERS
            token = begin + chunk * 64
            left = tl.minimum(length - chunk * 64, 64).to(tl.int32)
            # Rows after the last token repeat it: what they are multiplied with is zero.
            token_row = tl.minimum(i, left - 1)
            solve = tl.load(record + pair_at)
            pairs = tl.load(record + 4096 + pair_at)
            v_rows = v_at + token * v_stride + head * V
            vs = _tile(
                v_rows + token_row[:, None] * v_stride + values[None, :],
                (values < V)[None, :],
                V % BV == 0,
            )
            if BY_CHANNEL:
                tiles = record + 2 * 4096
                k_since = _tile(tiles + tile_at, some_keys, K == KP)
                q_since = _tile(tiles + 64 * K + tile_at, some_keys, K == KP)
                k_until = _tile(tiles + 2 * 64 * K + tile_at, some_keys, K == KP)
            else:
                k_rows = k_at + token * k_stride + key_head * K
                q_rows = q_at + token * q_stride + key_head * K
                k_since = _tile(
                    k_rows + token_row[:, None] * k_stride + keys[None, :], some_keys, K == KP
                )
                q_since = _tile(
                    q_rows + token_row[:, None] * q_stride + keys[None, :], some_keys, K == KP
                )
                k_until = k_since
            held = rounded(s, OPERAND)
            known = product(held, tl.trans(k_since), OPERAND, PRECISION)
            if not BY_CHANNEL:
                known *= tl.load(numbers + i)[None, :]
            fresh = product(tl.trans(vs), tl.trans(solve), OPERAND, PRECISION)
            fresh += product(known, tl.trans(solve), OPERAND, PRECISION)
            taken = rounded(fresh, OPERAND)
            read = product(held, tl.trans(q_since), OPERAND, PRECISION)
            if not BY_CHANNEL:
                read *= tl.load(numbers + 64 + i)[None, :]
            read += product(taken, tl.trans(pairs), OPERAND, PRECISION)
            if BY_CHANNEL:
                fall = tl.load(numbers + keys, mask=keys < K, other=0.0)[None, :]
            else:
                taken = rounded(fresh * tl.load(numbers + 2 * 64 + i)[None, :], OPERAND)
                fall = tl.load(numbers + 3 * 64)
            s = s * fall + product(taken, k_until, OPERAND, PRECISION)
            # Sixteen values by sixteen tokens at a time: each goes from one warp's registers to
            # memory without the others'.
            read = tl.reshape(rounded(read, o_at.dtype.element_ty), (BV // 16, 16, 4, 16))
            at = o_at + (token * H + head) * V + own_token * (H * V) + own_value
            tl.store(at, tl.permute(read, (2, 0, 1, 3)), mask=(own_value < V) & (own_token < left))
        e = stop - (stop // (num_exports + 1)) * (num_exports + 1)
        # A row may be in place, and without tokens: all threads have read before one writes.
        tl.debug_barrier()
        if e == num_exports:
            to = tl.load(state_out + row).to(tl.int64)
            _store_state(bank, to, s, head, keys, values, bank_stride, K, V)
            tell(report, row, num_rows + num_exports, to, length, first)
        else:
            to = tl.load(export_slot + e).to(tl.int64)
            offset = tl.load(export_offset + e).to(tl.int64)
            _store_state(bank, to, s, head, keys, values, bank_stride, K, V)
            tell(report, num_rows + e, num_rows + num_exports, to, offset, first)
        done = to_chunk
        last = stop
