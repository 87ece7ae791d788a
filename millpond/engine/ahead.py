"""Planning one step ahead: the next rows of live sequences, while the tokens before them are drawn.

A live row needs nothing of the step in flight: its tokens are on the device, the host knows bounds.
With the step before it in flight,

    its state starts at      `end`, where the row in flight ends: exact
    tokens known by then     `end + 1 .. end + 1 + drafts of the row in flight`
    it folds up to           as many, and drafts from there: pages are taken for the most
    it reads and writes      the slot the row in flight writes; a fresh one if that state is to stay

A step is planned ahead when every line holds, else the step in flight is waited for:

    the step in flight has live rows only    what draws a first token may fan out, or be published
    everybody who runs has a row in it       others are short of something, or wait for a mask
    nobody who waits could be let in         admission, preemption and order: with nothing in flight
    no record waits to be loaded             a transfer writes slots beside the order of steps
    every row is plain                       no guide: a mask needs the token before; nor what makes
                                             the device wait (penalties, bias, logprobs, min_tokens)
    the pages are there, or evictable        nobody is pushed out
    somebody has a token left to draw        a sequence whose last token is under way gets no row

What it does not know is who ends: by a stop token, an abort, an error, damaged logits. A sequence
that ends when the first of two steps is committed *leaves*: its streams hear of it at once, its
leases and seat stay until the second step has ended, and what that row came to is thrown away. So
its last state is not published, for it is being written over; if it was worth keeping, the row went
to a fresh slot, and its input became the sequence's anchor when it was committed.

Steps are committed in the order in which they were launched. When one fails, so does the one after
it, whatever the device says of that.
"""

from __future__ import annotations

from millpond.engine import drafting
from millpond.engine.planned import Scheduled
from millpond.engine.request import Sequence
from millpond.engine.scheduler import Scheduler
from millpond.plan.step import PAGE_SIZE, Capabilities, VerifyRow


class Ahead:
    """Plans the step after one that is in flight. Admits nobody, pushes out nobody."""

    def __init__(self, scheduler: Scheduler, capabilities: Capabilities) -> None:
        self._scheduler = scheduler
        self._num_drafts = capabilities.num_draft_tokens
        self._runs_ahead = capabilities.runs_ahead

    def plan(self, before: Scheduled) -> Scheduled | None:
        """The step after `before`, which is in flight and alone; None: wait for that one first."""
        flying = before.plan
        if not self._runs_ahead or flying.prefill or flying.decode:
            return None
        scheduler = self._scheduler
        if not scheduler.is_settled or scheduler.tiers.wants_room:
            return None
        if not before.is_plain:
            before.is_plain = all(one.is_plain and one.guide is None for one in before.verify)
            if not before.is_plain:
                return None
        most = self._num_drafts
        sequences: list[Sequence] = []
        rows: list[VerifyRow] = []
        due: list[int] = []
        staying = 0
        for sequence, row in zip(before.verify, flying.verify, strict=True):
            if sequence.is_leaving:
                continue
            staying += 1
            start = len(sequence.tokens)
            drafts = row.num_drafts
            known = start + 1 + drafts  # tokens at most, once the step in flight is over
            num_drafts = most
            if known > sequence.calm_until:
                if start + 1 >= sequence.request.length_limit:
                    continue  # its last token is under way
                drafting.take_pages(scheduler.ledger, sequence, known, most)
                if known > len(sequence.pages) * PAGE_SIZE:
                    return None
                num_drafts = drafting.num_drafts(sequence, known, most)
                if scheduler.along.passes(start, known):
                    due.append(len(rows))
                else:
                    anchor = scheduler.along.next_after(start)
                    sequence.calm_until = drafting.calm_until(sequence, most, anchor)
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
        if staying < len(scheduler.running) or not rows:
            return None
        for sequence in sequences:
            sequence.state.plan_ahead()
        scheduler.ledger.counters.steps_ahead += 1
        scheduled = scheduler.schedule_live(sequences, rows, due)
        scheduled.is_plain = True
        return scheduled
