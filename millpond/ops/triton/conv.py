"""The short causal convolution of prompt rows, from slot to slot.

Contract and arithmetic: `millpond.ops.reference.conv`. Taps are added in rising order in fp32. x
may be a view of wider rows; a token's channels are contiguous. Decode and verify rows
go through `steps`, which uses the taps, windows and sums of this module.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millpond.ops.batch import RowSlots
from millpond.ops.triton.choices import conv_choice
from millpond.ops.triton.shared import (
    UNFUSED,
    aligned,
    cdiv,
    kernel,
    power_of_two,
    rounded,
    row_of_block,
    silu,
    token_stride,
    told,
)

TAPS = 4
"""Width of the widest convolution there is a kernel for; a narrower one has taps of zero."""


def conv_prefill(
    x: torch.Tensor, weight: torch.Tensor, *, bank: torch.Tensor, rows: RowSlots
) -> torch.Tensor:
    """As the reference. Two launches: outputs, then windows (a row may write what it read)."""
    choice = conv_choice(x.device)
    channels, shape = weight.shape[0], conv_shape(weight, bank)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    count, exports = rows.num_rows, rows.export_slot.shape[0]
    report = rows.written.blank(count + exports, x.device)
    if count:
        x_stride, bank_stride = token_stride(x), bank.stride(0)
        _outputs[(cdiv(channels, choice.channels), x.shape[0] // choice.tokens + count)](
            x, y, weight, bank, rows.cu_seqlens, rows.state_in, count, x_stride, bank_stride,
            C=channels, **shape, BT=choice.tokens, BC=choice.channels,
            ALIGNED=aligned(x, y), num_warps=choice.warps, **UNFUSED,
        )  # fmt: skip
        _windows[(count + exports, cdiv(channels, choice.window_channels))](
            x, bank, rows.cu_seqlens, rows.state_in, rows.state_out,
            rows.export_row, rows.export_offset, rows.export_slot, report, count, exports,
            x_stride, bank_stride,
            C=channels, OLD_C=shape["OLD_C"], OLD_W=shape["OLD_W"], HISTORY=shape["W"] - 1,
            PLACES=power_of_two(shape["W"] - 1), BC=choice.window_channels,
            num_warps=choice.window_warps, **UNFUSED,
        )  # fmt: skip
    rows.written.record_report(report)
    return y


def conv_shape(weight: torch.Tensor, bank: torch.Tensor) -> dict[str, int]:
    """What kernels specialise on: tokens that an output sees, and steps in memory from one channel
    to the next and from one tap or place to the next. Loads are wide where channels lie together.
    """
    width = weight.shape[1]
    if width > TAPS:
        raise ValueError(f"a convolution over {width} tokens: the kernels go up to {TAPS}")
    tap_c, tap_w = weight.stride()
    _, old_c, old_w = bank.stride()
    return {
        "W": width,
        "TAP_C": tap_c,
        "TAP_W": tap_w,
        "OLD_C": old_c,
        "OLD_W": old_w,
    }


@triton.jit
def tap(
    weight, c, n, size, BACK: tl.constexpr,
    W: tl.constexpr, TAP_C: tl.constexpr, TAP_W: tl.constexpr,
):  # fmt: skip
    """The factor of the input `BACK` tokens ago, of channels c where n < size."""
    if BACK < W:
        at = weight + c * TAP_C + (W - 1 - BACK) * TAP_W
        factor = tl.load(at, mask=n < size, other=0.0).to(tl.float32)
    else:
        factor = (n * 0).to(tl.float32)
    return factor


@triton.jit
def old_input(
    bank, slot, c, n, stride, size, BACK: tl.constexpr,
    W: tl.constexpr, OLD_C: tl.constexpr, OLD_W: tl.constexpr,
):  # fmt: skip
    """The slot's input `BACK` tokens before its end, of channels c where n < size; zero where there
    is none."""
    if BACK < W:
        at = bank + tl.maximum(slot, 0) * stride + c * OLD_C + (W - 1 - BACK) * OLD_W
        value = tl.load(at, mask=n < tl.where(slot >= 0, size, 0), other=0.0)
    else:
        value = (n * 0).to(bank.dtype.element_ty)
    return value


@triton.jit
def keep_inputs(
    bank, slot, x2, x1, x0, c, n, stride, size,
    W: tl.constexpr, OLD_C: tl.constexpr, OLD_W: tl.constexpr,
):  # fmt: skip
    """The last three inputs, as many as a slot keeps, unless there is none.

    Every thread has read what it needs of that slot before any overwrites it.
    """
    tl.debug_barrier()
    at = bank + tl.maximum(slot, 0) * stride + c * OLD_C
    there = n < tl.where(slot >= 0, size, 0)
    if W >= 4:
        tl.store(at + (W - 4) * OLD_W, x2.to(bank.dtype.element_ty), mask=there)
    if W >= 3:
        tl.store(at + (W - 3) * OLD_W, x1.to(bank.dtype.element_ty), mask=there)
    if W >= 2:
        tl.store(at + (W - 2) * OLD_W, x0.to(bank.dtype.element_ty), mask=there)


@triton.jit
def _load_channels(at, c, C, ALIGNED: tl.constexpr):
    """One token's inputs [BC], raw."""
    places = at + c
    if ALIGNED:
        places = tl.multiple_of(places, (16,))
    return tl.load(places, mask=c < C, other=0.0)


