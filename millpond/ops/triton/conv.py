"""The short causal convolution from slot to slot, for prompt, decode and verify rows.

Contract and arithmetic: `millpond.ops.reference.conv` and `.verify`. Taps are added in rising order
in fp32. x may be a view of wider rows; a token's channels are contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millpond.ops.batch import RowSlots, VerifyRows
from millpond.ops.triton.choices import conv_choice
from millpond.ops.triton.shared import (
    LAUNCH,
    kernel,
    no_report,
    power_of_two,
    rounded,
    row_of_block,
    silu,
    slot_stride,
    tell,
    token_stride,
)


def conv_prefill(
    x: torch.Tensor, weight: torch.Tensor, *, bank: torch.Tensor, rows: RowSlots
) -> torch.Tensor:
    """As the reference. Two launches: outputs, then windows (a row may write what it read)."""
    choice = conv_choice(x.device)
    channels, width = weight.shape
    y = torch.empty((x.shape[0], channels), dtype=x.dtype, device=x.device)
    count, exports = rows.num_rows, rows.export_slot.shape[0]
    report = no_report(count, exports, x.device)
    split = triton.cdiv(channels, choice.channels)
    if count:
        _outputs[(x.shape[0] // choice.tokens + count, split)](
            x, y, weight, bank, rows.cu_seqlens, rows.state_in, count,
            token_stride(x), slot_stride(bank),
            C=channels, W=width, BT=choice.tokens, BC=choice.channels,
            num_warps=choice.warps, **LAUNCH,
        )  # fmt: skip
        _windows[(count + exports, split)](
            x, bank, rows.cu_seqlens, rows.state_in, rows.state_out,
            rows.export_row, rows.export_offset, rows.export_slot, report, count, exports,
            token_stride(x), slot_stride(bank),
            C=channels, HISTORY=width - 1, PLACES=power_of_two(width - 1), BC=choice.channels,
            num_warps=choice.warps, **LAUNCH,
        )  # fmt: skip
    rows.written.record(*report)
    return y


def conv_decode(
    x: torch.Tensor, weight: torch.Tensor, *, bank: torch.Tensor, rows: RowSlots
) -> torch.Tensor:
    """As `conv_prefill` in one launch: a program is a row's channels, all tokens one by one."""
    choice = conv_choice(x.device)
    channels, width = weight.shape
    y = torch.empty((x.shape[0], channels), dtype=x.dtype, device=x.device)
    count, exports = rows.num_rows, rows.export_slot.shape[0]
    report = no_report(count, exports, x.device)
    if count:
        _decode[(count, triton.cdiv(channels, choice.channels))](
            x, y, weight, bank, rows.cu_seqlens, rows.state_in, rows.state_out,
            rows.export_row, rows.export_offset, rows.export_slot, report, count, exports,
            token_stride(x), slot_stride(bank),
            C=channels, W=width, PLACES=power_of_two(width - 1), BC=choice.channels,
            num_warps=choice.warps, **LAUNCH,
        )  # fmt: skip
    rows.written.record(*report)
    return y


