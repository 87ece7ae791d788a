"""Guides of running sequences, filled beside the engine's thread: nobody waits for another's mask.

Knows sequences and their guides; which rows run is the scheduler's business.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from time import perf_counter

from msgspec.structs import replace

from millpond.engine.constraint import Constraint
from millpond.engine.grammar import Grammar, Grammars
from millpond.engine.guide import Guide
from millpond.engine.planned import Scheduled
from millpond.engine.request import Request
from millpond.engine.request import Sequence as Sample
from millpond.errors import Rejected
from millpond.plan.step import Drafts, SeatMask

GRACE = 0.002
"""Seconds a step waits for masks that are being filled: most take less. Rows of those that take
longer sit the step out."""

GRACE_AHEAD = 0.01
"""The same for a step that is planned ahead: its forward runs meanwhile."""

PATIENCE = 0.05
"""Seconds the engine waits for a mask when there is nothing else to do, before it looks again at
what was asked of it meanwhile."""

NUM_WORKERS = min(8, os.cpu_count() or 1)


class Guidance:
    """Gives samples their guides, and keeps those of running ones filled.

    `grammars` compiles constraints (None: requests that carry one are refused). Used from the
    engine's thread, `prepare` from any.
    """

    def __init__(
        self, grammars: Grammars | None, eos_token_ids: tuple[int, ...], vocab_size: int
    ) -> None:
        self._grammars = grammars
        self._eos = eos_token_ids
        self._vocab_size = vocab_size
        self._guided: list[Sample] = []  # all that have a guide and are not over
        self._pool: ThreadPoolExecutor | None = None  # made for the first grammar

    def prepare(self, constraint: Constraint) -> Future[Grammar]:
        """Compile a constraint in another thread. Raises `Rejected`, as the future does."""
        if self._grammars is None:
            raise Rejected(
                "structured output is not served here", param=constraint.param, code="unsupported"
            )
        return self._grammars.prepare(constraint)

    def guide(self, request: Request, grammar: Grammar | None) -> None:
        """Give every sample of a request its guide, if the request needs one."""
        reasoning = request.spec.reasoning
        if grammar is None and (reasoning is None or reasoning.budget is None):
            return
        for sample in request.samples:
            sample.guide = Guide(
                grammar, reasoning, request.spec.params, self._eos, self._vocab_size
            )
        self._guided += request.samples

    def begin(self, told: Iterable[Drafts]) -> None:
        """Start to fill what went stale. `told`: what was proposed to seats that asked."""
        if not self._guided:
            return
        self._forget()
        drafts = {one.seat: one.tokens for one in told}
        slow: list[tuple[Guide, Sequence[int]]] = []
        for sample in self._guided:
            guide = sample.guide
            if guide is None or not guide.stale or guide.complete or not guide.is_ready:
                continue  # what is being filled stays stale until it is
            proposed = drafts.get(sample.seat, ())
            if guide.needs_matching(proposed):
                slow.append((guide, proposed))
            else:
                guide.fill(proposed)
        if not slow:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(NUM_WORKERS, "millpond-mask")
        for worker in range(min(NUM_WORKERS, len(slow))):
            share = slow[worker::NUM_WORKERS]
            filling = self._pool.submit(_fill, share)
            for guide, _ in share:
                guide.filling = filling

    def wait(self) -> None:
        """Give masks that are being filled a moment, except those that needed longer before."""
        guides = self._unready()
        waiting = _futures(guide.filling for guide in guides if not guide.is_slow)
        if not waiting:
            return
        late = wait(waiting, GRACE).not_done
        for guide in guides:
            guide.is_slow = guide.is_slow or guide.filling in late

    def wait_for_one(self) -> bool:
        """Wait until one of the masks that are being filled is there; False when none is."""
        guides = self._unready()
        waiting = _futures(guide.filling for guide in guides)
        if waiting:
            wait(waiting, PATIENCE, FIRST_COMPLETED)
        return bool(guides)

    @property
    def is_idle(self) -> bool:
        """Whether no request is guided."""
        return not self._guided

    def bind(self, scheduled: Scheduled, *, drafting: bool) -> None:
        """Put into a plan what its seats may draw, and whose drafts are wanted (`drafting`).

        Where a guide has yet to see what the step in flight draws, the masks follow: see `masks`.
        """
        if not self._guided:
            return
        drawing = _guided(scheduled)
        if drawing:
            later = any(sample.state.is_ahead for sample, _ in drawing)
            scheduled.plan = replace(
                scheduled.plan,
                masks=() if later else _seat_masks(drawing),
                tell_drafts=tuple(sample.seat for sample, _ in drawing) if drafting else (),
                draws_later=later,
            )

    def masks(self, scheduled: Scheduled) -> tuple[SeatMask, ...]:
        """What the seats of a step in flight may draw, once the step before it was committed.

        Waits for those that are being filled: they could not sit the step out any more.
        """
        drawing = [(one, most) for one, most in _guided(scheduled) if not one.is_leaving]
        guides = [one.guide for one, _ in drawing if one.guide is not None]
        waiting = _futures(guide.filling for guide in guides)
        late = wait(waiting, GRACE_AHEAD).not_done if waiting else set()
        for guide in guides:
            guide.is_slow = guide.is_slow or guide.filling in late
        return _seat_masks(drawing)

    def failed(self) -> list[tuple[Request, str, str | None]]:
        """Requests with a sample that nothing may follow, why, and which field is to blame."""
        self._forget()
        found = []
        for sample in self._guided:
            guide, wanted = sample.guide, sample.request.spec.constraint
            if guide is not None and guide.error is not None:
                blamed = wanted.param if wanted is not None and guide.is_refusal else None
                found.append((sample.request, guide.error, blamed))
        return found

    def _forget(self) -> None:
        """Those that are over."""
        self._guided = [one for one in self._guided if one.finish_reason is None]

    def _unready(self) -> list[Guide]:
        self._forget()
        guides = (one.guide for one in self._guided)
        return [guide for guide in guides if guide is not None and not guide.is_ready]

    def close(self) -> None:
        """Give back the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self._grammars is not None:
            self._grammars.close()


