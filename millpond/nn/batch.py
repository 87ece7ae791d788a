"""Staging: a `StepPlan` becomes the device tensors of one forward.

Knows the seats' page tables on the device; does not know what a model does with a batch. Only what
changed is sent: pages as they are added, never a whole table. One packed buffer crosses to the
device per forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch

from millpond.errors import Broken
from millpond.ops.batch import ForwardBatch, RowSlots
from millpond.plan.step import PAGE_SIZE, PageUpdate, Row, StepPlan

NONE = -1
"""A slot or page that is not there, as the device spells it."""


class Staging:
    """The page table of every seat, `[num_seats, max_pages]` int64, and the packing of plans."""

    def __init__(self, num_seats: int, max_pages: int, device: torch.device) -> None:
        self.device = device
        self.page_table = torch.full((num_seats, max_pages), NONE, dtype=torch.int64, device=device)
        self._num_pages = [0] * num_seats  # filled entries of each seat's table

    def empty(self, seats: Sequence[int]) -> None:
        """Forget the pages of these seats."""
        if not seats:
            return
        self.page_table[torch.tensor(seats, device=self.device)] = NONE
        for seat in seats:
            self._num_pages[seat] = 0

    def update(self, updates: Sequence[PageUpdate]) -> None:
        """Write the new entries of the page tables. `Broken` when one leaves a gap or overflows."""
        if not updates:
            return
        for update in updates:
            held, end = self._num_pages[update.seat], update.first + len(update.pages)
            if update.first > held or end > self.page_table.shape[1]:
                raise Broken(
                    f"seat {update.seat} holds {held} of at most {self.page_table.shape[1]} pages;"
                    f" entries {update.first}..{end - 1} cannot follow"
                )
            self._num_pages[update.seat] = max(held, end)
        lengths = [len(u.pages) for u in updates]
        seats = np.repeat([u.seat for u in updates], lengths)
        entries = np.repeat([u.first for u in updates], lengths) + _ramp(lengths)
        pages = np.fromiter(chain.from_iterable(u.pages for u in updates), np.int64, len(seats))
        seat, entry, page = self._send((seats, entries, pages))
        self.page_table[seat, entry] = page

    def batch(self, plan: StepPlan, logits_at: Sequence[int]) -> ForwardBatch:
        """Pack the rows of a plan. `logits_at` are indices into its packed tokens.

        Raises `Broken` when a row reaches beyond the pages its seat was given.
        """
        rows = plan.prefill + plan.decode
        lengths = [len(row.tokens) for row in rows]
        starts = tuple(row.start for row in rows)
        ends = tuple(row.end for row in rows)
        for row in rows:
            if row.end > self._num_pages[row.seat] * PAGE_SIZE:
                raise Broken(
                    f"row of {row.request} ends at {row.end}, its seat {row.seat} holds"
                    f" {self._num_pages[row.seat]} pages"
                )
        num_tokens = sum(lengths)
        seats = np.array([row.seat for row in rows], np.int64)
        row_of = np.repeat(np.arange(len(rows), dtype=np.int64), lengths)
        positions = np.repeat(np.array(starts, np.int64), lengths) + _ramp(lengths)
        prefill, decode = _pack_slots(plan.prefill), _pack_slots(plan.decode)
        sent = self._send(
            (
                np.fromiter(chain.from_iterable(row.tokens for row in rows), np.int64, num_tokens),
                positions,
                row_of,
                seats[row_of],
                positions // PAGE_SIZE,
                positions % PAGE_SIZE,
                seats,
                np.array(starts, np.int64),
                np.array(ends, np.int64),
                np.array(logits_at, np.int64),
                *prefill,
                *decode,
            )
        )
        token_ids, position, token_row, token_seat, entry, offset, seat, start, end, at = sent[:10]
        most = -(-max(ends, default=0) // PAGE_SIZE)
        return ForwardBatch(
            token_ids=token_ids,
            positions=position,
            token_row=token_row,
            token_page=self.page_table[token_seat, entry],
            token_offset=offset,
            prefill=_row_slots(plan.prefill, sent[10:16]),
            decode=_row_slots(plan.decode, sent[16:22]),
            row_start=start,
            row_end=end,
            starts=starts,
            ends=ends,
            seats=seat,
            page_table=self._visible(seat, end, most),
            logits_at=at,
        )

    def _visible(self, seats: torch.Tensor, ends: torch.Tensor, most: int) -> torch.Tensor:
        """Each row's pages up to its end; a seat may hold more, which this forward must not see."""
        table = self.page_table[:, :most].index_select(0, seats)
        first_token = torch.arange(most, device=self.device) * PAGE_SIZE
        return table.masked_fill(first_token >= ends[:, None], NONE)

    def _send(self, arrays: Sequence[np.ndarray]) -> tuple[torch.Tensor, ...]:
        """One transfer for all of them, whatever their number."""
        packed = torch.from_numpy(np.concatenate(arrays, dtype=np.int64))
        sent = packed.to(self.device, non_blocking=True)
        return torch.split(sent, [len(a) for a in arrays])


def _ramp(lengths: Iterable[int]) -> np.ndarray:
    """0 .. n-1 for every n in `lengths`, one after the other."""
    counts = np.fromiter(lengths, np.int64)
    ends = counts.cumsum()
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _pack_slots(rows: Sequence[Row]) -> tuple[np.ndarray, ...]:
    """The six arrays of a `RowSlots`, in the order of its fields."""
    lengths = np.array([len(row.tokens) for row in rows], np.int64)
    exports = [
        (index, export.end - row.start, export.slot)
        for index, row in enumerate(rows)
        for export in row.exports
    ]
    return (
        np.concatenate(([0], lengths.cumsum())),
        np.array([NONE if row.state_in is None else row.state_in for row in rows], np.int64),
        np.array([row.state_out for row in rows], np.int64),
        *np.array(exports, np.int64).reshape(-1, 3).T,
    )


def _row_slots(rows: Sequence[Row], sent: Sequence[torch.Tensor]) -> RowSlots:
    cu_seqlens, state_in, state_out, export_row, export_offset, export_slot = sent
    return RowSlots(
        lengths=tuple(len(row.tokens) for row in rows),
        cu_seqlens=cu_seqlens,
        state_in=state_in,
        state_out=state_out,
        export_row=export_row,
        export_offset=export_offset,
        export_slot=export_slot,
    )
