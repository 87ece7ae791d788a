"""Plans one step ahead: the rows that follow those of a step in flight, before it has ended.

The host knows where each row in flight ends. It knows what comes next, too, except for the tokens
that row draws, which are on the device:

    row in flight              next row
    part of a prompt           the next tokens of the prompt
    the last of a prompt       the token it draws; the device knows the token and its position
    known tokens of an answer  the next known tokens, or the token drawn after the last of them
    a live row                 starts `end + 1` tokens in at least and `end + 1 + drafts` at most:
                               pages are taken for the most, the device counts what was accepted
    none                       as planned with nothing in flight

**Checkpoints.** A state that is to be published, or kept along an answer, is not overwritten: the
next row reads it and writes another slot. It is sealed when the step that wrote it is committed,
and published then if the report says that it was written. Nobody finds it before.

**Admission.** Waiting requests are admitted with what is free or can be evicted; nobody is
preempted while a step is in flight.

**Rows left out of one step:**

    samples of one prompt in the step after its end, where each gets a state of its own
    a sequence that finds no page or slot; the next step is not planned ahead then
    every second row of a sequence whose guide may be slow to say what can be drawn

**Steps that wait** until nothing is in flight, by the reason that is counted:

    "room"      a sequence found no page or slot, and others may have to be preempted
    "priority"  a lower priority is about to be preempted
    "store"     a record is about to be loaded, which does not follow the order of steps
    "rows"      no sequence has a row that could follow

**Guides** need the tokens of the step in flight to say what may be drawn in the next one. Only the
draws of that one wait for them: its forward is launched at once, its draws once masks are known.

**Ends** are not known ahead: a stop token, an abort, an error, logits that are not finite. A
sequence that ends when the first of two steps is committed is *leaving*: its streams end at once,
its leases and seat stay until the second step has ended, and the result of its row there is thrown
away. Its last state is not published, for the second step writes over it; if it was worth keeping,
the row was given a fresh slot, and the state it read became the sequence's anchor at the commit.

Steps are committed in the order in which they were launched. When one fails, so does the one after
it, whatever the device reports of that.
"""

from __future__ import annotations

from millpond.engine import drafting
from millpond.engine.planned import Scheduled
from millpond.engine.scheduler import Scheduler
from millpond.plan.step import PAGE_SIZE, Capabilities, VerifyRow


class Ahead:
    """Plans the step after one that is in flight. Preempts nobody."""

    def __init__(self, scheduler: Scheduler, capabilities: Capabilities) -> None:
        self._scheduler = scheduler
        self._num_drafts = capabilities.num_draft_tokens
        self._runs_ahead = capabilities.runs_ahead

    def plan(self, before: Scheduled, *, guided: bool = False) -> Scheduled | None:
        """The step after `before`, which is in flight and alone; None: wait for that one first.

        `guided`: some samples have guides.
        """
        if not self._runs_ahead:
            return None
        scheduler, counters = self._scheduler, self._scheduler.ledger.counters
        why = scheduler.begin_after(before)
        if why is not None:
            counters.steps_waited[why] += 1
            return None
        staying = self._plan_live(before, guided=guided)
        if staying < len(scheduler.running):
            scheduler.plan_running()
        scheduled = scheduler.finish()
        if scheduled is None:
            counters.steps_waited["room" if scheduler.is_short else "rows"] += 1
            return None
        counters.steps_ahead += 1
        return scheduled

    def _plan_live(self, before: Scheduled, *, guided: bool) -> int:
        """Add the live rows that follow live rows in flight.

        Returns how many sequences of those rows are still running.
        """
        scheduler, most, flying = self._scheduler, self._num_drafts, before.plan
        building, ledger, along = scheduler.building, scheduler.ledger, scheduler.along
        sequences, rows = building.verify, building.verify_rows
        staying = 0
        for sequence, row in zip(before.verify, flying.verify, strict=True):
            if sequence.is_leaving:
                continue
            staying += 1
            if guided and sequence.guide is not None and not sequence.guide.goes_ahead:
                continue
            start = len(sequence.tokens)
            drafts = row.num_drafts
            known = start + 1 + drafts  # tokens at most, once the step in flight is over
            num_drafts = most
            if known > sequence.calm_until:
                if start + 1 >= sequence.request.length_limit:
                    continue  # its last token is under way
                drafting.take_pages(ledger, sequence, known, most)
                if known > len(sequence.pages) * PAGE_SIZE:
                    scheduler.is_short = True
                    continue
                num_drafts = drafting.num_drafts(sequence, known, most)
                if along.passes(start, known):
                    building.due_verify.append(len(rows))
                else:
                    anchor = along.next_after(start)
                    sequence.calm_until = drafting.calm_until(sequence, most, anchor)
            if sequence.pages_sent < len(sequence.pages):
                building.send_pages(sequence)
            sequence.state.plan_ahead()
            sequences.append(sequence)
            slot = row.state_out
            rows.append(
                VerifyRow(
                    request=row.request,
                    seat=row.seat,
                    start=start,
                    pending=drafts,
                    num_drafts=num_drafts,
                    state_in=slot,
                    state_out=slot,
                )
            )
        return staying
