"""Who runs in the next step: queues, order, preemption, and the plan that says it all.

Knows sequences and the ledger; does not know what a step returns, nor who waits for tokens.
"""

from __future__ import annotations

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
from millpond.engine.building import Building, Slots
from millpond.engine.exports import evidence_of
from millpond.engine.ledger import Ledger
from millpond.engine.planned import PrefillRow, Scheduled, seat_load
from millpond.engine.queues import Queues
from millpond.engine.request import Sequence
from millpond.errors import Broken, Exhausted
from millpond.plan.checkpoints import Anchor, ladder_interval, plan_anchors
from millpond.plan.prefill import row_end, split_at
from millpond.plan.step import PAGE_SIZE, Capabilities, VerifyRow
from millpond.state.lease import PageId, SlotId

NEW_HOLDS = 32
"""Requests that begin to be held in one step; to look one up costs as much as its prompt is long,
and the others may find what they share published in the next step."""


class Scheduler(Queues):
    """Plans the rows of those that run, in their order, then lets in who waits.

    With a step in flight, the rows that follow its rows: see `millpond.engine.ahead`.
    """

    def __init__(self, ledger: Ledger, capabilities: Capabilities) -> None:
        super().__init__(ledger, self._anchors_to_come)
        self.along = AnswerAnchors(ledger)
        self.building = Building(ledger, self.along, capabilities.num_draft_tokens)
        self._granularity = capabilities.export_granularity
        self._num_drafts = capabilities.num_draft_tokens
        self._verifies = self._num_drafts > 0 or capabilities.runs_ahead
        ledger.counters.accepted_per_position = [0] * self._num_drafts
        self._budget = 0
        self._is_ahead = False  # a step is in flight, and the one after it is planned
        self._before: dict[Sequence, PrefillRow] = {}  # the prompts' rows in it
        self.is_short = False  # with a step in flight, somebody found no room without preempting

    # One step.

    def schedule(self) -> Scheduled | None:
        """Plan the next step, with everything it touches leased; None when there is no row.

        No step is in flight.
        """
        self._begin(None)
        self.is_short = False
        self._make_way()
        self.plan_running()
        return self.finish()

    def begin_after(self, flying: Scheduled) -> str | None:
        """Begin to plan the step after one in flight; why not, if that has to end first."""
        if self.tiers.wants_room:
            return "store"  # a transfer writes slots beside the order of steps
        if self.is_short:
            return "room"  # somebody may have to be preempted
        if self.wants_way:
            return "priority"  # somebody will be
        self._denied = None
        self._begin(flying)
        return None

    def plan_running(self) -> None:
        """Add a row for each running sequence that can have one.

        With a step in flight, live rows that follow live rows are not among them.
        """
        position = 0
        # In order; whoever is pushed out comes after whoever pushes, and is not planned yet.
        while position < len(self.running):
            sequence = self.running[position]
            if self._sits_out(sequence):
                position += 1
                continue
            start = sequence.folded if sequence.is_live else sequence.planned
            if start < sequence.prompt_len:
                position += self._admit_waiting(ahead_of=sequence)
                self._plan_prefill(sequence)
            elif self._verifies and (sequence.is_live or start == len(sequence.tokens)):
                self._plan_verify(sequence)  # the token after the last known one may be under way
            elif start + 1 == len(sequence.tokens):
                self._plan_decode(sequence, start + 1)
            else:
                self._plan_recompute(sequence)
            position += 1

    def finish(self) -> Scheduled | None:
        """Admit who waits. The plan, or None when it has no row."""
        self._admit_waiting()
        if self.building.is_empty:
            return None
        return self.building.freeze(self.running, self.shared)

    def failed(self, scheduled: Scheduled) -> None:
        """Poison again what a plan was to poison that the device did not finish."""
        self.building.failed(scheduled)

    def spare(self, slots: Collection[SlotId], pages: Collection[PageId]) -> None:
        """A transfer writes these from here on. Between steps only."""
        self.building.spare(slots, pages)

    def _begin(self, flying: Scheduled | None) -> None:
        self._is_ahead = flying is not None
        self._before = {} if flying is None else {row.sequence: row for row in flying.prefill}
        self._put_overdue_first()
        self._budget = self.ledger.settings.max_prefill_tokens
        self.building.begin()

    # Rows of running sequences.

    def _sits_out(self, sequence: Sequence) -> bool:
        """Whether a sequence has no row in this step, so that others do not wait for it."""
        guide = sequence.guide
        if guide is not None and not guide.is_ready:
            return True  # its mask is being filled
        if guide is not None and sequence.state.in_flight and not guide.goes_ahead:
            return True  # the step would wait for its mask
        if not self._is_ahead or not sequence.state.in_flight:
            return False
        if sequence.is_live:
            return True  # it has its row already
        row = self._before.get(sequence)
        if row is not None and row.fans_out:
            return True  # its samples have no states of their own before that
        return len(sequence.tokens) + 1 >= sequence.request.length_limit and (
            sequence.planned == len(sequence.tokens)
        )  # its last token is under way

    def _plan_decode(self, sequence: Sequence, end: int) -> None:
        if end > len(sequence.pages) * PAGE_SIZE and not self._make_pages(sequence, end):
            return
        slots = self._make_output(sequence)
        if slots is not None:
            self.building.add_decode(sequence, end, slots)

    def _plan_verify(self, sequence: Sequence) -> None:
        """All known tokens of a live sequence, then as many drafts as it has room and use for.

        Of one whose first token is under way, that token, which only the device knows.
        """
        building, end = self.building, len(sequence.tokens)
        start = sequence.folded
        if sequence.state.in_flight:
            start, end = end, end + 1
        if end > len(sequence.pages) * PAGE_SIZE and not self._make_pages(sequence, end):
            return
        slots = self._make_output(sequence)
        if slots is None:
            return
        state_in, state_out = slots
        if state_in is None:
            raise Broken(f"{sequence.name} is live and has no state")
        num_drafts = self._num_drafts
        if end > sequence.calm_until or sequence.guide is not None:
            drafting.take_pages(self.ledger, sequence, end, num_drafts)
            if self.along.passes(start, end):
                building.due_verify.append(len(building.verify))
            else:
                anchor = self.along.next_after(start)
                sequence.calm_until = drafting.calm_until(sequence, num_drafts, anchor)
            num_drafts = drafting.num_drafts(sequence, end, num_drafts)
            if sequence.guide is not None and not sequence.state.is_ahead:
                num_drafts = min(num_drafts, sequence.guide.num_drafts)  # there are masks for those
        if sequence.pages_sent < len(sequence.pages):
            building.send_pages(sequence)
        building.verify.append(sequence)
        building.verify_rows.append(
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
        start, known = sequence.planned, len(sequence.tokens)
        end = min(known, start + max(self._budget, 1))
        self._budget -= end - start
        self._plan_decode(sequence, end)

    def _plan_prefill(self, sequence: Sequence) -> None:
        end = self._first_end(sequence, sequence.planned)
        if end == sequence.planned or not self._make_pages(sequence, end):
            return
        slots = self._make_output(sequence)
        if slots is not None:
            self._add_prefill(sequence, end, slots)

    def _add_prefill(self, sequence: Sequence, end: int, slots: Slots) -> None:
        anchors = self._anchors(sequence, sequence.planned, end)
        self._budget -= end - sequence.planned
        self.building.add_prefill(sequence, end, anchors, slots)

    def _first_end(self, sequence: Sequence, start: int) -> int:
        """Where a row from `start` ends under what is left of the budget."""
        if start == sequence.prompt_len:  # a resumed prompt, complete: generated tokens follow
            return min(len(sequence.tokens), start + max(self._budget, 1))
        end = row_end(start, sequence.prompt_len, self._budget, oldest=not self.building.prefill)
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

    def _anchors_to_come(self, leader: Sequence, start: int, end: int) -> tuple[Anchor, ...]:
        """Where a prompt that is being folded will be saved up to `end`.

        A row in flight saves what it was planned to, whatever is known by now.
        """
        row = self._before.get(leader)
        flying = () if row is None else row.saved
        found = self._anchors(leader, max(start, leader.planned), end)
        return tuple(anchor for anchor in flying if start < anchor.end <= end) + found

    def _make_pages(self, sequence: Sequence, end: int) -> bool:
        """Take the pages of a row: free ones, evicted ones, those of whoever comes later."""
        ledger = self.ledger
        wanted = sum(missing_pages(sequence, end))
        while ledger.pages.num_free < wanted:
            ledger.evict_pages(wanted)
            if ledger.pages.num_free >= wanted or self._push_out_last(sequence):
                continue
            if self.is_short or len(self.running) > 1 or not ledger.forget_prefixes():
                return False
        take_pages(ledger, sequence, end)
        return True

    def _make_output(self, sequence: Sequence) -> Slots | None:
        """Plan where the next state goes, making room as far as it takes."""
        ledger = self.ledger
        if sequence.state.in_flight:
            return self._make_output_ahead(sequence)
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

    def _make_output_ahead(self, sequence: Sequence) -> Slots | None:
        """As the row in flight leaves it: in its place, unless that state is to be published."""
        ledger, state, row = self.ledger, sequence.state, self._before.get(sequence)
        if row is None or not row.saves_end or not self._publishes(sequence):
            slot = state.plan_ahead()
            return slot, slot
        while not ledger.pool.num_free:
            if not (ledger.evict_slot() or self.along.give_up_one(reversed(self.running))):
                self.is_short = True
                return None
        return state.plan_ahead(), state.keep_input(ledger.pool)

    def _publishes(self, sequence: Sequence) -> bool:
        """Whether states of a sequence can be found once they are there."""
        ledger = self.ledger
        return sequence.epoch == ledger.epoch and ledger.settings.checkpoint_budget > 0

    def _push_out_last(self, sequence: Sequence) -> bool:
        """Not while a step is in flight: the step after it is planned once nothing is."""
        if self._is_ahead:
            self.is_short = True
            return False
        return super()._push_out_last(sequence)

    # Admission.

    def _admit_waiting(self, ahead_of: Sequence | None = None) -> int:
        """Admit in order while everything fits; nobody is overtaken, except those that are held.

        Only those that outrank `ahead_of`, so that its prompt does not use up their budget. Returns
        how many came in.
        """
        position = admitted = held = 0
        while position < len(self.waiting) and held < NEW_HOLDS:
            sequence = self.waiting[position]
            if sequence is self._blocked or (self.building.prefill and self._budget < PAGE_SIZE):
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
                self.building.seat_loads.append(seat_load(one))
            slots = (first.state_in, first.state_out)
            if sequence.folded < sequence.prompt_len:
                self.shared.start(sequence)
                self._add_prefill(sequence, first.end, slots)
            else:
                self.shared.discard(sequence)
                self.turns.done(sequence)
                self._budget -= first.end - sequence.folded
                self.building.add_decode(sequence, first.end, slots)
        return admitted

    def _holds_back(self, sequence: Sequence, start: int) -> bool:
        settings = self.ledger.settings
        if not settings.hold_and_join or settings.checkpoint_budget < 1:
            return False
        if sequence.request.prompt_logprobs is not None:
            return False  # matches nothing
        return self.holds.begin(sequence, start, self._budget)
