"""An engine in a process of its own, seen from the server's: the same doors, the same streams.

The other process ends with this one, whatever ends it: its standard input is a pipe that only this
one holds open. When the other ends first, every stream does so with an error, and so does every
later call. Nothing here waits for it without a limit.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from millpond.config import PytorchEngineConfig, Resolved, SpeculativeConfig
from millpond.engine import submission
from millpond.engine.constraint import Constraint
from millpond.engine.stream import RequestStream, wake
from millpond.engine.types import Delta, EngineRequest, EngineStats
from millpond.errors import MillpondError, Refused, Rejected, Unavailable
from millpond.front.process import messages as m
from millpond.front.process.link import Receiver, Sender
from millpond.front.startup import READY, Startup
from millpond.telemetry import REQUESTS, logger

log = logger("process")
OPENER = "millpond.front.process.opener:open_model"
CHILD = "millpond.front.process.child"
TITLE = "millpond-engine"  # what a list of processes shows
ATTENTION = 0.1
"""Seconds between looks at whether a process that says nothing still lives."""
STEP = 60.0
"""Seconds in which a step ends; what is to happen between two steps waits no longer."""
ANSWER = 5.0
"""Seconds in which an engine that is well answers a question about itself."""


@dataclass(frozen=True, slots=True)
class _Open:
    """A request that is under way, and those of its samples that have not ended."""

    stream: RequestStream
    samples: set[int]


class RemoteEngine:
    """Starts a process and its engine; the doors are those of `engine.loop.Engine`. Thread-safe.

    `opener` ("module:function") makes the engine there. `plan` and `wait_ready` say how the start
    went; until it is over `submit` raises `Unavailable`.
    """

    def __init__(
        self,
        model: str | None = None,
        config: PytorchEngineConfig | None = None,
        speculative: SpeculativeConfig | None = None,
        *,
        opener: str = OPENER,
    ) -> None:
        self.startup = Startup(phase="starting")
        self._failure: str | None = None
        self.sized: Future[Resolved] = Future()  # the plan's numbers, or those measured after it
        self._plan: Future[m.Plan] = Future()
        self._ready: Future[m.Ready] = Future()
        self._lock = threading.Lock()  # for what follows
        self._live: dict[str, _Open] = {}
        self._orders: dict[int, Future[EngineStats | None]] = {}
        self._closing = False
        self._tickets = itertools.count()
        self._stats: EngineStats | None = None
        self._folder = tempfile.mkdtemp(prefix="millpond-")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        requests, answers = (f"ipc://{self._folder}/{name}" for name in ("requests", "answers"))
        try:
            self._requests = Sender(self._context, requests, bind=True)
            self._answers: Receiver[m.FromEngine] = Receiver(
                self._context, answers, m.FromEngine, bind=True
            )
        except zmq.ZMQError as error:  # a path too long for a socket, most likely
            raise Refused(f"cannot make a socket in {self._folder}: {error}") from error
        self._process = _launch(
            m.Start(
                opener=opener,
                requests=requests,
                answers=answers,
                folder=self._folder,
                log_level=logging.getLevelName(log.getEffectiveLevel()),
                log_requests=REQUESTS.level == logging.DEBUG,
                model=model,
                engine=(config or PytorchEngineConfig()).model_dump_json(exclude_unset=True),
                speculative=None if speculative is None else speculative.model_dump_json(),
            )
        )
        self._reader = threading.Thread(target=self._read, name="millpond-answers", daemon=True)
        self._reader.start()

    # Doors.

    @property
    def healthy(self) -> bool:
        """False once the engine, or its process, has failed; see `failure`."""
        return self._failure is None

    @property
    def failure(self) -> str | None:
        """What ended the engine, None while it is healthy."""
        return self._failure

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def plan(self) -> m.Plan:
        """What will be served, as soon as that is known. Raises `Refused`, or `Unavailable`."""
        return self._plan.result()

    def wait_ready(self, timeout: float | None = None) -> None:
        """Return when requests are served. Raises as `plan` does, and `TimeoutError`."""
        self._ready.result(timeout)

    def submit(self, request: EngineRequest) -> RequestStream:
        """Send a request. `Rejected`: can never be served; `Unavailable`: not now."""
        if not self.healthy:
            raise Unavailable(f"the engine has failed: {self._failure}")
        if not self.startup.ready:
            raise Unavailable(f"the model is not ready yet: {self.startup.phase}")
        ready = self._ready.result()
        submission.check(request, ready.settings, ready.capabilities)
        key = request.request_id
        stream = RequestStream(key, request.params.n, self.abort)
        with self._lock:
            if self._closing:
                raise Unavailable("the engine is closing and takes no more requests")
            if key in self._live:
                raise Rejected(f"request id {key!r} is in use", param="request_id")
            self._live[key] = _Open(stream, set(range(request.params.n)))
        try:
            sent = self._requests.send(m.Submit(request))
        except (OverflowError, TypeError, ValueError) as error:
            self._forget(key)
            raise Rejected(f"the request cannot be told to the engine: {error}") from error
        if not sent:
            self._forget(key)
            if self._process.poll() is not None:  # and nobody has read that yet
                raise Unavailable("the engine has failed: its process has ended")
            raise Unavailable("the engine's process takes no requests")
        self._end_if_failed()  # meanwhile, and perhaps before it saw this one
        return stream

    def abort(self, request_id: str) -> None:
        """End a request at the next yield point; unknown and finished ones are ignored."""
        if request_id in self._live:
            self._requests.send(m.Abort(request_id))

    def flush_cache(self) -> None:
        """Make every checkpoint unfindable; returns once that is done. Raises `Unavailable`."""
        try:
            self._ask(m.Flush).result(STEP)
        except TimeoutError:
            raise Unavailable(f"the engine has not ended its step within {STEP:g} s") from None

    def prepare(self, constraint: Constraint) -> Future[Any]:
        """Have a constraint compiled there; this or the future may raise as the engine's does."""
        try:
            return self._ask(lambda ticket: m.Prepare(ticket, constraint))
        except ValueError as error:  # half of a pair of surrogates
            raise Rejected(
                f"the {constraint.kind} cannot be told to the engine: {error}",
                param=constraint.param,
                code="invalid_grammar",
            ) from error

    def stats(self) -> EngineStats:
        """A snapshot, or the last one of an engine that does not answer. Raises `Unavailable`."""
        try:
            self._stats = self._ask(m.Count).result(ANSWER) or self._stats
        except (Unavailable, TimeoutError):
            if self._stats is None:
                raise Unavailable("the engine has no counters yet") from None
        if self._stats is None:
            raise Unavailable("the engine has no counters yet")
        return self._stats

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more requests, finish those accepted (`drain`, for `timeout` seconds at most).

        The process is gone when this returns. Closing twice is closing once.
        """
        with self._lock:
            self._closing = True
        if self.startup.ready and self._requests.send(m.Close(drain, timeout)):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(None if timeout is None else timeout + ANSWER)
        self._process.kill()
        if self._reader is not threading.current_thread():
            self._reader.join()

    # The other side's words; one thread reads them.

    def _read(self) -> None:
        try:
            while True:
                gone = self._process.poll() is not None
                message = self._answers.receive(0.0 if gone else ATTENTION)
                if message is not None:
                    self._take(message)
                elif gone:
                    break
        except Exception as error:
            log.exception("the engine's process cannot be understood")
            self._failure = self._failure or f"{type(error).__name__}: {error}"
            self._process.kill()
        self._over(self._process.wait())

    def _take(self, message: m.FromEngine) -> None:
        if isinstance(message, m.Deltas):
            self._deliver(message.deltas)
        elif isinstance(message, m.Done | m.Declined):
            with self._lock:
                order = self._orders.pop(message.ticket, None)
            if order is not None:
                _settle(order, message)
        elif isinstance(message, m.Phase):
            self.startup.enter(message.name)
        elif isinstance(message, m.Plan):
            self._plan.set_result(message)
        elif isinstance(message, m.Sized):
            self.sized.set_result(message.resolved)
        elif isinstance(message, m.Ready):
            self._ready.set_result(message)
            self.startup.enter(READY)
        elif isinstance(message, m.Turned):
            self._end(message.request_id, message.why)
        else:
            error = Refused(message.why) if message.refused else Unavailable(message.why)
            self._give_up(error)

    def _deliver(self, deltas: list[Delta]) -> None:
        """Hand deltas to their streams; those that wait in one event loop are woken together."""
        woken: list[asyncio.Future[None]] = []
        for delta in deltas:
            found = self._live.get(delta.request_id)
            if found is None:
                continue
            if delta.finish_reason is not None:
                found.samples.discard(delta.sample_index)
                if not found.samples:
                    self._forget(delta.request_id)
            waiter = found.stream.push(delta)
            if waiter is not None:
                woken.append(waiter)
        wake(woken)

    def _forget(self, key: str) -> None:
        with self._lock:
            self._live.pop(key, None)

    def _end(self, key: str, why: str) -> None:
        """End whatever of a request has not ended."""
        found = self._live.get(key)
        self._deliver(
            [
                Delta(request_id=key, sample_index=i, tokens=(), finish_reason="error", error=why)
                for i in (() if found is None else tuple(found.samples))
            ]
        )

    # The end.

    def _give_up(self, error: MillpondError) -> None:
        """The engine has failed, or cannot be served at all."""
        self._failure = self._failure or str(error)
        for promise in (self._plan, self._ready):
            if not promise.done():
                promise.set_exception(error)
        self._end_all()

    def _end_if_failed(self) -> None:
        if self._failure is not None:
            self._end_all()

    def _end_all(self) -> None:
        with self._lock:
            keys = list(self._live)
            orders, self._orders = self._orders, {}
        for key in keys:
            self._end(key, f"the engine has failed: {self._failure}")
        gone = m.Declined(0, f"the engine has failed: {self._failure}", later=True)
        for order in orders.values():
            _settle(order, gone)

    def _over(self, status: int) -> None:
        """The process has ended, and all that it said has been read."""
        how = f"signal {-status}" if status < 0 else f"status {status}"
        if self._closing and status == 0:
            self._end_all()
        else:
            self._give_up(Unavailable(f"the engine's process has ended with {how}"))
        if not self._closing and self.startup.ready:
            log.error("no request is served any more: %s", self._failure)
        self._requests.close(linger=0)
        self._answers.close()
        self._context.term()
        if self._process.stdin is not None:
            self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self, order: Callable[[int], msgspec.Struct]) -> Future[EngineStats | None]:
        ticket, promise = next(self._tickets), Future[EngineStats | None]()
        with self._lock:
            self._orders[ticket] = promise
        sent = False
        try:
            sent = (
                self._failure is None and self.startup.ready and self._requests.send(order(ticket))
            )
        finally:
            if not sent:
                with self._lock:
                    self._orders.pop(ticket, None)
        if not sent:
            raise Unavailable(self._failure or "the engine answers no questions now")
        return promise


def _settle(order: Future[EngineStats | None], message: m.Done | m.Declined) -> None:
    """Tell whoever gave an order how it went, unless they no longer want to know."""
    if not order.set_running_or_notify_cancel():
        return
    if isinstance(message, m.Done):
        order.set_result(message.stats)
    elif message.later:
        order.set_exception(Unavailable(message.why))
    else:
        order.set_exception(Rejected(message.why, param=message.param, code=message.code))


def _launch(start: m.Start) -> subprocess.Popen[bytes]:
    """A process that finds modules where this one does, and has been told how to start."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {CHILD} import main; sys.exit(main())"
    process = subprocess.Popen([sys.executable, "-c", code, TITLE], stdin=subprocess.PIPE)
    assert process.stdin is not None  # asked for above
    with suppress(OSError):  # it has ended already, which will be noticed
        process.stdin.write(msgspec.json.encode(start) + b"\n")
        process.stdin.flush()
    return process
