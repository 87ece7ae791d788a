"""The final hidden vector at a state's end, into and out of slots and rings.

Contract: `millpond.ops.reference.slots.boundary_store`, and `.verify` for the other two. All are
copies, so that their bytes are the reference's; none waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millpond.ops.batch import RowSlots, VerifyRows
from millpond.ops.triton.shared import (
    LAUNCH,
    cdiv,
    kernel,
    report_for,
    slot_stride,
    token_stride,
    told,
)

BLOCK = 1024
"""Elements of a vector that one program copies."""


def boundary_store(x: torch.Tensor, *, bank: torch.Tensor, rows: RowSlots) -> None:
    """As the reference; a row without tokens writes nothing and reports nothing."""
    count, exports, size = rows.num_rows, rows.export_slot.shape[0], bank.shape[1]
    report = report_for(count + exports, x.device)
    if count:
        _store[(count + exports, cdiv(size, BLOCK))](
            x, bank, rows.cu_seqlens, rows.state_out,
            rows.export_row, rows.export_offset, rows.export_slot, report, count, exports,
            token_stride(x), slot_stride(bank), SIZE=size, BLOCK=BLOCK, **LAUNCH,
        )  # fmt: skip
    rows.written.record_report(report)


def hidden_before_verify(
    x: torch.Tensor, *, bank: torch.Tensor, ring: torch.Tensor, rows: VerifyRows
) -> torch.Tensor:
    """As the reference; rows of no seat get zeros."""
    count, size = rows.num_rows, x.shape[1]
    out = torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device)
    if count:
        _before[(count, rows.width, cdiv(size, BLOCK))](
            x, out, bank, ring, rows.state_in, rows.pending, rows.parity, rows.seats,
            token_stride(x), slot_stride(bank), slot_stride(ring),
            MOST=rows.width - 1, SIZE=size, BLOCK=BLOCK, **LAUNCH,
        )  # fmt: skip
    return out


def boundary_verify(
    x: torch.Tensor, *, bank: torch.Tensor, ring: torch.Tensor, rows: VerifyRows
) -> None:
    """As the reference; of the drafts' vectors only those that there are go to the ring."""
    count, size = rows.num_rows, bank.shape[1]
    report = report_for(2 * count, x.device)
    if count:
        _verify[(2 * count, cdiv(size, BLOCK))](
            x, bank, ring, rows.state_out, rows.base, rows.pending, rows.num_drafts, rows.parity,
            rows.seats, rows.export_end, rows.export_slot, report, count,
            token_stride(x), slot_stride(bank), slot_stride(ring),
            MOST=rows.width - 1, SIZE=size, BLOCK=BLOCK, **LAUNCH,
        )  # fmt: skip
    rows.written.record_report(report)


@triton.jit
def _copy(source, target, i, SIZE: tl.constexpr):
    """Elements i of one vector to another, in the target's type."""
    value = tl.load(source + i, mask=i < SIZE, other=0.0)
    tl.store(target + i, value.to(target.dtype.element_ty), mask=i < SIZE)


@kernel
def _store(
    x, bank, cu_seqlens, state_out, export_row, export_offset, export_slot, report,
    num_rows, num_exports, x_stride, bank_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The vector of one row's end or export."""
    target = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    e = tl.maximum(target - num_rows, 0)
    row = target.to(tl.int64)
    if target >= num_rows:
        row = tl.load(export_row + e).to(tl.int64)
    begin = tl.load(cu_seqlens + row).to(tl.int64)
    length = tl.load(cu_seqlens + row + 1).to(tl.int64) - begin
    slot = tl.load(state_out + row).to(tl.int64)
    folded = length
    if target >= num_rows:
        slot = tl.load(export_slot + e).to(tl.int64)
        folded = tl.load(export_offset + e).to(tl.int64)
    reached = (folded >= 1) & (folded <= length)
    if reached & (slot >= 0):
        source = x + (begin + folded - 1) * x_stride
        _copy(source, bank + slot * bank_stride, i, SIZE)
    first = tl.program_id(1) == 0
    told(report, target, num_rows + num_exports, slot, folded, reached, first)


@kernel
def _before(
    x, out, bank, ring, state_in, pending, parity, seats, x_stride, bank_stride, ring_stride,
    MOST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What lies before one place of one row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    to = out + (row * (MOST + 1) + place) * SIZE
    seat = tl.load(seats + row).to(tl.int64)
    if seat < 0:
        tl.store(to + i, tl.zeros([BLOCK], out.dtype.element_ty), mask=i < SIZE)
    elif place > 0:
        _copy(x + (row * (MOST + 1) + place - 1) * x_stride, to, i, SIZE)
    else:
        replayed = tl.load(pending + row).to(tl.int64)
        slot = tl.load(state_in + row).to(tl.int64)
        if replayed > 0:
            entry = tl.load(parity + row).to(tl.int64) * MOST + replayed - 1
            _copy(ring + seat * ring_stride + entry * SIZE, to, i, SIZE)
        elif slot >= 0:
            _copy(bank + slot * bank_stride, to, i, SIZE)
        else:
            tl.store(to + i, tl.zeros([BLOCK], out.dtype.element_ty), mask=i < SIZE)


@kernel
def _verify(
    x, bank, ring, state_out, base, pending, num_drafts, parity, seats,
    export_end, export_slot, report, num_rows, x_stride, bank_stride, ring_stride,
    MOST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The vector of one row's end or export; a row's program also leaves its drafts' vectors.

    The ring's bank that is read is not the one that is written.
    """
    target = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_export = target >= num_rows
    row = tl.where(is_export, target - num_rows, target).to(tl.int64)
    seat = tl.load(seats + row).to(tl.int64)
    replayed = tl.load(pending + row).to(tl.int64)
    slot = tl.load(state_out + row).to(tl.int64)
    folded = replayed + 1
    if is_export:
        slot = tl.load(export_slot + row).to(tl.int64)
        folded = tl.load(export_end + row).to(tl.int64) - tl.load(base + row).to(tl.int64)
    reached = (seat >= 0) & (folded >= 1) & (folded <= replayed + 1)
    told(report, target, 2 * num_rows, slot, folded, reached, tl.program_id(1) == 0)
    if seat >= 0:
        held = tl.load(parity + row).to(tl.int64) * MOST
        of_seat = ring + seat * ring_stride
        own = x + row * (MOST + 1) * x_stride
        if reached & (slot >= 0):
            if folded <= replayed:
                _copy(of_seat + (held + folded - 1) * SIZE, bank + slot * bank_stride, i, SIZE)
            else:
                _copy(own, bank + slot * bank_stride, i, SIZE)
        if target < num_rows:
            for draft in range(tl.load(num_drafts + row).to(tl.int32)):
                left = of_seat + (MOST - held + draft) * SIZE
                _copy(own + (draft + 1) * x_stride, left, i, SIZE)
