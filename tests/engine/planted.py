"""Faults to plant in the host tower, by the invariant they break; all must be found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from millpond.engine import admission, building, drafting, scheduler
from millpond.engine.ahead import Ahead
from millpond.engine.along import AnswerAnchors
from millpond.engine.commit import Committer
from millpond.engine.flights import Flights
from millpond.engine.ledger import Ledger
from millpond.engine.loop import Engine
from millpond.engine.outbox import Outbox
from millpond.engine.planned import PrefillRow
from millpond.engine.queues import Queues
from millpond.engine.request import Request, Sequence
from millpond.engine.scheduler import Scheduler
from millpond.plan.step import Ended, Written
from millpond.state.checkpoint import AnchorKind, prefix_salt
from millpond.state.lease import Phase, ProducerLease, ReaderLease
from millpond.state.pool import StatePool
from millpond.state.prefix import PrefixIndex
from millpond.state.running import Exported, RunningState

Fault = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, list[Fault]] = {}
"""By the name of the invariant."""

IN_ANSWERS: set[Fault] = set()
"""Those that long answers show sooner, or alone."""


def breaks(invariant: str, *, in_answers: bool = False) -> Callable[[Fault], Fault]:
    """Register a fault."""

    def register(fault: Fault) -> Fault:
        FAULTS.setdefault(invariant, []).append(fault)
        if in_answers:
            IN_ANSWERS.add(fault)
        return fault

    return register


@breaks("every_slot_is_in_one_phase")
def a_slot_freed_is_not_given_out_again(patch: pytest.MonkeyPatch) -> None:
    release = StatePool.release

    def faulty(pool: StatePool, lease: Any) -> None:
        release(pool, lease)
        if pool.phase(lease.slot) is Phase.FREE and len(pool._free) > 1:
            pool._free.pop()

    patch.setattr(StatePool, "release", faulty)


@breaks("open_means_one_producer_alone")
def a_state_still_being_written_is_published(patch: pytest.MonkeyPatch) -> None:
    def faulty(state: RunningState, pool: StatePool, holder: str = "index") -> ReaderLease:
        current = state._current
        assert current is not None
        return pool._grant(ReaderLease(current.slot, current.generation, holder))

    patch.setattr(RunningState, "publish", faulty)


@breaks("sealed_means_readers_and_no_producer")
def a_slot_is_reopened_though_others_read_it(patch: pytest.MonkeyPatch) -> None:
    def faulty(pool: StatePool, lease: ReaderLease) -> ProducerLease:
        pool._spend(lease)
        pool._phase[lease.slot] = Phase.OPEN
        return pool._grant(ProducerLease(lease.slot, lease.generation, lease.holder))

    patch.setattr(StatePool, "reopen", faulty)


@breaks("free_means_nobody")
def the_first_release_frees_the_slot(patch: pytest.MonkeyPatch) -> None:
    release = StatePool.release

    def faulty(pool: StatePool, lease: Any) -> None:
        release(pool, lease)
        if pool.phase(lease.slot) is Phase.SEALED:
            pool._phase[lease.slot] = Phase.FREE
            pool._free.append(lease.slot)

    patch.setattr(StatePool, "release", faulty)


@breaks("a_row_starts_where_its_state_ends")
def the_last_page_before_a_hit_is_folded_twice(patch: pytest.MonkeyPatch) -> None:
    admit = admission.admit

    def faulty(ledger: Ledger, sequence: Sequence, *rest: Any) -> Any:
        admitted = admit(ledger, sequence, *rest)
        if admitted is not None and sequence.folded:
            sequence.folded -= 64
        return admitted

    patch.setattr(scheduler, "admit", faulty)


@breaks("every_export_is_written")
def what_was_planned_is_published(patch: pytest.MonkeyPatch) -> None:
    """Not what the step reports."""
    apply = Committer.apply

    def faulty(committer: Committer, scheduled: Any, result: Any) -> None:
        planned = [
            (export.slot, export.end) for row in scheduled.plan.prefill for export in row.exports
        ]
        written = result.written + tuple(Written(*pair) for pair in planned)
        apply(committer, scheduled, msgspec.structs.replace(result, written=written))

    patch.setattr(Committer, "apply", faulty)


@breaks("every_export_is_written")
def the_planner_forgets_what_the_kernel_can_export(patch: pytest.MonkeyPatch) -> None:
    init = Scheduler.__init__

    def faulty(self: Scheduler, *args: Any) -> None:
        init(self, *args)
        self._granularity = 64

    patch.setattr(Scheduler, "__init__", faulty)


@breaks("only_committed_state_is_sealed")
def a_failed_step_keeps_what_it_may_have_written(patch: pytest.MonkeyPatch) -> None:
    def faulty(committer: Committer, sequence: Sequence, end: int, why: str) -> None:
        sequence.state.commit(committer._ledger.pool, end)
        sequence.folded = end

    patch.setattr(Committer, "_lost", faulty)


@breaks("findable_means_sealed_and_whole")
def the_index_keeps_no_reference_on_its_pages(patch: pytest.MonkeyPatch) -> None:
    publish = PrefixIndex.publish

    def faulty(index: PrefixIndex, tokens: Any, end: int, handles: Any, *rest: Any) -> bool:
        known = {node.page for node in index.nodes()}
        is_new = publish(index, tokens, end, handles, *rest)
        fresh = [node.page for node in index.nodes() if node.page not in known]
        index._pages.release(fresh)
        return is_new

    patch.setattr(PrefixIndex, "publish", faulty)


@breaks("a_refused_admission_changes_nothing")
def a_refused_sequence_keeps_its_seat(patch: pytest.MonkeyPatch) -> None:
    admit = admission.admit

    def faulty(ledger: Ledger, *rest: Any) -> Any:
        admitted = admit(ledger, *rest)
        if admitted is None and len(ledger.seats) > 1:
            ledger.seats.pop()
        return admitted

    patch.setattr(scheduler, "admit", faulty)


@breaks("a_refused_admission_changes_nothing")
def a_refused_sequence_keeps_the_checkpoint_it_matched(patch: pytest.MonkeyPatch) -> None:
    has_room = admission._has_room

    def faulty(ledger: Ledger, sequence: Sequence, match: Any, *rest: Any) -> bool:
        room = has_room(ledger, sequence, match, *rest)
        if not room and match.checkpoint is not None:
            ledger.index.use(match, sequence.name)
        return room

    patch.setattr(admission, "_has_room", faulty)


@breaks("a_finished_request_holds_nothing")
def the_pages_of_an_ended_sequence_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    def faulty(committer: Committer, request: Request, reason: str, error: Any = None) -> None:
        for sequence in request.samples:
            if sequence.finish_reason is None:
                if reason == "abort":
                    sequence.pages = []
                committer._scheduler.remove(sequence)
                committer._outbox.end(sequence, reason, error)

    patch.setattr(Committer, "end_request", faulty)


@breaks("a_finished_request_holds_nothing")
def the_seats_of_siblings_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    vacate = Ledger.vacate

    def faulty(ledger: Ledger, sequence: Sequence) -> None:
        siblings, sequence.siblings = sequence.siblings, []
        vacate(ledger, sequence)
        sequence.siblings = siblings

    patch.setattr(Ledger, "vacate", faulty)


@breaks("a_full_pool_skips_saving")
def a_checkpoint_pushes_out_a_running_sequence(patch: pytest.MonkeyPatch) -> None:
    def faulty(ledger: Ledger, rows: Any, shared: Any) -> None:
        for row in rows:
            for anchor in row.interior:
                row.exports[anchor.end] = row.sequence.state.plan_export(ledger.pool, anchor.end)

    patch.setattr(building, "plan_exports", faulty)


@breaks("admitted_means_it_can_run")
def pages_of_a_fan_out_are_not_reserved(patch: pytest.MonkeyPatch) -> None:
    def faulty(ledger: Ledger, sequence: Sequence, match: Any, end: int, running: Any) -> bool:
        wanted = admission.pages_for(end) - len(match.pages)
        return bool(ledger.pool.num_free) and wanted <= ledger.pages.num_free

    patch.setattr(admission, "_has_room", faulty)


@breaks("admitted_means_it_can_run")
def the_first_in_order_may_not_push_anybody_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_push_out_last", lambda self, sequence: False)


@breaks("admitted_means_it_can_run")
def a_lone_sequence_is_stuck_behind_its_own_prefix(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "forget_prefixes", lambda self: False)


@breaks("keys_name_all_that_matters")
def keys_do_not_name_the_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "salt", lambda ledger, salt: _salt(epoch=0, cache_salt=salt))


@breaks("keys_name_all_that_matters")
def keys_do_not_name_the_salt_of_the_request(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "salt", lambda ledger, _: _salt(epoch=ledger.epoch, cache_salt=""))


@breaks("keys_name_all_that_matters", in_answers=True)
def what_ran_before_a_flush_is_published_after_it(patch: pytest.MonkeyPatch) -> None:
    commit_prefill = Committer._commit_prefill

    def faulty(self: Committer, planned: PrefillRow, *rest: Any) -> None:
        planned.sequence.epoch = self._ledger.epoch
        commit_prefill(self, planned, *rest)

    patch.setattr(Committer, "_commit_prefill", faulty)


def _salt(*, epoch: int, cache_salt: str) -> bytes:
    return prefix_salt(epoch=epoch, model_identity=b"", adapter="", cache_salt=cache_salt)


# Faults of this tower's own that are no invariant of the ledger.


@breaks("chunks lie on the absolute grid")
def a_row_ends_wherever_the_budget_ends(patch: pytest.MonkeyPatch) -> None:
    def faulty(start: int, prompt_len: int, budget: int, *, oldest: bool) -> int:
        return min(prompt_len, start + max(budget, 1))

    patch.setattr(scheduler, "row_end", faulty)


@breaks("saves lie on the alignment")
def the_prompt_end_is_saved_on_the_page_grid(patch: pytest.MonkeyPatch) -> None:
    plan_anchors = scheduler.plan_anchors

    def faulty(start: int, end: int, prompt_len: int, alignment: int, *rest: Any) -> Any:
        return plan_anchors(start, end, prompt_len, 64, *rest)

    patch.setattr(scheduler, "plan_anchors", faulty)


@breaks("generated tokens are folded one by one", in_answers=True)
def a_preempted_answer_is_recomputed_as_a_prompt(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler.preempt

    def faulty(self: Scheduler, sequence: Sequence) -> None:
        preempt(self, sequence)
        sequence.prompt_len = len(sequence.tokens)

    patch.setattr(Scheduler, "preempt", faulty)


@breaks("a match leaves a token for the logits")
def a_match_may_cover_the_whole_prompt(patch: pytest.MonkeyPatch) -> None:
    match = PrefixIndex.match

    def faulty(index: PrefixIndex, tokens: Any, salt: bytes, limit: int) -> Any:
        return match(index, tokens, salt, len(tokens))

    patch.setattr(PrefixIndex, "match", faulty)


@breaks("a failed step may not have poisoned either")
def the_poison_of_a_failed_step_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "failed", lambda self, scheduled: None)


@breaks("samples share whole pages only")
def samples_write_into_one_partial_page(patch: pytest.MonkeyPatch) -> None:
    def faulty(ledger: Ledger, sequence: Sequence, end: int) -> None:
        missing, _ = admission.missing_pages(sequence, end)
        sequence.pages += ledger.pages.take(missing)
        if end == sequence.prompt_len:
            for one in sequence.siblings:
                ledger.pages.retain(sequence.pages)
                one.pages = list(sequence.pages)

    patch.setattr(admission, "take_pages", faulty)
    patch.setattr(scheduler, "take_pages", faulty)


@breaks("a seat brings nothing from before")
def a_seat_keeps_its_page_table(patch: pytest.MonkeyPatch) -> None:
    def faulty(self: Sequence, seat: Any) -> None:
        self.seat, self.own_seat = seat, (seat,)

    patch.setattr(Sequence, "sit", faulty)


@breaks("every stream ends")
def an_abort_in_flight_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    land = Engine._land

    def faulty(self: Engine) -> None:
        self._read_inbox()
        self._aborting.clear()
        land(self)

    patch.setattr(Engine, "_land", faulty)


# Drafts, and checkpoints along an answer.


@breaks("a seat brings nothing from before")
def a_preempted_sequence_is_taken_for_live(patch: pytest.MonkeyPatch) -> None:
    sit = Sequence.sit

    def faulty(self: Sequence, seat: Any) -> None:
        live = self.is_live
        sit(self, seat)
        self.is_live = live

    patch.setattr(Sequence, "sit", faulty)


@breaks("live sequences verify")
def a_live_sequence_decodes_when_nothing_is_pending(patch: pytest.MonkeyPatch) -> None:
    plan_verify = Scheduler._plan_verify

    def faulty(self: Scheduler, sequence: Sequence) -> None:
        if sequence.folded + 1 == len(sequence.tokens):
            self._plan_decode(sequence, len(sequence.tokens))
        else:
            plan_verify(self, sequence)

    patch.setattr(Scheduler, "_plan_verify", faulty)


@breaks("a row starts where its state ends")
def accepted_drafts_are_taken_for_folded(patch: pytest.MonkeyPatch) -> None:
    draw = Outbox.draw

    def faulty(
        self: Outbox, sequence: Sequence, run: Any, drafted: int = 0, accepted: int = 0
    ) -> bool:
        over = draw(self, sequence, run, drafted, accepted)
        sequence.folded += accepted
        return over

    patch.setattr(Outbox, "draw", faulty)


@breaks("a row starts where its state ends")
def what_was_accepted_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A step without drafts reads a state some tokens too old, as if nothing were pending."""
    draw = Outbox.draw
    patch.setattr(
        Outbox, "draw", lambda self, sequence, run, *drafts: draw(self, sequence, run[-1:], *drafts)
    )


