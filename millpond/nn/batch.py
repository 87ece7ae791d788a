"""Staging: a `StepPlan` becomes the device tensors of one forward.

Knows the seats' page tables and counters on the device; does not know what a model does with a
batch. Only what changed is sent: pages as they are added, never a whole table. One packed buffer
crosses to the device per forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from millpond.errors import Broken
from millpond.memory.host_ring import HostRing
from millpond.nn.counters import SeatCounters
from millpond.ops.batch import ForwardBatch, RowSlots, VerifyRows
from millpond.plan.step import PAGE_SIZE, PageUpdate, Row, StepPlan, VerifyRow

NONE = -1
"""A slot or page that is not there, as the device spells it."""

LIVE_FIELDS = ("seats", "state_in", "state_out", "num_drafts", "export_end", "export_slot")
"""What the host decides of a live row, in the order in which it crosses to the device."""


@dataclass(frozen=True, slots=True)
class _Places:
    """The packed tokens of verify rows, [B, K + 1], and where each row's begin and end, [B]."""

    token: torch.Tensor
    position: torch.Tensor
    page: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor


class Staging:
    """The page table of every seat, `[num_seats, max_pages]` int64, and the packing of plans.

    Also the seats' counters: tokens, positions and pages of verify rows are computed from them on
    the device. Table and counters stay at their addresses. What the host says goes by `ring`.
    """

    def __init__(
        self,
        num_seats: int,
        max_pages: int,
        device: torch.device,
        num_drafts: int = 0,
        ring: HostRing | None = None,
    ) -> None:
        self.device = device
        self.num_seats = num_seats
        self.num_drafts = num_drafts
        self.ring = ring or HostRing(device)
        self.counters = SeatCounters(num_seats, num_drafts, device, self.ring)
        self.page_table = torch.full((num_seats, max_pages), NONE, dtype=torch.int64, device=device)
        self._num_pages = [0] * num_seats  # filled entries of each seat's table

    def empty(self, seats: Sequence[int]) -> None:
        """Forget the pages and counters of these seats."""
        if not seats:
            return
        self.counters.reset(seats)
        self.page_table[self.ring.integers(seats)] = NONE
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
        starts = tuple(row.start for row in rows + plan.verify)
        ends = (*(row.end for row in rows), *(row.end + row.num_drafts for row in plan.verify))
        self._check_room(rows + plan.verify, ends)
        known = len(rows)
        sent = self._send(
            (
                np.fromiter(
                    chain.from_iterable(row.tokens for row in rows), np.int64, sum(lengths)
                ),
                np.repeat(np.array(starts[:known], np.int64), lengths) + _ramp(lengths),
                np.repeat(np.arange(known, dtype=np.int64), lengths),
                np.array([row.seat for row in rows + plan.verify], np.int64),
                np.array(starts[:known], np.int64),
                np.array(ends[:known], np.int64),
                np.array(logits_at, np.int64),
                *_pack_slots(plan.prefill),
                *_pack_slots(plan.decode),
                pack_live(plan.verify, len(plan.verify)).ravel(),
            )
        )
        tokens, position, token_row, seat, start, end, at = sent[:7]
        page = self._page_at(seat[token_row], position)
        verify = None
        if plan.verify:
            verify, places = self._verify_rows(sent[19].view(len(LIVE_FIELDS), -1))
            tokens = torch.cat((tokens, places.token.flatten()))
            position = torch.cat((position, places.position.flatten()))
            page = torch.cat((page, places.page.flatten()))
            of_verify = torch.arange(known, len(starts), device=self.device)
            token_row = torch.cat((token_row, of_verify.repeat_interleave(verify.width)))
            start, end = torch.cat((start, places.start)), torch.cat((end, places.end))
        return ForwardBatch(
            token_ids=tokens,
            positions=position,
            token_row=token_row,
            token_page=page,
            token_offset=position % PAGE_SIZE,
            prefill=_row_slots(plan.prefill, sent[7:13]),
            decode=_row_slots(plan.decode, sent[13:19]),
            verify=verify,
            row_start=start,
            row_end=end,
            starts=starts,
            ends=ends,
            seats=seat,
            page_table=self._visible(seat, end, max(ends, default=0)),
            logits_at=at,
        )

    def check_live(self, rows: Sequence[VerifyRow]) -> int:
        """Where the last of these rows' tokens ends at most. Raises `Broken` as `batch` does."""
        ends = [row.end + row.num_drafts for row in rows]
        self._check_room(rows, ends)
        return max(ends)

    def live(self, numbers: torch.Tensor, most: int) -> ForwardBatch:
        """Live rows alone: numbers [6, B] int64 on the device, as `pack_live` makes them.

        Shapes follow from B and `most`; the host knows no more of the rows than that they end
        within `most` pages.
        """
        count = numbers.shape[1]
        verify, places = self._verify_rows(numbers)
        position = places.position.flatten()
        row = torch.arange(count, device=self.device)
        return ForwardBatch(
            token_ids=places.token.flatten(),
            positions=position,
            token_row=row.repeat_interleave(verify.width),
            token_page=places.page.flatten(),
            token_offset=position % PAGE_SIZE,
            prefill=_no_rows(self.device),
            decode=_no_rows(self.device),
            verify=verify,
            row_start=places.start,
            row_end=places.end,
            starts=(0,) * count,
            ends=(most * PAGE_SIZE,) * count,
            seats=verify.seats,
            page_table=self._visible(verify.seats, places.end, most * PAGE_SIZE),
            logits_at=torch.arange(count * verify.width, device=self.device),
        )

    def singles(
        self,
        seats: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        ends: Sequence[int],
    ) -> ForwardBatch:
        """One token a row in per-token form, at positions [n] that only the device knows.

        `ends` bound the positions from above. No row has a slot; a token whose position has no
        page is not stored.
        """
        count, limit = len(ends), self.page_table.shape[1] * PAGE_SIZE
        bounds = tuple(min(end, limit) for end in ends)
        page = self._page_at(seats, positions)
        positions = positions.clamp(max=limit - 1)
        row = torch.arange(count + 1, device=self.device)
        none = torch.full((count,), NONE, dtype=torch.int64, device=self.device)
        return ForwardBatch(
            token_ids=tokens,
            positions=positions,
            token_row=row[:-1],
            token_page=page,
            token_offset=positions % PAGE_SIZE,
            prefill=_no_rows(self.device),
            decode=RowSlots(
                lengths=(1,) * count,
                cu_seqlens=row,
                state_in=none,
                state_out=none,
                export_row=row[:0],
                export_offset=row[:0],
                export_slot=row[:0],
            ),
            row_start=positions,
            row_end=positions + 1,
            starts=(0,) * count,
            ends=bounds,
            seats=seats,
            page_table=self._visible(seats, positions + 1, max(bounds, default=0)),
            logits_at=row[:-1],
        )

    def _check_room(self, rows: Sequence[Row | VerifyRow], ends: Sequence[int]) -> None:
        """Raise `Broken` where a row's tokens end beyond the pages of its seat."""
        for row, end in zip(rows, ends, strict=True):
            if row.seat >= 0 and end > self._num_pages[row.seat] * PAGE_SIZE:
                raise Broken(
                    f"row of {row.request} ends at {end}, its seat {row.seat} holds"
                    f" {self._num_pages[row.seat]} pages"
                )

    def _verify_rows(self, numbers: torch.Tensor) -> tuple[VerifyRows, _Places]:
        """Rows and tokens of live seats, from their counters; numbers as in `live`."""
        seats, state_in, state_out, wanted, export_end, export_slot = numbers.unbind()
        c = self.counters.of(seats)
        verify = VerifyRows(
            width=self.num_drafts + 1,
            state_in=state_in,
            state_out=state_out,
            base=c.base,
            pending=c.pending,
            num_drafts=torch.minimum(wanted, c.num_drafts),
            parity=c.parity,
            seats=seats,
            export_end=export_end,
            export_slot=export_slot,
        )
        end = c.position + (1 + verify.num_drafts) * (seats >= 0)
        place = torch.arange(verify.width, device=self.device)
        # Padding stands where the last token does: a position like any other.
        position = c.position[:, None] + torch.minimum(place, verify.num_drafts[:, None])
        page = self._page_at(seats[:, None], position)
        return verify, _Places(
            token=torch.cat((c.first[:, None], c.drafts), 1),
            position=position,
            page=torch.where(verify.filled, page, NONE),
            start=c.position,
            end=end,
        )

    def _page_at(self, seats: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The page of each position; none of no seat, and none beyond the table."""
        entry, last = positions // PAGE_SIZE, self.page_table.shape[1] - 1
        page = self.page_table[seats.clamp(min=0), entry.clamp(max=last)]
        return torch.where((seats >= 0) & (entry <= last), page, NONE)

    def _visible(self, seats: torch.Tensor, ends: torch.Tensor, longest: int) -> torch.Tensor:
        """Each row's pages up to its end; a seat may hold more, which this forward must not see."""
        most = -(-longest // PAGE_SIZE)
        table = self.page_table[:, :most].index_select(0, seats.clamp(min=0))
        first_token = torch.arange(most, device=self.device) * PAGE_SIZE
        hidden = (first_token >= ends[:, None]) | (seats < 0)[:, None]
        return table.masked_fill(hidden, NONE)

    def _send(self, arrays: Sequence[np.ndarray]) -> tuple[torch.Tensor, ...]:
        """One transfer for all of them, whatever their number."""
        (sent,) = self.ring.send((np.concatenate(arrays, dtype=np.int64),))
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


def pack_live(rows: Sequence[VerifyRow], count: int) -> np.ndarray:
    """What the host decides of live rows: `LIVE_FIELDS` by `count`, int64; the rest has no seat."""
    numbers = np.full((len(LIVE_FIELDS), count), NONE, np.int64)
    numbers[3] = 0
    if rows:
        numbers[:, : len(rows)] = np.array(
            [
                (
                    row.seat,
                    row.state_in,
                    row.state_out,
                    row.num_drafts,
                    *((NONE, NONE) if row.export is None else (row.export.end, row.export.slot)),
                )
                for row in rows
            ],
            np.int64,
        ).T
    return numbers


def _no_rows(device: torch.device) -> RowSlots:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return RowSlots(
        lengths=(),
        cu_seqlens=torch.zeros(1, dtype=torch.int64, device=device),
        state_in=none,
        state_out=none,
        export_row=none,
        export_offset=none,
        export_slot=none,
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
