"""Reading and writing one layer of the slot arena by id; knows that a negative id is none."""

from __future__ import annotations

import torch

from millpond.ops.batch import RowSlots


def read_slots(bank: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """bank [S, ...], ids [n] int64 -> a copy [n, ...]; zero where the id is negative.

    The value behind a negative id is selected away, never multiplied: a slot may hold NaN.
    """
    some = (ids >= 0).view(-1, *[1] * (bank.ndim - 1))
    values = bank.index_select(0, ids.clamp(min=0))
    return torch.where(some, values, torch.zeros((), dtype=bank.dtype, device=bank.device))


def write_slots(bank: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    """values [n, ...] into bank [S, ...] at ids [n]; negative ids are skipped, others distinct."""
    some = ids >= 0
    bank.index_copy_(0, ids[some], values[some].to(bank.dtype))


def write_targets(rows: RowSlots) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All writes a form asks for: row [N + E], tokens folded [N + E], slot [N + E].

    The rows' own ends come first, then the exports. A row without tokens writes its input.
    """
    device = rows.state_out.device
    lengths = rows.cu_seqlens[1:] - rows.cu_seqlens[:-1]
    return (
        torch.cat((torch.arange(rows.num_rows, device=device), rows.export_row)),
        torch.cat((lengths, rows.export_offset)),
        torch.cat((rows.state_out, rows.export_slot)),
    )


def boundary_store(x: torch.Tensor, *, bank: torch.Tensor, rows: RowSlots) -> None:
    """Write the vector of the last folded token of every row and export: x [T, C], bank [S, C].

    `x` holds this form's tokens only. Rows without tokens are not allowed.
    """
    row, folded, slot = write_targets(rows)
    write_slots(bank, slot, x.index_select(0, rows.cu_seqlens[row] + folded - 1))
    rows.written.record(slot, folded)