@breaks("a sample ends where it ends")
def tokens_after_the_last_are_told(patch: pytest.MonkeyPatch) -> None:
    draw = Outbox.draw

    def faulty(self: Outbox, sequence: Sequence, run: Any, *drafts: int) -> bool:
        ends = [draw(self, sequence, (emitted,)) for emitted in run]
        return any(ends)

    patch.setattr(Outbox, "draw", faulty)


@breaks("pages are there before they are written", in_answers=True)
def drafts_are_verified_without_pages(patch: pytest.MonkeyPatch) -> None:
    def faulty(sequence: Sequence, known: int, most: int) -> int:
        return max(0, min(most, sequence.request.length_limit - 1 - known))

    patch.setattr(drafting, "num_drafts", faulty)


@breaks("pages are there before they are written")
def the_last_page_is_shared_by_two_who_draft(patch: pytest.MonkeyPatch) -> None:
    """Room for drafts is the next page of whoever published it, not one's own."""
    take = drafting.take_pages

    def faulty(ledger: Ledger, sequence: Sequence, known: int, most: int) -> None:
        before = len(sequence.pages)
        take(ledger, sequence, known, most)
        other = next(iter(ledger.index.nodes()), None)
        if len(sequence.pages) > before and other is not None:
            ledger.pages.release(sequence.pages[before:])
            ledger.pages.retain([other.page])
            sequence.pages[before:] = [other.page]

    patch.setattr(drafting, "take_pages", faulty)


