"""Notices a step that does not end, logs what it is, and reports it.

Knows plans and threads; does not know what becomes of the engine.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import FrameType

from millpond.plan.step import Executor, Launched, SeatMask, StepPlan, StepResult

logger = logging.getLogger(__name__)

NAMED = 8
"""Requests of a step that the log names, at most."""

FRAMES = 12
"""Innermost calls of each thread that the log shows, at most."""

LOOKS = 4
"""How often within the limit the watchdog looks at the step in flight."""


class GivenUp(Exception):
    """A step that was given up has ended after all."""


class Watchdog:
    """Launches plans by an executor, and calls `give_up` when one of them is waited for too long.

    A step is in flight from its launch, or from the end of the one before it. `give_up` is called
    once, by another thread, with the reason; meanwhile whoever launches or waits is kept waiting,
    and gets `GivenUp` afterwards. `limit` and `clock` are in seconds.
    """

    def __init__(
        self,
        executor: Executor,
        limit: float,
        give_up: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._limit = limit
        self._give_up = give_up
        self._clock = clock
        self._lock = threading.Lock()
        self._flying: list[StepPlan] = []
        self._since = 0.0
        self._waiting = False  # whoever launches is inside of the executor
        self._tripped = False
        self._done = threading.Event()  # `give_up` has returned
        self._stopping = threading.Event()

    @property
    def tripped(self) -> bool:
        """Whether a step was given up."""
        return self._tripped

    def start(self) -> None:
        """Look from now on, in a thread of its own."""
        threading.Thread(target=self._run, name="millpond-watchdog", daemon=True).start()

    def stop(self) -> None:
        """End that thread."""
        self._stopping.set()

    def launch(self, plan: StepPlan) -> Launched:
        """Hand a plan to the executor."""
        with self._inside():
            if not self._flying:
                self._since = self._clock()
            self._flying.append(plan)
            launched = self._executor.launch(plan)
        return _Watched(self, launched)

    def draw(self, launched: Launched, masks: tuple[SeatMask, ...]) -> None:
        """Tell a step in flight what seats may draw: the rest of it is launched."""
        with self._inside():
            launched.draw(masks)

    def land(self, launched: Launched) -> StepResult:
        """Wait for the oldest step in flight."""
        with self._inside():
            try:
                return launched.result()
            finally:
                with self._lock:
                    if not self._tripped:
                        del self._flying[0]
                        self._since = self._clock()

    def look(self) -> bool:
        """Give up the oldest step in flight if it takes too long; whether it was given up now."""
        with self._lock:
            seconds = self._clock() - self._since
            if self._tripped or not (self._flying and self._waiting) or seconds <= self._limit:
                return False
            self._tripped = True
            plan = self._flying[0]
        try:
            logger.error("step %s has not ended after %.0f s; %s", _told(plan), seconds, _stacks())
            self._give_up(
                f"step {plan.step} has not ended after {seconds:.0f} s (watchdog_timeout"
                f" {self._limit:g} s); the log has what it was"
            )
        finally:
            self._done.set()
        return True

    @contextmanager
    def _inside(self) -> Iterator[None]:
        with self._lock:
            self._waiting = True
        try:
            yield
        finally:
            with self._lock:
                self._waiting = False
                tripped = self._tripped
            if tripped:
                self._done.wait()
                raise GivenUp("the step was given up long before it ended")

    def _run(self) -> None:
        pause = min(self._limit / LOOKS, threading.TIMEOUT_MAX)
        while not self._stopping.wait(pause):
            if self.look():
                return


class _Watched:
    """A step in flight under a watchdog."""

    __slots__ = ("_launched", "_watchdog")

    def __init__(self, watchdog: Watchdog, launched: Launched) -> None:
        self._watchdog, self._launched = watchdog, launched

    def draw(self, masks: tuple[SeatMask, ...]) -> None:
        """Tell what seats may draw. Raises `GivenUp`."""
        self._watchdog.draw(self._launched, masks)

    def result(self) -> StepResult:
        """Wait for the step's end. Raises `StepFailed`, and `GivenUp`."""
        return self._watchdog.land(self._launched)


def _told(plan: StepPlan) -> str:
    """A plan in a few words: its number, its rows and the first requests."""
    requests = [row.request for row in (*plan.prefill, *plan.decode)]
    requests += [row.request for row in plan.verify]
    names = ", ".join(requests[:NAMED])
    more = f" and {len(requests) - NAMED} more" if len(requests) > NAMED else ""
    return (
        f"{plan.step} ({len(plan.prefill)} prompts with {sum(len(r.tokens) for r in plan.prefill)}"
        f" tokens, {len(plan.decode)} known and {len(plan.verify)} live rows, of {names}{more})"
    )


def _stacks() -> str:
    """Where every thread is, innermost first, in one line."""
    frames = sys._current_frames()
    here = threading.current_thread()
    return "; ".join(
        f"{thread.name}: {' < '.join(islice(_places(frames.get(thread.ident or 0)), FRAMES))}"
        for thread in threading.enumerate()
        if thread is not here
    )


def _places(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        code = frame.f_code
        yield f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
        frame = frame.f_back