@triton.jit
def _store_channels(at, value, c, C, ALIGNED: tl.constexpr):
    """One token's outputs or inputs [BC], in the type that is there."""
    places = at + c
    if ALIGNED:
        places = tl.multiple_of(places, (16,))
    tl.store(places, value, mask=c < C)


@triton.jit
def convolved(w3, w2, w1, w0, x3, x2, x1, x0):
    """silu of the taps' sum [BC], oldest first, in fp32."""
    total = w3 * x3.to(tl.float32)
    total = tl.fma(w2, x2.to(tl.float32), total)
    total = tl.fma(w1, x1.to(tl.float32), total)
    total = tl.fma(w0, x0.to(tl.float32), total)
    return silu(total)


@kernel
def _outputs(
    x, y, weight, bank, cu_seqlens, state_in, num_rows, x_stride, bank_stride,
    C: tl.constexpr, W: tl.constexpr, TAP_C: tl.constexpr, TAP_W: tl.constexpr,
    OLD_C: tl.constexpr, OLD_W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """BT tokens of one row by BC channels, four tokens at a time."""
    block = tl.program_id(1)
    row = row_of_block(cu_seqlens, num_rows, block, BT)
    begin = tl.load(cu_seqlens + row).to(tl.int64)
    length = tl.load(cu_seqlens + row + 1).to(tl.int64) - begin
    start = (block - (begin // BT + row)) * BT
    if start < length:
        c = tl.program_id(0) * BC + tl.arange(0, BC)
        tokens = x + begin * x_stride
        if start == 0:
            slot = tl.load(state_in + row).to(tl.int64)
            kind = x.dtype.element_ty
            x3 = old_input(bank, slot, c, c, bank_stride, C, 3, W, OLD_C, OLD_W).to(kind)
            x2 = old_input(bank, slot, c, c, bank_stride, C, 2, W, OLD_C, OLD_W).to(kind)
            x1 = old_input(bank, slot, c, c, bank_stride, C, 1, W, OLD_C, OLD_W).to(kind)
        else:
            x3 = _load_channels(tokens + (start - 3) * x_stride, c, C, ALIGNED)
            x2 = _load_channels(tokens + (start - 2) * x_stride, c, C, ALIGNED)
            x1 = _load_channels(tokens + (start - 1) * x_stride, c, C, ALIGNED)
        w3 = tap(weight, c, c, C, 3, W, TAP_C, TAP_W)
        w2 = tap(weight, c, c, C, 2, W, TAP_C, TAP_W)
        w1 = tap(weight, c, c, C, 1, W, TAP_C, TAP_W)
        w0 = tap(weight, c, c, C, 0, W, TAP_C, TAP_W)
        for at in range(start, tl.minimum(start + BT, length), 4):
            here = tokens + at * x_stride
            in_b = _there(1, at, length, C)
            in_c = _there(2, at, length, C)
            in_d = _there(3, at, length, C)
            xa = _load_channels(here, c, C, ALIGNED)
            xb = _load_channels(here + x_stride, c, in_b, ALIGNED)
            xc = _load_channels(here + 2 * x_stride, c, in_c, ALIGNED)
            xd = _load_channels(here + 3 * x_stride, c, in_d, ALIGNED)
            out = y + (begin + at) * C
            kind = y.dtype.element_ty
            ya = rounded(convolved(w3, w2, w1, w0, x3, x2, x1, xa), kind)
            yb = rounded(convolved(w3, w2, w1, w0, x2, x1, xa, xb), kind)
            yc = rounded(convolved(w3, w2, w1, w0, x1, xa, xb, xc), kind)
            yd = rounded(convolved(w3, w2, w1, w0, xa, xb, xc, xd), kind)
            _store_channels(out, ya, c, C, ALIGNED)
            _store_channels(out + C, yb, c, in_b, ALIGNED)
            _store_channels(out + 2 * C, yc, c, in_c, ALIGNED)
            _store_channels(out + 3 * C, yd, c, in_d, ALIGNED)
            x3, x2, x1 = xb, xc, xd


@triton.jit
def _there(ahead, at, length, C: tl.constexpr):
    """Channels of the token `ahead` of the one `at`: none beyond the row."""
    return tl.where(at + ahead < length, C, 0)


@triton.jit
def _some(c, condition, C: tl.constexpr):
    """c < C where the condition holds, which may be of the whole tile: a bound, since the
    interpreter cannot spread a single bool."""
    return c < tl.where(condition, C, 0)


@triton.jit
def _input(
    x, bank, slot, place, c, here, x_stride, bank_stride, C: tl.constexpr, HISTORY: tl.constexpr,
    OLD_C: tl.constexpr, OLD_W: tl.constexpr,
):  # fmt: skip
    """Inputs of one row at `place`, counted from the row's first token at x; before it, the slot's.

    `place` and `c` broadcast to one tile; `here` masks it. In the dtype of x.
    """
    value = tl.load(x + place * x_stride + c, mask=here & _some(c, place >= 0, C), other=0.0)
    old = tl.load(
        bank + tl.maximum(slot, 0) * bank_stride + c * OLD_C + (place + HISTORY) * OLD_W,
        mask=here & _some(c, (place < 0) & (slot >= 0), C),
        other=0.0,
    )
    return tl.where(place < 0, old.to(x.dtype.element_ty), value)


@triton.jit
def _store_window(
    bank, slot, window, c, step, here, bank_stride, C: tl.constexpr, HISTORY: tl.constexpr,
    OLD_C: tl.constexpr, OLD_W: tl.constexpr,
):  # fmt: skip
    """window [BC, places] into a slot, unless there is none.

    Every thread has read what it needs of that slot before any overwrites it.
    """
    tl.debug_barrier()
    tl.store(
        bank + tl.maximum(slot, 0) * bank_stride + c * OLD_C + step * OLD_W,
        window.to(bank.dtype.element_ty),
        mask=here & _some(c, slot >= 0, C),
    )


@kernel
def _windows(
    x, bank, cu_seqlens, state_in, state_out, export_row, export_offset, export_slot, report,
    num_rows, num_exports, x_stride, bank_stride,
    C: tl.constexpr, OLD_C: tl.constexpr, OLD_W: tl.constexpr, HISTORY: tl.constexpr,
    PLACES: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The window of one row or export. An export that needs the old window is its row's business:
    the row may overwrite it."""
    target = tl.program_id(0)
    c = (tl.program_id(1) * BC + tl.arange(0, BC))[:, None]
    step = tl.arange(0, PLACES)[None, :]
    here = (c < C) & (step < HISTORY)
    first = tl.program_id(1) == 0
    of = num_rows + num_exports
    if target < num_rows:
        begin = tl.load(cu_seqlens + target).to(tl.int64)
        length = tl.load(cu_seqlens + target + 1).to(tl.int64) - begin
        slot = tl.load(state_in + target).to(tl.int64)
        tokens = x + begin * x_stride
        if _early_exports(export_row, export_offset, num_exports, target, HISTORY) > 0:
            for e in range(num_exports):
                offset = tl.load(export_offset + e).to(tl.int64)
                if (tl.load(export_row + e) == target) & (offset < HISTORY):
                    to = tl.load(export_slot + e).to(tl.int64)
                    reached = (offset >= 1) & (offset <= length)
                    if reached:
                        window = _input(
                            tokens, bank, slot, offset - HISTORY + step, c, here, x_stride,
                            bank_stride, C, HISTORY, OLD_C, OLD_W,
                        )  # fmt: skip
                        _store_window(
                            bank, to, window, c, step, here, bank_stride, C, HISTORY, OLD_C, OLD_W
                        )
                    told(report, num_rows + e, of, to, offset, reached, first)
        to = tl.load(state_out + target).to(tl.int64)
        window = _input(
            tokens,
            bank,
            slot,
            length - HISTORY + step,
            c,
            here,
            x_stride,
            bank_stride,
            C,
            HISTORY,
            OLD_C,
            OLD_W,
        )
        _store_window(bank, to, window, c, step, here, bank_stride, C, HISTORY, OLD_C, OLD_W)
        told(report, target, of, to, length, True, first)
    else:
        e = target - num_rows
        offset = tl.load(export_offset + e).to(tl.int64)
        if offset >= HISTORY:
            row = tl.load(export_row + e).to(tl.int64)
            begin = tl.load(cu_seqlens + row).to(tl.int64)
            reached = offset <= tl.load(cu_seqlens + row + 1).to(tl.int64) - begin
            to = tl.load(export_slot + e).to(tl.int64)
            if reached:
                window = _input(
                    x + begin * x_stride, bank, to, offset - HISTORY + step, c, here, x_stride,
                    bank_stride, C, HISTORY, OLD_C, OLD_W,
                )  # fmt: skip
                _store_window(
                    bank, to, window, c, step, here, bank_stride, C, HISTORY, OLD_C, OLD_W
                )
            told(report, target, of, to, offset, reached, first)


@triton.jit
def _early_exports(export_row, export_offset, num_exports, row, HISTORY: tl.constexpr):
    """How many exports of a row need a part of the window that it reads."""
    found = 0
    for e0 in range(0, num_exports, 64):
        e = e0 + tl.arange(0, 64)
        of_row = tl.load(export_row + e, mask=e < num_exports, other=-1) == row
        offset = tl.load(export_offset + e, mask=e < num_exports, other=HISTORY)
        found += tl.sum((of_row & (offset < HISTORY)).to(tl.int32), 0)
    return found
