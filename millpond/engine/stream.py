"""The consumer's end of a request: deltas arrive from the engine's thread, without polling."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress

from millpond.engine.types import Delta


class RequestStream:
    """Deltas of one request, in order, for one consumer; ends when every sample has finished.

    Read it with `for`, with `async for` or with `get`. Whoever stops reading early calls `abort`.
    """

    def __init__(self, request_id: str, num_samples: int, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._deltas: deque[Delta] = deque()
        self._unfinished = num_samples  # as seen by the consumer
        self._abort = abort
        self._waiter: threading.Event | asyncio.Future[None] | None = None

    def abort(self) -> None:
        """End the request at its next yield point; nothing happens when it is over."""
        self._abort(self.request_id)

    def get(self, timeout: float | None = None) -> Delta | None:
        """The next delta, None after the last; `TimeoutError` when none comes in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._deltas:
            if not self._unfinished:
                return None
            if timeout == 0:
                raise TimeoutError(f"no token of {self.request_id} yet")
            arrived = threading.Event()
            self._waiter = arrived
            # A delta that came before the waiter was in place woke nobody.
            if not self._deltas:
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or not arrived.wait(left):
                    self._waiter = None
                    if not self._deltas:
                        raise TimeoutError(f"no token of {self.request_id} within {timeout} s")
            self._waiter = None
        return self._take()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        delta = self.get()
        if delta is None:
            raise StopIteration
        return delta

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if not self._unfinished:
                raise StopAsyncIteration
            arrived = asyncio.get_running_loop().create_future()
            self._waiter = arrived
            try:
                if not self._deltas:
                    await arrived
            finally:
                self._waiter = None
        return self._take()

    def _take(self) -> Delta:
        delta = self._deltas.popleft()
        self._unfinished -= delta.finish_reason is not None
        return delta

    # The engine's side.

    def push(self, delta: Delta) -> asyncio.Future[None] | None:
        """Append a delta; wakes a blocked thread, returns the future of a coroutine that waits."""
        self._deltas.append(delta)
        # Left in place: only the consumer knows whether it is still the one that waits.
        waiter = self._waiter
        if isinstance(waiter, threading.Event):
            waiter.set()
            return None
        return waiter


def wake(futures: Iterable[asyncio.Future[None]]) -> None:
    """Resume waiting coroutines: one call into each event loop, however many wait there."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for future in futures:
        by_loop.setdefault(future.get_loop(), []).append(future)
    for loop, waiting in by_loop.items():
        with suppress(RuntimeError):  # a loop that was closed meanwhile waits for nothing
            loop.call_soon_threadsafe(_resolve, waiting)


def _resolve(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
