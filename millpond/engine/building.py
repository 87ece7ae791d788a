"""A step that is being planned: rows, and what goes with them, until they are frozen into a plan.

Knows seats, page tables and what was freed; decides neither who runs nor where a row ends.
"""

from __future__ import annotations

from collections.abc import Collection

from millpond.engine import drafting
from millpond.engine.along import AnswerAnchors
from millpond.engine.exports import plan_exports
from millpond.engine.ledger import Ledger
from millpond.engine.planned import PrefillRow, Scheduled, fan_out
from millpond.engine.request import Sequence
from millpond.engine.sharing import SharedPrefixes
from millpond.plan.checkpoints import Anchor
from millpond.plan.step import FanOut, PageUpdate, Row, SeatLoad, StepPlan, VerifyRow
from millpond.state.lease import PageId, SlotId

Slots = tuple[SlotId | None, SlotId]
"""The slot that a row reads (None: the zero state), and the one it writes."""


class Building:
    """Collects the rows of one plan after the other.

    Remembers which slots and pages were freed, for the next plan to poison.
    """

    def __init__(self, ledger: Ledger, along: AnswerAnchors, num_drafts: int) -> None:
        self._ledger = ledger
        self._along = along
        self._num_drafts = num_drafts
        self._step = 0
        self._unsent_poison: tuple[tuple[SlotId, ...], tuple[PageId, ...]] = ((), ())
        self.begin()

    def begin(self) -> None:
        """Start a plan without rows."""
        self.prefill: list[PrefillRow] = []
        self.decode: list[Sequence] = []
        self.decode_rows: list[Row] = []
        self.verify: list[Sequence] = []
        self.verify_rows: list[VerifyRow] = []
        self.due_verify: list[int] = []  # of them, those that pass a state worth keeping
        self.seat_loads: list[SeatLoad] = []
        self._due: list[int] = []  # decode rows that overwrite a state worth keeping
        self._page_updates: list[PageUpdate] = []
        self._fan_outs: list[FanOut] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is no row."""
        return not (self.prefill or self.decode or self.verify)

    # Rows; their slots and pages were taken before.

    def add_prefill(
        self, sequence: Sequence, end: int, anchors: tuple[Anchor, ...], slots: Slots
    ) -> None:
        """Add tokens of a prompt, in chunk form, from `sequence.planned` to `end`."""
        self.prefill.append(PrefillRow(sequence, sequence.planned, end, anchors, slots))
        if end == sequence.prompt_len:
            for one in sequence.siblings:
                self._fan_outs.append(fan_out(sequence, one))
        for one in sequence.group:
            if self._num_drafts and end == len(sequence.tokens):
                drafting.take_pages(self._ledger, one, end, self._num_drafts)
            self.send_pages(one)

    def add_decode(self, sequence: Sequence, end: int, slots: Slots) -> None:
        """Add known tokens, in per-token form, from `sequence.planned` to `end`."""
        start, tokens = sequence.planned, sequence.tokens
        if self._num_drafts and end == len(tokens):
            drafting.take_pages(self._ledger, sequence, end, self._num_drafts)
        if sequence.pages_sent < len(sequence.pages):
            self.send_pages(sequence)
        if self._along.passes(start, start + 1):
            self._due.append(len(self.decode))
        self.decode.append(sequence)
        self.decode_rows.append(
            Row(
                request=sequence.request.spec.request_id,
                seat=sequence.seat,
                start=start,
                tokens=tuple(tokens[start:end]),
                state_in=slots[0],
                state_out=slots[1],
                emit_seats=sequence.own_seat if end == len(tokens) else (),
            )
        )

    def send_pages(self, sequence: Sequence) -> None:
        """Add the pages that a seat's table on the device lacks."""
        first, pages = sequence.pages_sent, sequence.pages
        if first < len(pages):
            new = tuple(handle.id for handle in pages[first:])
            self._page_updates.append(PageUpdate(sequence.seat, first, new))
            sequence.pages_sent = len(pages)

    # Then the plan.

    def freeze(self, running: Collection[Sequence], shared: SharedPrefixes) -> Scheduled:
        """The plan of all rows added, with slots for checkpoints as far as any are left."""
        ledger = self._ledger
        if self.prefill:
            plan_exports(ledger, self.prefill, shared)
        if self._due:
            self._along.plan(running, self.decode, self.decode_rows, self._due)
        if self.due_verify:
            self._along.plan_live(running, self.verify, self.verify_rows, self.due_verify)
        slots, pages = self._unsent_poison
        self._unsent_poison = ((), ())
        slots += ledger.pool.drain_freed()
        pages += ledger.pages.drain_freed()
        poison = ledger.settings.debug_poison
        plan = StepPlan(
            step=self._step,
            prefill=tuple(row.freeze() for row in self.prefill),
            decode=tuple(self.decode_rows),
            verify=tuple(self.verify_rows),
            seat_loads=tuple(self.seat_loads),
            page_updates=tuple(self._page_updates),
            fan_outs=tuple(self._fan_outs),
            poison_slots=slots if poison else (),
            poison_pages=pages if poison else (),
        )
        self._step += 1
        for row in self.prefill:
            row.sequence.planned = row.end
        for sequence, known in zip(self.decode, self.decode_rows, strict=True):
            sequence.planned = known.end
        return Scheduled(plan, self.prefill, self.decode, self.verify)

    # Poison.

    def failed(self, scheduled: Scheduled) -> None:
        """Poison again what a plan was to poison that the device did not finish."""
        plan, (slots, pages) = scheduled.plan, self._unsent_poison
        self._unsent_poison = (slots + plan.poison_slots, pages + plan.poison_pages)

    def spare(self, slots: Collection[SlotId], pages: Collection[PageId]) -> None:
        """Do not poison these: a transfer writes them from here on. Between steps only."""
        freed_slots, freed_pages = self._unsent_poison
        freed_slots += self._ledger.pool.drain_freed()
        freed_pages += self._ledger.pages.drain_freed()
        self._unsent_poison = (
            tuple(slot for slot in freed_slots if slot not in slots),
            tuple(page for page in freed_pages if page not in pages),
        )