@breaks("every_export_is_written", in_answers=True)
def an_anchor_that_was_not_reached_is_kept(patch: pytest.MonkeyPatch) -> None:
    apply = Committer.apply

    def faulty(committer: Committer, scheduled: Any, result: Any) -> None:
        exports = [row.export for row in scheduled.plan.verify if row.export is not None]
        written = result.written + tuple(Written(e.slot, e.end) for e in exports)
        apply(committer, scheduled, msgspec.structs.replace(result, written=written))

    patch.setattr(Committer, "apply", faulty)


@breaks("a_full_pool_skips_saving", in_answers=True)
def an_anchor_along_an_answer_insists_on_a_slot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AnswerAnchors, "_has_room", lambda self, sequence, running: True)


@breaks("a_finished_request_holds_nothing", in_answers=True)
def the_anchor_of_an_ended_answer_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    close = RunningState.close

    def faulty(state: RunningState, pool: StatePool) -> None:
        state.take_anchor()
        close(state, pool)

    patch.setattr(RunningState, "close", faulty)


@breaks("open_means_one_producer_alone", in_answers=True)
def a_state_that_is_to_stay_is_written_over(patch: pytest.MonkeyPatch) -> None:
    """The lease moves to another slot, the row does not."""
    keep_input = RunningState.keep_input

    def faulty(state: RunningState, pool: StatePool) -> Any:
        before = state.slot
        keep_input(state, pool)
        return before

    patch.setattr(RunningState, "keep_input", faulty)