def _drawing(scheduled: Scheduled) -> Iterator[tuple[Sample, int]]:
    """Samples that draw a token in a step, and how many drafts each verifies."""
    for planned, row in zip(scheduled.prefill, scheduled.plan.prefill, strict=True):
        if row.emit_seats:
            yield from ((one, 0) for one in planned.sequence.group)
    for sample, row in zip(scheduled.decode, scheduled.plan.decode, strict=True):
        if row.emit_seats:
            yield sample, 0
    for sample, live in zip(scheduled.verify, scheduled.plan.verify, strict=True):
        yield sample, live.num_drafts


def _guided(scheduled: Scheduled) -> list[tuple[Sample, int]]:
    return [one for one in _drawing(scheduled) if one[0].guide is not None]


def _seat_masks(drawing: Iterable[tuple[Sample, int]]) -> tuple[SeatMask, ...]:
    masks = []
    for sample, num_drafts in drawing:
        guide = sample.guide
        if guide is None:
            continue
        if guide.filling is not None:
            guide.filling.result()  # of a sample that was pushed out meanwhile
        places = guide.places[: num_drafts + 1]
        if len(places) <= num_drafts or any(place is not None for place in places):
            masks.append(SeatMask(sample.seat, places))
    return tuple(masks)


def _futures(filling: Iterable[Future[None] | None]) -> set[Future[None]]:
    return {future for future in filling if future is not None}


def _fill(share: Sequence[tuple[Guide, Sequence[int]]]) -> None:
    for guide, drafts in share:
        began = perf_counter()
        try:
            guide.fill(drafts)
            guide.is_quick = perf_counter() - began <= GRACE
        except BaseException as error:  # noqa: BLE001 -- ends this request, not the engine
            guide.error = f"the grammar could not be followed: {error}"
