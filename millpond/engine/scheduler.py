"""Who runs in the next step: queues, order, preemption, and the plan that says it all.

Knows sequences and the ledger; does not know what a step returns, nor who waits for tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from millpond.engine import drafting
from millpond.engine.admission import (
    admit,
    has_seats,
    meet,
    missing_pages,
    take_pages,
    tell_outcome,
)
from millpond.engine.along import AnswerAnchors
from millpond.engine.exports import evidence_of, plan_exports
from millpond.engine.ledger import Ledger
from millpond.engine.planned import PrefillRow, Scheduled, fan_out, seat_load
from millpond.engine.queues import Queues
from millpond.engine.request import Sequence
from millpond.errors import Broken, Exhausted
from millpond.plan.checkpoints import Anchor, ladder_interval, plan_anchors
from millpond.plan.prefill import row_end, split_at
from millpond.plan.step import (
    PAGE_SIZE,
    Capabilities,
    FanOut,
    PageUpdate,
    Row,
    SeatLoad,
    StepPlan,
    VerifyRow,
)
from millpond.state.lease import PageId, SlotId

logger = logging.getLogger(__name__)


NEW_HOLDS = 32
"""Requests that begin to be held in one step; to look one up costs as much as its prompt is long,
and the others may find what they share published in the next step."""


class Scheduler(Queues):
    """Plans the rows of those that run, in their order, then lets in who waits."""

    def __init__(self, ledger: Ledger, capabilities: Capabilities) -> None:
        super().__init__(ledger, self._anchors)
        self.along = AnswerAnchors(ledger)
        self._granularity = capabilities.export_granularity
        self._num_drafts = capabilities.num_draft_tokens
        self._verifies = self._num_drafts > 0 or capabilities.runs_ahead
        ledger.counters.accepted_per_position = [0] * self._num_drafts
        self._step = 0
        self._unsent_poison: tuple[tuple[SlotId, ...], tuple[PageId, ...]] = ((), ())
        self._begin()

    # One step.

    def schedule(self) -> Scheduled | None:
        """Plan the next step, with everything it touches leased; None when there is no row.

        No step is in flight.
        """
        self._begin()
        self._put_overdue_first()
        self._make_way()
        position = 0
        # In order; whoever is pushed out comes after whoever pushes, and is not planned yet.
        while position < len(self.running):
            sequence = self.running[position]
            if sequence.guide is not None and not sequence.guide.is_ready:
                position += 1  # sits this step out, so that others do not wait for its mask
                continue
            start = sequence.folded
            if start < sequence.prompt_len:
                position += self._admit_waiting(ahead_of=sequence)
                self._plan_prefill(sequence)
            elif self._verifies and sequence.is_live:
                self._plan_verify(sequence)
            elif start + 1 == len(sequence.tokens):
                self._plan_decode(sequence, start + 1)
            else:
                self._plan_recompute(sequence)
            position += 1
        self._admit_waiting()
        if not (self._prefill or self._decode or self._verify):
            return None
        self._plan_exports()
        return self._freeze()

    @property
    def is_settled(self) -> bool:
        """Whether the next plan would let nobody in, push nobody out and change no order."""
        if self.turns.is_due:
            return False
        for sequence in self.waiting:
            if self.tiers.holds(sequence):
                continue
            if self.leaving or (self.running and self.running[-1].outranked_by(sequence)):
                return False
            return sequence is self._blocked or not has_seats(self.ledger, sequence)
        return True

    def schedule_live(
        self, sequences: list[Sequence], rows: list[VerifyRow], due: list[int]
    ) -> Scheduled:
        """Plan a step of live rows alone, whose slots and pages were taken in order.

        Those of `due` pass a state worth keeping.
        """
        self._begin()
        for sequence in sequences:
            if sequence.pages_sent < len(sequence.pages):
                self._send_pages(sequence)
        self._verify += sequences
        self._verify_rows += rows
        self.along.plan_live(self.running, self._verify, self._verify_rows, due)
        return self._freeze()

    def failed(self, scheduled: Scheduled) -> None:
        """The device did not finish a plan, so its poison may not have been spread either."""
        plan, (slots, pages) = scheduled.plan, self._unsent_poison
        self._unsent_poison = (slots + plan.poison_slots, pages + plan.poison_pages)

    def spare(self, slots: Collection[SlotId], pages: Collection[PageId]) -> None:
        """A transfer writes these from here on: the poison of when they were freed comes too late.

        Between steps only.
        """
        freed_slots, freed_pages = self._unsent_poison
        freed_slots += self.ledger.pool.drain_freed()
        freed_pages += self.ledger.pages.drain_freed()
        self._unsent_poison = (
            tuple(slot for slot in freed_slots if slot not in slots),
            tuple(page for page in freed_pages if page not in pages),
        )

    def _begin(self) -> None:
        self._prefill: list[PrefillRow] = []
        self._decode: list[Sequence] = []
        self._decode_rows: list[Row] = []
        self._due: list[int] = []  # decode rows that overwrite a state worth keeping
        self._verify: list[Sequence] = []
        self._verify_rows: list[VerifyRow] = []
        self._due_verify: list[int] = []
        self._seat_loads: list[SeatLoad] = []
        self._page_updates: list[PageUpdate] = []
        self._fan_outs: list[FanOut] = []
        self._budget = self.ledger.settings.max_prefill_tokens

    # Rows of running sequences.

    def _plan_decode(self, sequence: Sequence, end: int) -> None:
        if end > len(sequence.pages) * PAGE_SIZE and not self._make_pages(sequence, end):
            return
        slots = self._make_output(sequence)
        if slots is not None:
            self._add_decode(sequence, end, slots)

    def _plan_verify(self, sequence: Sequence) -> None:
        """All known tokens of a live sequence, then as many drafts as it has room and use for."""
        end = len(sequence.tokens)
        if end > len(sequence.pages) * PAGE_SIZE and not self._make_pages(sequence, end):
            return
        slots = self._make_output(sequence)
        if slots is None:
            return
        state_in, state_out = slots
        if state_in is None:
            raise Broken(f"{sequence.name} is live and has no state")
        start, num_drafts = sequence.folded, self._num_drafts
        if end > sequence.calm_until or sequence.guide is not None:
            drafting.take_pages(self.ledger, sequence, end, num_drafts)
            if self.along.passes(start, end):
                self._due_verify.append(len(self._verify))
            else:
                anchor = self.along.next_after(start)
                sequence.calm_until = drafting.calm_until(sequence, num_drafts, anchor)
            num_drafts = drafting.num_drafts(sequence, end, num_drafts)
        if sequence.pages_sent < len(sequence.pages):
            self._send_pages(sequence)
        self._verify.append(sequence)
        self._verify_rows.append(
            VerifyRow(
                request=sequence.request.spec.request_id,
                seat=sequence.seat,
                start=start,
                pending=end - start - 1,
                num_drafts=num_drafts,
                state_in=state_in,
                state_out=state_out,
            )
        )

    def _plan_recompute(self, sequence: Sequence) -> None:
        """Generated tokens of a preempted sequence, token by token in one row, under the budget."""
        start, known = sequence.folded, len(sequence.tokens)
        end = min(known, start + max(self._budget, 1))
        self._budget -= end - start
        self._plan_decode(sequence, end)

    def _plan_prefill(self, sequence: Sequence) -> None:
        end = self._first_end(sequence, sequence.folded)
        if end == sequence.folded or not self._make_pages(sequence, end):
            return
        slots = self._make_output(sequence)
        if slots is not None:
            self._add_prefill(sequence, end, slots)

    def _first_end(self, sequence: Sequence, start: int) -> int:
        """Where a row from `start` ends under what is left of the budget."""
        if start == sequence.prompt_len:  # a resumed prompt, complete: generated tokens follow
            return min(len(sequence.tokens), start + max(self._budget, 1))
        end = row_end(start, sequence.prompt_len, self._budget, oldest=not self._prefill)
        return split_at(
            self._anchors(sequence, start, end), end, self.ledger.settings.checkpoint_mode
        )

    def _anchors(self, sequence: Sequence, start: int, end: int) -> tuple[Anchor, ...]:
        settings = self.ledger.settings
        if not settings.prefix_caching or sequence.epoch != self.ledger.epoch:
            return ()
        interval = ladder_interval(
            sequence.prompt_len, settings.checkpoint_interval, settings.checkpoint_budget
        )
        return plan_anchors(
            start,
            end,
            sequence.prompt_len,
            settings.prefill_save_alignment,
            interval,
            settings.checkpoint_mode,
            self._granularity,
            evidence_of(sequence, self.shared, settings.checkpoint_budget),
        )

    def _make_pages(self, sequence: Sequence, end: int) -> bool:
        """Take the pages of a row: free ones, evicted ones, those of whoever comes later."""
        ledger = self.ledger
        wanted = sum(missing_pages(sequence, end))
        while ledger.pages.num_free < wanted:
            ledger.evict_pages(wanted)
            if ledger.pages.num_free >= wanted or self._push_out_last(sequence):
                continue
            if len(self.running) > 1 or not ledger.forget_prefixes():
                return False
        take_pages(ledger, sequence, end)
        return True

    def _make_output(self, sequence: Sequence) -> tuple[SlotId | None, SlotId] | None:
        """Plan where the next state goes, making room as far as it takes."""
        ledger = self.ledger
        while True:
            try:
                return sequence.state.plan_output(ledger.pool)
            except Exhausted:
                if not (
                    ledger.evict_slot()
                    or self.along.give_up_one(reversed(self.running))
                    or ledger.drop_checkpoint_of(sequence)
                    or self._push_out_last(sequence)
                ):
                    return None

    # Admission.

    def _admit_waiting(self, ahead_of: Sequence | None = None) -> int:
        """Admit in order while everything fits; nobody is overtaken, except those that are held.

        Only those that outrank `ahead_of`, so that its prompt does not use up their budget. Returns
        how many came in.
        """
        position = admitted = held = 0
        while position < len(self.waiting) and held < NEW_HOLDS:
            sequence = self.waiting[position]
            if sequence is self._blocked or (self._prefill and self._budget < PAGE_SIZE):
                break
            if ahead_of is not None and not ahead_of.outranked_by(sequence):
                break
            if self.tiers.holds(sequence) or self.holds.goes_on(sequence, self._budget):
                position += 1
                continue
            if sequence.failures and any(one.failures for one in self.running):
                break  # one suspect at a time, so that it does not fail with the others again
            first = None
            if has_seats(self.ledger, sequence):
                match = meet(self.ledger, sequence)
                if self._holds_back(sequence, match.end):
                    position += 1
                    held += 1
                    continue
                if not self.ledger.pool.num_free and not self.ledger.index.evictable_slots:
                    self.along.give_up_one(reversed(self.running))
                first = admit(self.ledger, sequence, match, self.running, self._first_end)
            if first is None:
                self._blocked = self._denied = sequence
                break
            admitted += 1
            self.turns.admitted()
            loaded = self.tiers.admitted(sequence, match)
            waited = self.holds.forget(sequence)
            tell_outcome(self.ledger.counters, sequence, match, waited, loaded)
            self.waiting.pop(position)
            self.enter(sequence)
            for one in sequence.group:
                self._seat_loads.append(seat_load(one))
            slots = (first.state_in, first.state_out)
            if sequence.folded < sequence.prompt_len:
                self.shared.start(sequence)
                self._add_prefill(sequence, first.end, slots)
            else:
                self.shared.discard(sequence)
                self.turns.done(sequence)
                self._budget -= first.end - sequence.folded
                self._add_decode(sequence, first.end, slots)
        return admitted

    def _holds_back(self, sequence: Sequence, start: int) -> bool:
        settings = self.ledger.settings
        if not settings.hold_and_join or settings.checkpoint_budget < 1:
            return False
        if sequence.request.prompt_logprobs is not None:
            return False  # matches nothing
        return self.holds.begin(sequence, start, self._budget)

    # Into the plan.

    def _add_prefill(
        self, sequence: Sequence, end: int, slots: tuple[SlotId | None, SlotId]
    ) -> None:
        anchors = self._anchors(sequence, sequence.folded, end)
        self._prefill.append(PrefillRow(sequence, end, anchors, slots))
        self._budget -= end - sequence.folded
        if end == sequence.prompt_len:
            for one in sequence.siblings:
                self._fan_outs.append(fan_out(sequence, one))
        for one in sequence.group:
            if self._num_drafts and end == len(sequence.tokens):
                drafting.take_pages(self.ledger, one, end, self._num_drafts)
            self._send_pages(one)

    def _add_decode(
        self, sequence: Sequence, end: int, slots: tuple[SlotId | None, SlotId]
    ) -> None:
        start, tokens = sequence.folded, sequence.tokens
        if self._num_drafts and end == len(tokens):
            drafting.take_pages(self.ledger, sequence, end, self._num_drafts)
        if sequence.pages_sent < len(sequence.pages):
            self._send_pages(sequence)
        if self.along.passes(start, start + 1):
            self._due.append(len(self._decode))
        self._decode.append(sequence)
        self._decode_rows.append(
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

    def _send_pages(self, sequence: Sequence) -> None:
        """Tell the device what was added to a seat's page table since it was last told."""
        first, pages = sequence.pages_sent, sequence.pages
        if first < len(pages):
            new = tuple(handle.id for handle in pages[first:])
            self._page_updates.append(PageUpdate(sequence.seat, first, new))
            sequence.pages_sent = len(pages)

    def _plan_exports(self) -> None:
        plan_exports(self.ledger, self._prefill, self.shared)
        self.along.plan(self.running, self._decode, self._decode_rows, self._due)
        self.along.plan_live(self.running, self._verify, self._verify_rows, self._due_verify)

    def _freeze(self) -> Scheduled:
        ledger = self.ledger
        slots, pages = self._unsent_poison
        self._unsent_poison = ((), ())
        slots += ledger.pool.drain_freed()
        pages += ledger.pages.drain_freed()
        poison = ledger.settings.debug_poison
        plan = StepPlan(
            step=self._step,
            prefill=tuple(row.freeze() for row in self._prefill),
            decode=tuple(self._decode_rows),
            verify=tuple(self._verify_rows),
            seat_loads=tuple(self._seat_loads),
            page_updates=tuple(self._page_updates),
            fan_outs=tuple(self._fan_outs),
            poison_slots=slots if poison else (),
            poison_pages=pages if poison else (),
        )
        self._step += 1
        return Scheduled(plan, self._prefill, self._decode, self._verify)
