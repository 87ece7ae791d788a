"""The engine's process: takes requests from the server's, and lives no longer than it.

Knows no model: what it runs is made by the function that its first line names.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib import import_module
from typing import Any

import msgspec
import zmq

from millpond.engine.loop import Engine
from millpond.engine.outbox import Sink
from millpond.errors import MillpondError, Refused, Rejected
from millpond.front.process import messages as m
from millpond.front.process.link import Receiver, Sender
from millpond.telemetry import log_to_stderr, logger

log = logger("process")
Opener = Callable[[m.Start, Callable[[m.FromEngine], object], Sink], Engine]
"""From the start, a way to tell what is going on, and a sink for deltas: the engine, not running.

Raises `Refused`."""

ATTENTION = 0.2
"""Seconds between looks at whether the engine still lives."""


def main() -> int:
    """Serve as standard input says. Returns an exit status: 0 after an orderly end."""
    for s in (signal.SIGINT, signal.SIGTERM):  # meant for the server, which will say what to do
        signal.signal(s, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:
        return 1
    start = msgspec.json.decode(line, type=m.Start)
    threading.Thread(target=_outlive_nobody, args=(start.folder,), daemon=True).start()
    log_to_stderr(start.log_level, requests=start.log_requests)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    answers = Sender(context, start.answers, bind=False)
    requests: Receiver[m.ToEngine] = Receiver(context, start.requests, m.ToEngine, bind=False)
    try:
        return _serve(start, requests, answers)
    finally:
        requests.close()
        answers.close(linger=5.0)
        context.term()


def _outlive_nobody(folder: str) -> None:
    """End this process when the other one is gone: it holds the other end of standard input."""
    while os.read(0, 1 << 16):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _serve(start: m.Start, requests: Receiver[m.ToEngine], answers: Sender) -> int:
    try:
        answers.send(m.Phase("starting"))
        module, _, function = start.opener.partition(":")
        opener: Opener = getattr(import_module(module), function)
        engine = opener(start, answers.send, lambda deltas: _pass_on(answers, deltas))
    except Refused as error:
        answers.send(m.Failed(str(error), refused=True))
        return 1
    except Exception as error:
        log.exception("the engine did not start")
        answers.send(m.Failed(f"{type(error).__name__}: {error}"))
        return 1
    engine.start()
    answers.send(m.Ready(engine.settings, engine.capabilities))
    status = _Desk(engine, answers).run(requests)
    engine.close(drain=False, timeout=5.0)
    return status


def _pass_on(answers: Sender, deltas: list[Any]) -> None:
    answers.send(m.Deltas(deltas))


class _Desk:
    """Carries out what is asked of an engine until it is closed or has failed."""

    def __init__(self, engine: Engine, answers: Sender) -> None:
        self._engine, self._answers = engine, answers
        self._closed = threading.Event()

    def run(self, requests: Receiver[m.ToEngine]) -> int:
        """Returns an exit status."""
        while not self._closed.is_set():
            message = requests.receive(ATTENTION)
            if not self._engine.healthy:
                self._answers.send(m.Failed(str(self._engine.failure)))
                return 1
            if message is not None:
                self._take(message)
        return 0

    def _take(self, message: m.ToEngine) -> None:
        if isinstance(message, m.Submit):
            try:
                self._engine.submit(message.request)
            except MillpondError as error:  # it was looked at before; what is left are races
                self._answers.send(m.Turned(message.request.request_id, str(error)))
        elif isinstance(message, m.Abort):
            self._engine.abort(message.request_id)
        elif isinstance(message, m.Count):
            self._answers.send(m.Done(message.ticket, self._engine.stats()))
        elif isinstance(message, m.Prepare):
            self._prepare(message)
        elif isinstance(message, m.Flush):
            self._apart(self._flush, message.ticket)
        else:
            self._apart(self._close, message.drain, message.timeout)

    def _apart(self, work: Callable[..., None], *given: Any) -> None:
        """What waits for the engine must not keep others waiting."""
        threading.Thread(target=work, args=given, daemon=True).start()

    def _prepare(self, message: m.Prepare) -> None:
        def tell(made: Future[Any]) -> None:
            error = None if made.cancelled() else made.exception()
            if error is None:
                self._answers.send(m.Done(message.ticket))
            else:
                self._decline(message.ticket, error)

        try:
            self._engine.prepare(message.constraint).add_done_callback(tell)
        except MillpondError as error:
            self._decline(message.ticket, error)

    def _decline(self, ticket: int, error: BaseException) -> None:
        if isinstance(error, Rejected):
            self._answers.send(m.Declined(ticket, str(error), error.param, error.code))
        else:
            self._answers.send(m.Declined(ticket, str(error), later=True))

    def _flush(self, ticket: int) -> None:
        self._engine.flush_cache()
        self._answers.send(m.Done(ticket))

    def _close(self, drain: bool, timeout: float | None) -> None:
        self._engine.close(drain=drain, timeout=timeout)
        self._closed.set()
