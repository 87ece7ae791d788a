"""Planning one step ahead: the rows that follow those of a step in flight, before it has ended.

Where each row in flight ends is known, and so is what comes next, but for the tokens it draws:

    of a prompt, not its last      the next tokens of the prompt, from where that row ends
    the last of a prompt           the token it draws: it is on the device, as is where it stands
    known tokens of an answer      the next of them, or the token that is drawn after the last
    a live row                     what is certain by then: between `end + 1` tokens, where the row
                                   in flight ends, and `end + 1 + its drafts`; pages are taken for
                                   the most, and the device counts
    nothing in flight              as with nothing in flight at all

A state that is to be published, or kept along an answer, stays: the row that follows writes another
slot, and at the commit of the step in flight what it left is sealed, and published if the report
says so. Nothing of a step is found before that.

Who waits is let in beside them, with what is free or can be evicted. What cannot be known, or must
not be done, while a step is in flight either leaves out a row or lets the whole step wait:

    samples of one prompt sit out the step after its end, where their states part
    one that finds no room sits out, and the next step waits, for others may have to make room
    a row whose guide may take long to say what can be drawn sits out every second step
    a step waits: "room" (see above), "priority" (somebody is about to be pushed out), "store" (a
    record is about to be loaded, beside the order of steps), "rows" (nobody has a row that could
    follow)

A guide needs the tokens of the step in flight before it can say what may be drawn in the next. That
one's forward does not: it is launched, and what it draws is launched when the masks are known.

Who ends is not known: by a stop token, an abort, an error, damaged logits. A sequence that ends
when the first of two steps is committed *leaves*: its streams hear of it at once, its leases and
seat stay until the second step has ended, and what that row came to is thrown away. So its last
state is not published, for it is being written over; if it was worth keeping, the row went to a
fresh slot, and its input became the sequence's anchor when it was committed.

Steps are committed in the order in which they were launched. When one fails, so does the one after
it, whatever the device says of that.
"""

from __future__ import annotations

from millpond.engine import drafting
from millpond.engine.planned import Scheduled
from millpond.engine.scheduler import Scheduler
from millpond.plan.step import PAGE_SIZE, Capabilities, VerifyRow


class Ahead:
    """Plans the step after one that is in flight. Pushes out nobody."""

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
        """Live rows after live rows. Returns how many sequences run that have a row in flight."""
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
