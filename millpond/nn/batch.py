"""Staging: a `StepPlan` becomes the device tensors of one forward.

Knows the seats' page tables and counters on the device; does not know what a model does with a
batch. Only what changed is sent: pages as they are added, never a whole table. One packed buffer
crosses to the device per forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Protocol

import numpy as np
import torch

from millpond.errors import Broken
from millpond.memory.host_ring import HostRing
from millpond.nn.counters import SeatCounters
from millpond.ops.batch import ForwardBatch, LiveTokens, RowSlots, SingleTokens, VerifyRows
from millpond.ops.reference import staging as reference
from millpond.plan.step import PAGE_SIZE, PageUpdate, Row, StepPlan, VerifyRow

NONE = -1
"""A slot or page that is not there, as the device spells it."""

LIVE_FIELDS = ("seats", "state_in", "state_out", "num_drafts", "export_end", "export_slot")
"""What the host decides of a live row, in the order in which it crosses to the device."""


class StagingOps(Protocol):
    """Of the bound ops, those that staging needs; meaning: `millpond.ops.reference.staging`."""

    @property
    def stage_live(self) -> Callable[..., LiveTokens]:
        """Live seats to tokens."""

    @property
    def stage_singles(self) -> Callable[..., SingleTokens]:
        """Positions to rows of one token."""

    @property
    def keep_counters(self) -> Callable[..., None]:
        """Counters of seats, overwritten."""


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
        ops: StagingOps = reference,
    ) -> None:
        self.device = device
        self.num_seats = num_seats
        self.num_drafts = num_drafts
        self.ring = ring or HostRing(device)
        self._ops = ops
        self.counters = SeatCounters(num_seats, num_drafts, device, self.ring, ops.keep_counters)
        self.page_table = torch.full((num_seats, max_pages), NONE, dtype=torch.int64, device=device)
        self._known = np.full((num_seats, max_pages), NONE, np.int64)  # the same, on the host
        self._num_pages = [0] * num_seats  # filled entries of each seat's table
        self._ramps: dict[int, torch.Tensor] = {}
        self._nones: dict[int, torch.Tensor] = {}

    def empty(self, seats: Sequence[int]) -> None:
        """Forget the pages and counters of these seats."""
        if not seats:
            return
        self.counters.reset(seats)
        self.page_table.index_fill_(0, self.ring.integers(seats), NONE)
        self._known[list(seats)] = NONE
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
        self._known[seats, entries] = pages
        seat, entry, page = self._send((seats, entries, pages))
        self.page_table.index_put_((seat, entry), page)

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
        most = -(-max(ends, default=0) // PAGE_SIZE)
        seats = np.array([row.seat for row in rows + plan.verify], np.int64)
        start, end = np.array(starts[:known], np.int64), np.array(ends[:known], np.int64)
        position = np.repeat(start, lengths) + _ramp(lengths)
        token_row = np.repeat(np.arange(known, dtype=np.int64), lengths)
        tables = self._tables(seats[:known], end, most)
        sent = self._send(
            (
                np.fromiter(
                    chain.from_iterable(row.tokens for row in rows), np.int64, len(position)
                ),
                position,
                token_row,
                tables[token_row, position // PAGE_SIZE],
                position % PAGE_SIZE,
                start,
                end,
                tables.ravel(),
                seats,
                np.array(logits_at, np.int64),
                *_pack_slots(plan.prefill),
                *_pack_slots(plan.decode),
                pack_live(plan.verify, len(plan.verify)).ravel(),
            )
        )
        parts = [(*sent[:7], sent[7].view(known, most))]
        seat, at = sent[8:10]
        verify = None
        if plan.verify:
            numbers = sent[22].view(len(LIVE_FIELDS), -1)
            live = self._ops.stage_live(numbers, self.counters.table, self.page_table, most=most)
            verify = _verify_rows(numbers, live, self.num_drafts + 1)
            parts.append(
                (
                    live.token_ids,
                    live.positions,
                    live.token_row + known if known else live.token_row,
                    live.token_page,
                    live.token_offset,
                    live.row_start,
                    live.row_end,
                    live.page_table,
                )
            )
            if not known:
                del parts[0]
        joined = parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))
        return ForwardBatch(
            token_ids=joined[0],
            positions=joined[1],
            token_row=joined[2],
            token_page=joined[3],
            token_offset=joined[4],
            prefill=_row_slots(plan.prefill, sent[10:16]),
            decode=_row_slots(plan.decode, sent[16:22]),
            verify=verify,
            row_start=joined[5],
            row_end=joined[6],
            starts=starts,
            ends=ends,
            seats=seat,
            page_table=joined[7],
            logits_at=at,
        )

    def _tables(self, seats: np.ndarray, ends: np.ndarray, most: int) -> np.ndarray:
        """Page tables [rows, most] int64 of these seats, -1 for pages at or beyond a row's end.

        The same as `visible` of the reference, but on the host.
        """
        table = self._known[np.maximum(seats, 0), :most]
        hidden = np.arange(most) * PAGE_SIZE >= ends[:, None]
        return np.where(hidden | (seats < 0)[:, None], NONE, table)

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
        live = self._ops.stage_live(numbers, self.counters.table, self.page_table, most=most)
        verify = _verify_rows(numbers, live, self.num_drafts + 1)
        return ForwardBatch(
            token_ids=live.token_ids,
            positions=live.positions,
            token_row=live.token_row,
            token_page=live.token_page,
            token_offset=live.token_offset,
            prefill=self._rows_of_none(0),
            decode=self._rows_of_none(0),
            verify=verify,
            row_start=live.row_start,
            row_end=live.row_end,
            starts=(0,) * count,
            ends=(most * PAGE_SIZE,) * count,
            seats=verify.seats,
            page_table=live.page_table,
            logits_at=self._ramp(count * verify.width),
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
        most = -(-max(bounds, default=0) // PAGE_SIZE)
        single = self._ops.stage_singles(seats, positions, self.page_table, most=most)
        rows = self._rows_of_none(count)
        row = rows.cu_seqlens[:-1]
        return ForwardBatch(
            token_ids=tokens,
            positions=single.positions,
            token_row=row,
            token_page=single.token_page,
            token_offset=single.token_offset,
            prefill=self._rows_of_none(0),
            decode=rows,
            row_start=single.positions,
            row_end=single.row_end,
            starts=(0,) * count,
            ends=bounds,
            seats=seats,
            page_table=single.page_table,
            logits_at=row,
        )

    def _check_room(self, rows: Sequence[Row | VerifyRow], ends: Sequence[int]) -> None:
        """Raise `Broken` where a row's tokens end beyond the pages of its seat."""
        for row, end in zip(rows, ends, strict=True):
            if row.seat >= 0 and end > self._num_pages[row.seat] * PAGE_SIZE:
                raise Broken(
                    f"row of {row.request} ends at {end}, its seat {row.seat} holds"
                    f" {self._num_pages[row.seat]} pages"
                )

    def _rows_of_none(self, count: int) -> RowSlots:
        """Rows of one token each and of no slot."""
        if count not in self._nones:
            none = torch.full((count,), NONE, dtype=torch.int64, device=self.device)
            self._nones[count] = none
        none = self._nones[count]
        return RowSlots(
            lengths=(1,) * count,
            cu_seqlens=self._ramp(count + 1),
            state_in=none,
            state_out=none,
            export_row=none[:0],
            export_offset=none[:0],
            export_slot=none[:0],
        )

    def _ramp(self, count: int) -> torch.Tensor:
        """0 .. count - 1, made once: it is only read."""
        if count not in self._ramps:
            self._ramps[count] = torch.arange(count, device=self.device)
        return self._ramps[count]

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


def _verify_rows(numbers: torch.Tensor, live: LiveTokens, width: int) -> VerifyRows:
    seats, state_in, state_out, _, export_end, export_slot = numbers.unbind()
    return VerifyRows(
        width=width,
        state_in=state_in,
        state_out=state_out,
        base=live.base,
        pending=live.pending,
        num_drafts=live.num_drafts,
        parity=live.parity,
        seats=seats,
        export_end=export_end,
        export_slot=export_slot,
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