@breaks("keys_name_all_that_matters", in_answers=True)
def an_answer_of_before_a_flush_is_published_after_it(patch: pytest.MonkeyPatch) -> None:
    publish = AnswerAnchors.publish

    def faulty(self: AnswerAnchors, sequence: Sequence) -> None:
        sequence.epoch = self._ledger.epoch
        publish(self, sequence)

    patch.setattr(AnswerAnchors, "forget", lambda self, running: None)
    patch.setattr(AnswerAnchors, "publish", faulty)


@breaks("findable_means_sealed_and_whole", in_answers=True)
def an_answer_is_filed_a_page_early(patch: pytest.MonkeyPatch) -> None:
    publish = AnswerAnchors.publish

    def faulty(self: AnswerAnchors, sequence: Sequence) -> None:
        anchor = sequence.state.anchor
        if anchor is not None and anchor.end > 64:
            sequence.state._anchor = anchor._replace(end=anchor.end - 64)
        publish(self, sequence)

    patch.setattr(AnswerAnchors, "publish", faulty)


# Two steps in flight.


@breaks("what_is_in_flight_is_held", in_answers=True)
def whoever_ends_gives_everything_back_at_once(patch: pytest.MonkeyPatch) -> None:
    """Though the step after its last one still writes its slot and pages."""

    def faulty(self: Queues, sequence: Sequence) -> bool:
        sequence.state.discard(self.ledger.pool)
        return False

    patch.setattr(Queues, "_leaves", faulty)


