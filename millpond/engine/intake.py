"""What other threads ask of an engine, and how far it is on the way to its end.

Knows threads and which requests are live; schedules nothing and frees nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from millpond.engine.request import Request
from millpond.errors import Rejected, Unavailable

logger = logging.getLogger(__name__)

FAREWELL = 5.0
"""Seconds that a step which was given up may still take to end."""


class Intake:
    """Live requests, calls that wait for the engine's thread, and whether the engine takes more.

    One condition, `changed`, guards all of it; every method takes it itself, and may be called with
    it held.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failure: str | None = None  # what ended the engine
        self.draining = False  # what was accepted may end by itself
        self.stopping = False  # no further step is planned
        self.thread: threading.Thread | None = None  # None: steps are made by hand
        self.stepping: threading.Thread | None = None  # who is within a step
        self._closing = False
        self._calls: list[Callable[[], None]] = []
        self._live: dict[str, Request] = {}
        self._arrivals = 0

    # Requests.

    def accept(self, request_id: str, build: Callable[[int], Request]) -> Request:
        """Add the request that `build` makes of its number in the order of arrival.

        Raises `Unavailable` when the engine has failed or is closing, `Rejected` when the id is in
        use.
        """
        with self.changed:
            if self.failure is not None:
                raise Unavailable(f"the engine has failed: {self.failure}")
            if self._closing:
                raise Unavailable("the engine is closing and takes no more requests")
            if request_id in self._live:
                raise Rejected(f"request id {request_id!r} is in use", param="request_id")
            request = self._live[request_id] = build(self._arrivals)
            self._arrivals += 1
            return request

    def find(self, request_id: str) -> Request | None:
        """The live request of this id."""
        with self.changed:
            return self._live.get(request_id)

    def live(self) -> list[Request]:
        """Requests that were accepted and have not ended, in the order of arrival."""
        with self.changed:
            return list(self._live.values())

    def remove(self, request: Request) -> None:
        """Forget a request that has ended."""
        with self.changed:
            del self._live[request.spec.request_id]
            if not self._live:
                self.changed.notify_all()

    # Calls for the engine's thread.

    def post(self, call: Callable[[], None]) -> None:
        """Have the engine's thread make a call at its next yield point."""
        with self.changed:
            self._calls.append(call)
            self.changed.notify_all()

    def take(self) -> list[Callable[[], None]]:
        """Calls that were posted and not yet taken, oldest first."""
        with self.changed:
            calls, self._calls = self._calls, []
        return calls

    def wait(self, patience: float | None) -> None:
        """Wait until a call is posted or the engine stops, for `patience` seconds at most."""
        with self.changed:
            self.changed.wait_for(lambda: self._calls or self.stopping, patience)

    # The engine's life.

    def start(self, run: Callable[[], None]) -> None:
        """Call `run` in a thread of its own. `RuntimeError` the second time."""
        with self.changed:
            if self.thread is not None or self.stopping:
                raise RuntimeError("an engine is started once")
            self.thread = threading.Thread(target=run, name="millpond-engine", daemon=True)
        self.thread.start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """The calling thread is within a step."""
        self.stepping = threading.current_thread()
        try:
            yield
        finally:
            self.stepping = None

    @property
    def ended(self) -> bool:
        """Whether the engine's thread has no more steps to make."""
        with self.changed:
            return self.stopping or self.failure is not None

    def fail(self, why: str) -> None:
        """Accept nothing from here on; the first reason stays."""
        with self.changed:
            self.failure = self.failure or why

    def drain(self, drain: bool, timeout: float | None, step: Callable[[], bool]) -> None:
        """Accept nothing more; with `drain`, wait for what is live, `timeout` seconds at most.

        Where no thread runs the engine, steps are made here until one finds nothing to do.
        `RuntimeError`, with nothing changed, where that would wait for the calling thread itself.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.changed:
            thread = self.thread
            if not self.stopping:
                self._refuse_to_wait_for_itself(drain)
            self._closing = True
            self.draining = self.draining or drain
            self.changed.notify_all()
            if drain and thread is not None:
                self.changed.wait_for(lambda: not self._live, timeout)
        if drain and thread is None:
            while (deadline is None or time.monotonic() < deadline) and step():
                pass

    def stop(self) -> bool:
        """Let no further step be planned; False when it was so already."""
        with self.changed:
            already, self.stopping = self.stopping, True
            self.changed.notify_all()
        return not already

    def join(self, given_up: Callable[[], bool]) -> None:
        """Wait for the engine's thread, but not for a step that was given up."""
        thread = self.thread
        if thread is None or thread is threading.current_thread():
            return
        while thread.is_alive() and not given_up():
            thread.join(FAREWELL)
        thread.join(FAREWELL)
        if thread.is_alive():
            logger.error("a step that does not end is left to itself, and its device with it")

    def _refuse_to_wait_for_itself(self, drain: bool) -> None:
        here = threading.current_thread()
        if self.thread is None and self.stepping is here:
            raise RuntimeError("an engine that is stepped by hand is closed between two steps")
        if self.thread is here and drain:
            raise RuntimeError(
                "close(drain=True) waits for requests to end, and the thread that calls it is the"
                " one that serves them: use close(drain=False), or call it from another thread"
            )
