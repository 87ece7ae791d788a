"""What a step's report does to requests and ledger: advance, publish what was written, end.

The only place that publishes. Knows neither queue order nor threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from millpond.engine.ledger import Ledger
from millpond.engine.outbox import Outbox
from millpond.engine.planned import PrefillRow, Scheduled
from millpond.engine.request import Request, Sequence
from millpond.engine.scheduler import Scheduler
from millpond.errors import Broken
from millpond.plan.step import Emitted, Row, StepResult, VerifyRow
from millpond.state.lease import ReaderLease, Seat, SlotId

MAX_FAILURES = 2
"""Failed steps in a row after which a request is not tried again."""

NONFINITE = "the model's logits were not finite; the checkpoint they came from was dropped"


class Committer:
    """Applies the results of steps, in order."""

    def __init__(self, ledger: Ledger, scheduler: Scheduler, outbox: Outbox) -> None:
        self._ledger = ledger
        self._scheduler = scheduler
        self._outbox = outbox
        self._over: list[Sequence] = []  # drew their last token in this step
        self._errors: dict[Request, str] = {}

    def apply(self, scheduled: Scheduled, result: StepResult) -> None:
        """Advance every row by what the step reports. Leases of rows still in flight are kept.

        Steps come in the order in which they were launched. What a row came to, whose sequence
        ended while the step before it was in flight, is thrown away.
        """
        plan = scheduled.plan
        if result.step != plan.step:
            raise Broken(f"step {plan.step} was answered with the result of step {result.step}")
        self._ledger.counters.steps += 1
        written = {(entry.slot, entry.end) for entry in result.written}
        known = plan.prefill or plan.decode
        drawn = {emitted.seat: emitted for emitted in result.emitted} if known else {}
        self._collect_logprobs(scheduled, result)
        unwritten: list[tuple[Sequence, int]] = []
        leaving: list[Sequence] = []
        for planned, row in zip(scheduled.prefill, plan.prefill, strict=True):
            if planned.sequence.is_leaving:
                leaving.append(planned.sequence)
            elif (row.state_out, row.end) in written:
                self._commit_prefill(planned, row, written, drawn)
            else:
                unwritten.append((planned.sequence, row.end))
        pool = self._ledger.pool
        for sequence, row in zip(scheduled.decode, plan.decode, strict=True):
            end = row.end
            if sequence.is_leaving:
                leaving.append(sequence)
                continue
            if (row.state_out, end) not in written:
                unwritten.append((sequence, end))
                continue
            sequence.state.commit(pool, end)
            sequence.folded = end
            if row.state_in != row.state_out:
                self._left(sequence, row)
            if sequence.failures:
                _forgive(sequence)
            if row.emit_seats:
                self._draw(sequence, drawn)
        if plan.verify:
            unwritten += self._commit_verify(scheduled, result, written, leaving)
        self._ledger.counters.rows_wasted += len(leaving)
        for sequence in leaving:
            self._scheduler.landed(sequence)
        for sequence, end in unwritten:
            self._lost(sequence, end, "the forward did not write the state")
        self._settle()

    def fail(self, failed: Scheduled, why: str, after: Scheduled | None = None) -> None:
        """The step did not finish: nothing of it is kept, its rows are recomputed or ended.

        Nor is anything of the step `after` it, which was in flight too and has ended as well; it is
        no failure of those who had a row in that alone.
        """
        self._ledger.counters.steps_failed += 1
        self._scheduler.failed(failed)
        ends = _ends(failed)
        others: dict[Sequence, int] = {}
        if after is not None:
            self._scheduler.failed(after)
            followed = _ends(after)
            self._ledger.counters.rows_wasted += len(followed)
            others = {one: end for one, end in followed.items() if one not in ends}
            ends |= {one: end for one, end in followed.items() if one in ends}
        for sequence, end in (*ends.items(), *others.items()):
            if sequence.is_leaving:
                self._scheduler.landed(sequence)
                continue
            sequence.state.discard(self._ledger.pool)
            if sequence in others:
                self._scheduler.preempt(sequence)
            else:
                self._lost(sequence, end, why)
        self._settle()

    def end_request(
        self, request: Request, reason: str, error: str | None = None, param: str | None = None
    ) -> None:
        """End every sample that has not ended, and take back what they hold.

        `param` is the field of the request to blame for the `error`, if one is.
        """
        for sequence in request.samples:
            if sequence.finish_reason is None:
                if reason == "abort":
                    self._scheduler.along.publish(sequence)
                self._scheduler.remove(sequence)
                self._outbox.end(sequence, reason, error, param)

    # Rows.

    def _commit_prefill(
        self,
        planned: PrefillRow,
        row: Row,
        written: set[tuple[SlotId, int]],
        drawn: Mapping[Seat, Emitted],
    ) -> None:
        sequence, ledger = planned.sequence, self._ledger
        finite = all(drawn[seat].finite for seat in row.emit_seats if seat in drawn)
        current = sequence.epoch == ledger.epoch
        exported = sequence.state.commit(
            ledger.pool, row.end, written if finite and current else frozenset()
        )
        sequence.folded = row.end
        _forgive(sequence)
        self._scheduler.unblock()
        kinds = {anchor.end: anchor.kind for anchor in planned.anchors}
        lost = "unwritten" if finite and current else "epoch" if finite else "nonfinite"
        if len(exported) < len(row.exports):
            ledger.counters.checkpoints_skipped[lost] += len(row.exports) - len(exported)
        published = [export.end for export in exported]
        for export in exported:
            ledger.publish(sequence, export.end, export.lease, kinds[export.end])
        if planned.saves_end:
            lease = self._saved_end(sequence, keep=finite and current)
            if lease is not None:
                ledger.publish(sequence, row.end, lease, kinds[row.end])
                published.append(row.end)
        self._scheduler.reached(planned, published)
        group = tuple(sequence.group)
        if row.end == sequence.prompt_len and sequence.siblings:
            self._fan_out(sequence)
        if row.emit_seats:
            for one in group:
                self._draw(one, drawn)

    def _saved_end(self, sequence: Sequence, *, keep: bool) -> ReaderLease | None:
        """The lease of the state at the end of a prompt's row, to be published; None if not kept.

        With the next row in flight that state is the row's input, which writes another slot.
        """
        state, pool = sequence.state, self._ledger.pool
        if not state.in_flight:
            return state.publish(pool) if keep else None
        kept = state.take_anchor()
        if kept is None:
            self._ledger.counters.checkpoints_skipped["budget"] += keep
            return None
        if not keep:
            pool.release(kept.lease)
            return None
        return kept.lease

    def _commit_verify(
        self,
        scheduled: Scheduled,
        result: StepResult,
        written: set[tuple[SlotId, int]],
        leaving: list[Sequence],
    ) -> list[tuple[Sequence, int]]:
        """Advance live sequences by the tokens that are certain, and hand out what they drew.

        Returns sequences whose state was not written, each with the end it should have, and adds
        those that are leaving to `leaving`.
        """
        plan, pool = scheduled.plan, self._ledger.pool
        emitted, draw, over = result.emitted, self._outbox.draw, self._over
        if len(result.verified) != len(plan.verify):
            raise Broken(f"{len(result.verified)} of {len(plan.verify)} verify rows are reported")
        # The tokens of known rows come first, then those of each verify row.
        first = sum(len(row.emit_seats) for row in plan.prefill + plan.decode)
        drafted: Counter[int] = Counter()
        accepted: Counter[int] = Counter()
        unwritten: list[tuple[Sequence, int]] = []
        for sequence, row, count in zip(
            scheduled.verify, plan.verify, result.verified, strict=True
        ):
            seat, num_drafted, num_accepted = count.seat, count.drafted, count.accepted
            last = first + num_accepted
            run = emitted[first : last + 1]
            first = last + 1
            if seat != row.seat or len(run) <= num_accepted or run[-1].seat != seat:
                raise Broken(f"{sequence.name} drew {len(run)} tokens, of {count}")
            if sequence.is_leaving:
                leaving.append(sequence)
                continue
            end = len(sequence.tokens)  # with the step before committed, all of them are known
            if (row.state_out, end) not in written:
                unwritten.append((sequence, end))
                continue
            exported = sequence.state.commit(pool, end, written)
            sequence.folded = end
            if row.export is not None:
                self._scheduler.along.committed(sequence, row, exported)
            if row.state_in != row.state_out:
                self._left(sequence, row)
            if sequence.failures:
                _forgive(sequence)
            drafted[num_drafted] += 1
            accepted[num_accepted] += 1
            if not run[-1].finite:  # it ends a run
                self._nonfinite(sequence)
                run = run[:-1]
            if not sequence.request.aborting and draw(sequence, run, num_drafted, num_accepted):
                over.append(sequence)
        self._ledger.counters.verified(drafted, accepted)
        return unwritten

    def _left(self, sequence: Sequence, row: Row | VerifyRow) -> None:
        """A row went to another slot: what it read may be free now, or evictable."""
        anchor = sequence.state.anchor
        if anchor is None or anchor.lease.slot != row.state_in:  # else it is kept
            self._scheduler.unblock()

    def _fan_out(self, lead: Sequence) -> None:
        """The siblings go on by themselves from the lead's exact end; no byte of state moves."""
        siblings, lead.siblings = lead.siblings, []
        states = lead.state.fan_out(self._ledger.pool, len(siblings) + 1)
        for one, state in zip(siblings, states, strict=True):
            one.state = state
            one.folded = one.planned = lead.folded
            one.epoch, one.salt = lead.epoch, lead.salt
            one.resumed_end = lead.resumed_end
            self._scheduler.enter(one)

    def _draw(self, sequence: Sequence, drawn: Mapping[Seat, Emitted]) -> None:
        emitted = drawn.get(sequence.seat)
        request = sequence.request
        if emitted is None:
            raise Broken(f"{sequence.name} should have drawn a token in seat {sequence.seat}")
        sequence.is_live = True
        if not emitted.finite:
            self._nonfinite(sequence)
        elif not request.aborting and self._outbox.draw(sequence, (emitted,)):
            self._over.append(sequence)

    def _nonfinite(self, sequence: Sequence) -> None:
        request = sequence.request
        if request not in self._errors:
            self._ledger.counters.nonfinite += 1
            self._errors[request] = NONFINITE
            self._distrust(sequence)

    def _distrust(self, sequence: Sequence) -> None:
        """Forget what a sequence with damaged logits started from, and all it published since.

        All its pages go, from the first one, and what hangs below them: it attended to every one of
        them, and a damaged page that stayed would fail the next request as well, once for each
        shallower checkpoint above it.
        """
        index, prompt, start = (
            self._ledger.index,
            sequence.request.spec.tokens,
            sequence.resumed_end,
        )
        held = set(sequence.pages)
        path = [node for node in index.nodes() if node.page in held]
        if path:
            index.forget(min(path, key=lambda node: node.depth))
        # Without a start of its own it may have published over pages of others.
        match = index.match(prompt, sequence.salt, len(prompt))
        while match.checkpoint is not None and match.end >= start:
            index.drop(match.checkpoint)
            match = index.match(prompt, sequence.salt, len(prompt))
        self._scheduler.unblock()

    def _lost(self, sequence: Sequence, end: int, why: str) -> None:
        """The state of a row is not to be relied upon, nor a later one that is being written."""
        if not sequence.state.is_ahead:
            sequence.state.discard(self._ledger.pool)
        sequence.failures += 1
        sequence.failed_end = max(sequence.failed_end, end)
        if sequence.failures < MAX_FAILURES:
            self._scheduler.preempt(sequence)
        else:
            error = f"failed {MAX_FAILURES} times in a row: {why}"
            self._errors.setdefault(sequence.request, error)

    def _collect_logprobs(self, scheduled: Scheduled, result: StepResult) -> None:
        if not result.prompt_logprobs:
            return
        by_name = {row.sequence.request.spec.request_id: row for row in scheduled.prefill}
        for report in result.prompt_logprobs:
            collected = by_name[report.request].sequence.request.prompt_logprobs
            if collected is not None:
                collected += report.entries

    def _settle(self) -> None:
        """End what is over; what has one more row in flight keeps its leases for that long."""
        over, self._over = self._over, []
        errors, self._errors = self._errors, {}
        for sequence in over:
            if sequence.request not in errors:
                self._scheduler.along.publish(sequence)
            self._scheduler.remove(sequence)
        for request, error in errors.items():
            self.end_request(request, "error", error)


def _ends(scheduled: Scheduled) -> dict[Sequence, int]:
    """By sequence, where its row in a step would have ended; the least it could, of live rows."""
    ends = {planned.sequence: planned.end for planned in scheduled.prefill}
    ends |= {s: r.end for s, r in zip(scheduled.decode, scheduled.plan.decode, strict=True)}
    return ends | {sequence: len(sequence.tokens) for sequence in scheduled.verify}


def _forgive(sequence: Sequence) -> None:
    """Getting past where a step failed ends a row of failures."""
    if sequence.folded >= sequence.failed_end:
        sequence.failures = sequence.failed_end = 0