@breaks("open_means_one_producer_alone", in_answers=True)
def an_ended_answer_is_published_while_the_step_after_writes_over_it(
    patch: pytest.MonkeyPatch,
) -> None:
    publish = AnswerAnchors.publish

    def faulty(self: AnswerAnchors, sequence: Sequence) -> None:
        state, pool, end = sequence.state, self._ledger.pool, sequence.folded // 64 * 64
        current = state._current
        if end > sequence.prompt_len and state.in_flight and isinstance(current, ProducerLease):
            lease = pool._grant(ReaderLease(current.slot, current.generation, "index"))
            self._ledger.publish(sequence, end, lease, AnchorKind.DECODE)
        else:
            publish(self, sequence)

    patch.setattr(AnswerAnchors, "publish", faulty)


@breaks("only_committed_state_is_sealed", in_answers=True)
def what_is_to_stay_is_sealed_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    keep_input = RunningState.keep_input

    def faulty(state: RunningState, pool: StatePool) -> Any:
        output = state._output
        slot = keep_input(state, pool)
        if state._ahead is not None and output is not None:
            end = pool.end(output)
            pool._spend(output)
            pool._phase[output.slot] = Phase.SEALED
            lease = pool._grant(ReaderLease(output.slot, output.generation, state.holder))
            state.keep(pool, Exported(end + 1, lease))
        return slot

    patch.setattr(RunningState, "keep_input", faulty)


@breaks("a sample ends where it ends")
def what_was_drawn_after_the_end_is_told(patch: pytest.MonkeyPatch) -> None:
    def faulty(self: Queues, sequence: Sequence) -> bool:
        if sequence.state.in_flight:
            self.enter(sequence)  # as if it went on
            return True
        return False

    patch.setattr(Queues, "_leaves", faulty)