def conv_verify(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bank: torch.Tensor,
    ring: torch.Tensor,
    rows: VerifyRows,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, in one launch; only places that hold a token are written."""
    choice = conv_choice(x.device)
    channels, width = weight.shape
    count, most = rows.num_rows, rows.width - 1
    y = torch.empty((x.shape[0], channels), dtype=x.dtype, device=x.device)
    old_y = torch.empty((count, most, channels), dtype=x.dtype, device=x.device)
    report = no_report(count, count, x.device)
    if count:
        _verify[(count, triton.cdiv(channels, choice.channels))](
            x, y, old_y, weight, bank, ring, rows.state_in, rows.state_out, rows.base,
            rows.pending, rows.num_drafts, rows.parity, rows.seats,
            rows.export_end, rows.export_slot, report, count,
            token_stride(x), slot_stride(bank), slot_stride(ring),
            C=channels, W=width, MOST=most, PLACES=power_of_two(width - 1), BC=choice.channels,
            num_warps=choice.warps, **LAUNCH,
        )  # fmt: skip
    rows.written.record(*report)
    return old_y, y


@kernel
def _outputs(
    x, y, weight, bank, cu_seqlens, state_in, num_rows, x_stride, bank_stride,
    C: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BT tokens of one row by BC channels."""
    block = tl.program_id(0)
    row = row_of_block(cu_seqlens, num_rows, block, BT)
    begin = tl.load(cu_seqlens + row).to(tl.int64)
    length = tl.load(cu_seqlens + row + 1).to(tl.int64) - begin
    first = (block - (begin // BT + row)) * BT
    if first < length:
        slot = tl.load(state_in + row).to(tl.int64)
        at = first + tl.arange(0, BT)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        here = (at < length)[:, None] & (c < C)[None, :]
        held = (c < tl.where(slot >= 0, C, 0))[None, :]
        total = tl.zeros([BT, BC], tl.float32)
        for tap in tl.static_range(W):
            place = at + (tap - (W - 1))
            value = tl.load(
                x + (begin + place)[:, None] * x_stride + c[None, :],
                mask=here & (place >= 0)[:, None],
                other=0.0,
            ).to(tl.float32)
            if first == 0:
                before = (place < 0)[:, None]
                old = tl.load(
                    bank
                    + tl.maximum(slot, 0) * bank_stride
                    + c[None, :] * (W - 1)
                    + (place + (W - 1))[:, None],
                    mask=here & before & held,
                    other=0.0,
                ).to(tl.float32)
                value = tl.where(before, old, value)
            factor = tl.load(weight + c * W + tap, mask=c < C, other=0.0).to(tl.float32)
            total += factor[None, :] * value
        out = y + (begin + at)[:, None] * C + c[None, :]
        tl.store(out, rounded(silu(total), y.dtype.element_ty), mask=here)


@triton.jit
def _some(c, condition, C: tl.constexpr):
    """c < C where the condition holds, which may be of the whole tile: a bound, since the
    interpreter cannot spread a single bool."""
    return c < tl.where(condition, C, 0)


@triton.jit
def _input(
    x, bank, slot, place, c, here, x_stride, bank_stride, C: tl.constexpr, HISTORY: tl.constexpr
):
    """Inputs of one row at `place`, counted from the row's first token at x; before it, the slot's.

    `place` and `c` broadcast to one tile; `here` masks it. In the dtype of x.
    """
    value = tl.load(x + place * x_stride + c, mask=here & _some(c, place >= 0, C), other=0.0)
    old = tl.load(
        bank + tl.maximum(slot, 0) * bank_stride + c * HISTORY + place + HISTORY,
        mask=here & _some(c, (place < 0) & (slot >= 0), C),
        other=0.0,
    )
    return tl.where(place < 0, old.to(x.dtype.element_ty), value)


@triton.jit
def _store_window(
    bank, slot, window, c, step, here, bank_stride, C: tl.constexpr, HISTORY: tl.constexpr
):
    """window [BC, places] into a slot, unless there is none.

    Every thread has read what it needs of that slot before any overwrites it.
    """
    tl.debug_barrier()
    tl.store(
        bank + tl.maximum(slot, 0) * bank_stride + c * HISTORY + step,
        window.to(bank.dtype.element_ty),
        mask=here & _some(c, slot >= 0, C),
    )


@kernel
def _windows(
    x, bank, cu_seqlens, state_in, state_out, export_row, export_offset, export_slot, report,
    num_rows, num_exports, x_stride, bank_stride,
    C: tl.constexpr, HISTORY: tl.constexpr, PLACES: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The window of one row or export. An export that needs the old window is its row's business:
    the row may overwrite it."""
    target = tl.program_id(0)
    c = (tl.program_id(1) * BC + tl.arange(0, BC))[:, None]
    step = tl.arange(0, PLACES)[None, :]
    here = (c < C) & (step < HISTORY)
    first = tl.program_id(1) == 0
    if target < num_rows:
        begin = tl.load(cu_seqlens + target).to(tl.int64)
        length = tl.load(cu_seqlens + target + 1).to(tl.int64) - begin
        slot = tl.load(state_in + target).to(tl.int64)
        tokens = x + begin * x_stride
        if length < HISTORY:
            for e in range(num_exports):
                offset = tl.load(export_offset + e).to(tl.int64)
                if (tl.load(export_row + e) == target) & (offset >= 1) & (offset <= length):
                    to = tl.load(export_slot + e).to(tl.int64)
                    window = _input(
                        tokens, bank, slot, offset - HISTORY + step, c, here, x_stride,
                        bank_stride, C, HISTORY,
                    )  # fmt: skip
                    _store_window(bank, to, window, c, step, here, bank_stride, C, HISTORY)
                    tell(report, num_rows + e, num_rows + num_exports, to, offset, first)
        to = tl.load(state_out + target).to(tl.int64)
        window = _input(
            tokens, bank, slot, length - HISTORY + step, c, here, x_stride, bank_stride, C, HISTORY
        )
        _store_window(bank, to, window, c, step, here, bank_stride, C, HISTORY)
        tell(report, target, num_rows + num_exports, to, length, first)
    else:
        e = target - num_rows
        row = tl.load(export_row + e).to(tl.int64)
        offset = tl.load(export_offset + e).to(tl.int64)
        if (row >= 0) & (row < num_rows):
            begin = tl.load(cu_seqlens + row).to(tl.int64)
            length = tl.load(cu_seqlens + row + 1).to(tl.int64) - begin
            if (length >= HISTORY) & (offset >= 1) & (offset <= length):
                to = tl.load(export_slot + e).to(tl.int64)
                slot = tl.load(state_in + row).to(tl.int64)
                window = _input(
                    x + begin * x_stride, bank, slot, offset - HISTORY + step, c, here, x_stride,
                    bank_stride, C, HISTORY,
                )  # fmt: skip
                _store_window(bank, to, window, c, step, here, bank_stride, C, HISTORY)
                tell(report, target, num_rows + num_exports, to, offset, first)


@kernel
def _decode(
    x, y, weight, bank, cu_seqlens, state_in, state_out, export_row, export_offset, export_slot,
    report, num_rows, num_exports, x_stride, bank_stride,
    C: tl.constexpr, W: tl.constexpr, PLACES: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """All tokens of one row by BC channels, then its windows."""
    row = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    begin = tl.load(cu_seqlens + row).to(tl.int64)
    length = tl.load(cu_seqlens + row + 1).to(tl.int64) - begin
    slot = tl.load(state_in + row).to(tl.int64)
    tokens = x + begin * x_stride
    for at in range(length):
        total = tl.zeros([BC], tl.float32)
        for tap in tl.static_range(W):
            value = _input(
                tokens, bank, slot, at + (tap - (W - 1)), c, c < C, x_stride, bank_stride, C, W - 1
            )
            factor = tl.load(weight + c * W + tap, mask=c < C, other=0.0).to(tl.float32)
            total += factor * value.to(tl.float32)
        tl.store(y + (begin + at) * C + c, rounded(silu(total), y.dtype.element_ty), mask=c < C)

    first = tl.program_id(1) == 0
    c = c[:, None]
    step = tl.arange(0, PLACES)[None, :]
    here = (c < C) & (step < W - 1)
    for e in range(num_exports):
        offset = tl.load(export_offset + e).to(tl.int64)
        if (tl.load(export_row + e) == row) & (offset >= 1) & (offset <= length):
            to = tl.load(export_slot + e).to(tl.int64)
            window = _input(
                tokens,
                bank,
                slot,
                offset - (W - 1) + step,
                c,
                here,
                x_stride,
                bank_stride,
                C,
                W - 1,
            )
            _store_window(bank, to, window, c, step, here, bank_stride, C, W - 1)
            tell(report, num_rows + e, num_rows + num_exports, to, offset, first)
    to = tl.load(state_out + row).to(tl.int64)
    window = _input(
        tokens, bank, slot, length - (W - 1) + step, c, here, x_stride, bank_stride, C, W - 1
    )
    _store_window(bank, to, window, c, step, here, bank_stride, C, W - 1)
    tell(report, row, num_rows + num_exports, to, length, first)


@triton.jit
def _series(
    x, ring, bank, slot, place, replayed, c, here, x_stride, bank_stride,
    C: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """Inputs of a verify row at `place`, counted from its base: the slot's, the ring's `replayed`
    pending drafts, then the row's own at x. In the dtype of x."""
    kind = x.dtype.element_ty
    own = tl.load(
        x + (place - replayed) * x_stride + c, mask=here & _some(c, place >= replayed, C), other=0.0
    )
    held = tl.load(
        ring + place * C + c,
        mask=here & _some(c, (place >= 0) & (place < replayed), C),
        other=0.0,
    ).to(kind)
    old = tl.load(
        bank + tl.maximum(slot, 0) * bank_stride + c * HISTORY + place + HISTORY,
        mask=here & _some(c, (place < 0) & (slot >= 0), C),
        other=0.0,
    ).to(kind)
    return tl.where(place < 0, old, tl.where(place < replayed, held, own))


@kernel
def _verify(
    x, y, old_y, weight, bank, ring, state_in, state_out, base, pending, num_drafts, parity, seats,
    export_end, export_slot, report, num_rows, x_stride, bank_stride, ring_stride,
    C: tl.constexpr, W: tl.constexpr, MOST: tl.constexpr, PLACES: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One verify row by BC channels: pending drafts, own tokens, the other ring bank, windows."""
    row = tl.program_id(0)
    seat = tl.load(seats + row).to(tl.int64)
    if seat >= 0:
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        slot = tl.load(state_in + row).to(tl.int64)
        replayed = tl.load(pending + row).to(tl.int64)
        drafts = tl.load(num_drafts + row).to(tl.int64)
        bank_of_ring = tl.load(parity + row).to(tl.int64)
        tokens = x + row.to(tl.int64) * (MOST + 1) * x_stride
        held = ring + seat * ring_stride + bank_of_ring * (MOST * C)
        left = ring + seat * ring_stride + (1 - bank_of_ring) * (MOST * C)
        for at in range(replayed + 1 + drafts):
            total = tl.zeros([BC], tl.float32)
            for tap in tl.static_range(W):
                value = _series(
                    tokens, held, bank, slot, at + (tap - (W - 1)), replayed, c, c < C,
                    x_stride, bank_stride, C, W - 1,
                )  # fmt: skip
                factor = tl.load(weight + c * W + tap, mask=c < C, other=0.0).to(tl.float32)
                total += factor * value.to(tl.float32)
            out = rounded(silu(total), y.dtype.element_ty)
            own = at - replayed
            if own < 0:
                tl.store(old_y + (row.to(tl.int64) * MOST + at) * C + c, out, mask=c < C)
            else:
                tl.store(y + (row.to(tl.int64) * (MOST + 1) + own) * C + c, out, mask=c < C)
        for draft in range(drafts):
            raw = tl.load(tokens + (draft + 1) * x_stride + c, mask=c < C, other=0.0)
            tl.store(left + draft * C + c, raw.to(ring.dtype.element_ty), mask=c < C)

        first = tl.program_id(1) == 0
        start = tl.load(base + row).to(tl.int64)
        c = c[:, None]
        step = tl.arange(0, PLACES)[None, :]
        here = (c < C) & (step < W - 1)
        to = tl.load(export_slot + row).to(tl.int64)
        folded = tl.load(export_end + row).to(tl.int64) - start
        if (to >= 0) & (folded >= 1) & (folded <= replayed + 1):
            window = _series(
                tokens, held, bank, slot, folded - (W - 1) + step, replayed, c, here,
                x_stride, bank_stride, C, W - 1,
            )  # fmt: skip
            _store_window(bank, to, window, c, step, here, bank_stride, C, W - 1)
            tell(report, num_rows + row, 2 * num_rows, to, folded, first)
        to = tl.load(state_out + row).to(tl.int64)
        window = _series(
            tokens, held, bank, slot, replayed + 1 - (W - 1) + step, replayed, c, here,
            x_stride, bank_stride, C, W - 1,
        )  # fmt: skip
        _store_window(bank, to, window, c, step, here, bank_stride, C, W - 1)
        tell(report, row, 2 * num_rows, to, replayed + 1, first)
