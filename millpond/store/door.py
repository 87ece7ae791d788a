"""The way to one backend: who may call it now, when it is left alone, how it is opened again.

Knows nothing of what the calls are for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from millpond.errors import Refused
from millpond.store.backend import Backend, BackendStats, StoreUnavailable
from millpond.telemetry import logger

log = logger("store")

RETRY_AFTER = 5.0
"""Seconds for which a store that could not be reached is left alone; then one call tries it."""


class Door:
    """A backend and its circuit breaker.

    A call that raises `StoreUnavailable` opens the breaker: for `retry_after` seconds every entry
    fails at once, then one caller at a time tries, until one succeeds. A store whose transfer could
    not be stopped is closed as soon as nobody is inside, and opened again by the next who tries.
    """

    def __init__(
        self,
        opener: Callable[[], Backend],
        regions: Sequence[memoryview],
        *,
        retry_after: float = RETRY_AFTER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._opener = opener
        self._regions = regions
        self._retry_after = retry_after
        self._clock = clock
        self._lock = threading.Condition()
        self._backend: Backend | None = None
        self._tripped = False
        self._until = 0.0  # nobody tries before
        self._trying: int | None = None  # the thread that tries
        self._condemned = False
        self._closed = False
        self._inside: dict[int, float] = {}  # by thread: since when
        self._over = 0.0  # after which a call that is inside counts as hung
        self.name = ""
        self.refusal: str | None = None  # it will not be tried again
        self.times_tripped = 0

    def open(self) -> None:
        """Open the backend now. Raises `StoreUnavailable` or `Refused`; the breaker is open then"""
        with self.enter():
            pass

    @property
    def state(self) -> str:
        """closed (in use), open (left alone), trying, hung, or refused."""
        with self._lock:
            if self.refusal is not None or self._closed:
                return "refused"
            now = self._clock()
            if self._over and any(now - since > self._over for since in self._inside.values()):
                return "hung"
            if not self._tripped and not self._condemned:
                return "closed"
            return "open" if self._condemned or now < self._until else "trying"

    @contextmanager
    def enter(self) -> Iterator[Backend]:
        """The backend, for calls of this thread. Raises `StoreUnavailable` when it is left alone.

        Returns, also by raising, only when nothing touches the memory of those calls any more.
        """
        backend = self._go_in()
        try:
            yield backend
        except StoreUnavailable as error:
            self._go_out(error)
            raise
        except BaseException:
            self._go_out(None, worked=False)
            raise
        self._go_out(None)

    def stats(self) -> BackendStats | None:
        """Of the backend, None while it is not open."""
        with self._lock:
            backend = None if self._condemned else self._backend
        try:
            return None if backend is None else backend.stats()
        except StoreUnavailable:
            return None

    def close(self) -> bool:
        """Let nobody in and close the backend; False when it cannot be, somebody being inside."""
        with self._lock:
            self._closed = True
            if self._inside:
                return False
            backend, self._backend = self._backend, None
        if backend is not None:
            _close(backend)
        return True

    def _go_in(self) -> Backend:
        me = threading.get_ident()
        with self._lock:
            if self._closed or self.refusal is not None:
                raise StoreUnavailable(self.refusal or "the store is closed")
            now = self._clock()
            waiting = self._tripped and now < self._until
            tried = (self._tripped or self._backend is None) and self._trying is not None
            if self._condemned or waiting or tried:
                raise StoreUnavailable("the store is left alone for a while")
            backend = self._backend
            if backend is None or self._tripped:
                self._trying = me
            self._inside[me] = now
        return backend if backend is not None else self._open()

    def _open(self) -> Backend:
        try:
            backend = self._opener()
            for region in self._regions:
                backend.register(region)
        except Refused as error:
            with self._lock:
                self.refusal = str(error)
                self._leave()
            raise
        except StoreUnavailable as error:
            self._go_out(error)
            raise
        except BaseException:
            self._go_out(None, worked=False)
            raise
        with self._lock:
            self._backend, self.name, self._over = backend, backend.name, 2 * backend.bound
        return backend

    def _go_out(self, error: StoreUnavailable | None, *, worked: bool = True) -> None:
        with self._lock:
            if error is not None:
                self._until = self._clock() + self._retry_after
                if not self._tripped:
                    self.times_tripped += 1
                    log.warning("the store is left alone for %.0f s: %s", self._retry_after, error)
                self._tripped = True
                self._condemned = self._condemned or error.memory_in_use
            elif worked and self._tripped and self._trying == threading.get_ident():
                self._tripped = False
                log.info("the store answers again")
            self._leave()
            if not self._condemned:
                return
            if not self._inside:
                backend, self._backend = self._backend, None
                if backend is not None:
                    _close(backend)
                self._condemned = False
                self._lock.notify_all()
            elif error is not None and error.memory_in_use:
                self._lock.wait_for(lambda: not self._condemned)

    def _leave(self) -> None:
        me = threading.get_ident()
        if self._trying == me:
            self._trying = None
        self._inside.pop(me, None)


def _close(backend: Backend) -> None:
    try:
        backend.close()
    except Exception:
        log.exception("the store did not close properly")