@breaks("steps are committed in the order of their launch")
def the_step_that_was_launched_last_is_committed_first(patch: pytest.MonkeyPatch) -> None:
    land = Flights.land

    def faulty(self: Flights) -> Any:
        if len(self) == 2:
            results = [flight.launched.result() for flight in self._flights]
            self._flights[:] = [
                flight._replace(launched=Ended(result))
                for flight, result in zip(self._flights, results, strict=True)
            ][::-1]
        return land(self)

    patch.setattr(Flights, "land", faulty)


@breaks("nothing in flight is poisoned")
def what_leaves_is_poisoned_before_its_last_row_has_ended(patch: pytest.MonkeyPatch) -> None:
    leaves = Queues._leaves

    def faulty(self: Queues, sequence: Sequence) -> bool:
        if sequence.state.in_flight and not sequence.is_leaving:
            self.ledger.pool._freed.append(sequence.state.slot)
        return leaves(self, sequence)

    patch.setattr(Queues, "_leaves", faulty)


@breaks("the host tells bounds")
def the_step_ahead_takes_all_drafts_for_wrong(patch: pytest.MonkeyPatch) -> None:
    plan_live = Ahead._plan_live

    def faulty(self: Ahead, before: Any, **given: Any) -> Any:
        staying = plan_live(self, before, **given)
        rows = self._scheduler.building.verify_rows
        rows[:] = [msgspec.structs.replace(row, pending=0) for row in rows]
        return staying

    patch.setattr(Ahead, "_plan_live", faulty)


@breaks("a failed step fails the next", in_answers=True)
def what_went_on_from_a_failed_step_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Flights, "_wreck", lambda self: None)


@breaks("nothing of a step in flight can be found")
def a_checkpoint_is_published_before_its_step_has_ended(patch: pytest.MonkeyPatch) -> None:
    """With what the row before it left."""
    commit_prefill = Committer._commit_prefill

    def faulty(self: Committer, planned: PrefillRow, *rest: Any) -> None:
        commit_prefill(self, planned, *rest)
        sequence, ledger = planned.sequence, self._ledger
        exports, sequence.state._exports = sequence.state._exports, []
        for end, lease in exports:  # of the row that follows
            ledger.pool.record_end(lease, end)
            sealed = ledger.pool.seal(lease)
            ledger.publish(sequence, end, sealed, AnchorKind.LADDER)

    patch.setattr(Committer, "_commit_prefill", faulty)


@breaks("open_means_one_producer_alone")
def a_state_is_published_that_the_row_in_flight_writes_over(patch: pytest.MonkeyPatch) -> None:
    def in_place(self: Scheduler, sequence: Sequence) -> Any:
        slot = sequence.state.plan_ahead()
        return slot, slot

    def faulty(self: Committer, sequence: Sequence, *, keep: bool) -> Any:
        current = sequence.state._current
        if not sequence.state.in_flight or not isinstance(current, ProducerLease):
            return saved_end(self, sequence, keep=keep)
        return self._ledger.pool._grant(ReaderLease(current.slot, current.generation, "index"))

    saved_end = Committer._saved_end
    patch.setattr(Scheduler, "_make_output_ahead", in_place)
    patch.setattr(Committer, "_saved_end", faulty)


@breaks("what is drawn in flight is known to the device alone")
def the_first_token_is_read_from_the_host_too_early(patch: pytest.MonkeyPatch) -> None:
    """Before the prompt's last row has ended: what stands there by then is of somebody else."""
    plan_verify = Scheduler._plan_verify

    def faulty(self: Scheduler, sequence: Sequence) -> None:
        if not sequence.state.in_flight:
            plan_verify(self, sequence)
            return
        sequence.tokens.append(0)
        self._plan_decode(sequence, len(sequence.tokens))
        sequence.tokens.pop()

    patch.setattr(Scheduler, "_plan_verify", faulty)


@breaks("samples part when their prompt has ended")
def the_first_sample_goes_on_while_its_prompt_is_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillRow, "fans_out", False)
