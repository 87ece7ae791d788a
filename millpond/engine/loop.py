"""The engine: one thread that schedules, launches and commits steps, and what others may call.

What other threads ask for passes through the `Intake`; queues and the ledger belong to the engine's
thread alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

from millpond.engine import auditing, submission
from millpond.engine.ahead import Ahead
from millpond.engine.commit import Committer
from millpond.engine.constraint import Constraint
from millpond.engine.flights import Flights
from millpond.engine.grammar import Grammar, Grammars
from millpond.engine.guidance import Guidance
from millpond.engine.intake import Intake
from millpond.engine.ledger import Ledger
from millpond.engine.lifecycle import new_epoch
from millpond.engine.outbox import Outbox, Sink
from millpond.engine.planned import Scheduled
from millpond.engine.request import Request
from millpond.engine.scheduler import Scheduler
from millpond.engine.settings import EngineSettings
from millpond.engine.snapshot import snapshot
from millpond.engine.stream import RequestStream
from millpond.engine.tiers import Store, Tiers
from millpond.engine.types import EngineRequest, EngineStats
from millpond.engine.watchdog import Watchdog
from millpond.errors import Rejected
from millpond.plan.counts import counts_of
from millpond.plan.step import Executor
from millpond.store.jobs import Job, Report

__all__ = ["Engine", "EngineSettings", "RequestStream"]

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests on one executor, which it closes in the end.

    Either `start` lets it run in a thread of its own, or `step` is called by hand, by one thread.
    `submit`, `abort`, `flush_cache`, `stats` and `close` may be called from anywhere.
    """

    def __init__(
        self,
        settings: EngineSettings,
        executor: Executor,
        sink: Sink | None = None,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.perf_counter,
        store: Store | None = None,
    ) -> None:
        """`Refused` when the settings do not fit the executor. With a `sink`, streams stay empty.

        Without `grammars`, which it closes in the end, no constraint is served. `clock` times
        steps, in seconds. A `store` keeps checkpoints beyond the device; it is closed in the end.
        """
        self.settings = settings
        self.capabilities = executor.capabilities
        settings.check(self.capabilities)
        self._executor = executor
        self._ledger = Ledger(settings, self.capabilities)
        self._scheduler = Scheduler(self._ledger, self.capabilities)
        self._intake = Intake()
        self._outbox = Outbox(self._ledger.counters, self._intake.remove, sink)
        self._committer = Committer(self._ledger, self._scheduler, self._outbox)
        self._ahead = Ahead(self._scheduler, self.capabilities)
        limit = settings.watchdog_seconds
        self._watchdog = Watchdog(executor, limit, self._give_up) if limit > 0 else None
        self._flights = Flights(self._watchdog or executor, clock)
        self._tiers: Tiers | None = None
        if store is not None:
            self._tiers = Tiers(self._ledger, self._scheduler, self.capabilities, store, clock)
            store.connector.start(self._transferred)
        self._guidance = Guidance(grammars, settings.eos_token_ids, self.capabilities.vocab_size)
        self._aborting: list[Request] = []

    # For every thread.

    @property
    def healthy(self) -> bool:
        """False once the engine has failed for good; see `failure`."""
        return self._intake.failure is None

    @property
    def failure(self) -> str | None:
        """What ended the engine, None while it is healthy."""
        return self._intake.failure

    def prepare(self, constraint: Constraint) -> Future[Grammar]:
        """Compile a constraint in another thread; returns at once.

        The future, or this call, raises `Rejected` for one that no request can carry, and
        `Unavailable` when too many wait. What is prepared is kept for a while, not for ever.
        """
        return self._guidance.prepare(constraint)

    def submit(self, request: EngineRequest) -> RequestStream:
        """Queue a request. `Rejected`: can never be served; `Unavailable`: closing, or failed.

        A constraint that was not prepared is compiled first, while others run; one that cannot be
        ends the stream with an error then.
        """
        submission.check(request, self.settings, self.capabilities)
        grammar = None if request.constraint is None else self.prepare(request.constraint)
        if grammar is not None and grammar.done():
            grammar.result()
        stream = RequestStream(request.request_id, request.params.n, self.abort)
        stop_ids = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            stop_ids |= frozenset(self.settings.eos_token_ids)
        limit = submission.token_limit(self.settings, self.capabilities)
        with self._intake.changed:
            accepted = self._intake.accept(
                request.request_id,
                lambda arrival: Request(
                    request, arrival, stream, stop_ids=stop_ids, token_limit=limit
                ),
            )
            if grammar is None:
                self._intake.post(lambda: self._enter(accepted, None))
        if grammar is not None:
            grammar.add_done_callback(lambda compiled: self._compiled(accepted, compiled))
        return stream

    def abort(self, request_id: str) -> None:
        """End a request at the next yield point; unknown and finished ones are ignored."""
        with self._intake.changed:
            request = self._intake.find(request_id)
            if request is not None and not request.aborting:
                request.aborting = True
                self._intake.post(lambda: self._aborting.append(request))

    def flush_cache(self) -> None:
        """Make every checkpoint unfindable; returns once that is done.

        Asked for in the middle of a step made by hand, it is done before that step commits.
        """
        done = threading.Event()

        def flush() -> None:
            new_epoch(self._ledger, self._scheduler)
            done.set()

        intake = self._intake
        with intake.changed:
            if intake.ended:
                return
            intake.post(flush)
            thread = intake.thread
        if thread is None and intake.stepping is None:
            self._read_inbox()
        elif thread is not None and thread is not threading.current_thread():
            done.wait()

    def stats(self) -> EngineStats:
        """A snapshot; numbers of a step that is under way may be half counted.

        Running requests may hold some of the pages that the index holds.
        """
        live = len(self._intake.live())
        return snapshot(self._ledger, self._scheduler, self._tiers, live, counts_of(self._executor))

    def start(self) -> None:
        """Run in a thread of its own until `close`."""
        self._intake.start(self._run)
        if self._watchdog is not None:
            self._watchdog.start()

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more requests and finish those accepted (`drain`, for `timeout` seconds at most).

        Then end the others with `abort`, give everything back and close the executor. Closing twice
        is closing once. Code that the engine calls, such as a sink, may close it without `drain`
        only: `RuntimeError`, with nothing changed, where that would wait for the engine itself.
        """
        self._intake.drain(drain, timeout, self.step)
        first = self._intake.stop()
        if self._intake.thread is not None:
            self._intake.join(lambda: self._watchdog is not None and self._watchdog.tripped)
        elif first:
            self._shut()

    def _compiled(self, request: Request, grammar: Future[Grammar]) -> None:
        """Called by the thread that compiled what a request asks for."""
        self._intake.post(lambda: self._enter(request, grammar))

    # The engine's own thread.

    def _enter(self, request: Request, grammar: Future[Grammar] | None) -> None:
        """Let a request wait for admission, unless it was aborted or cannot be followed."""
        first = request.samples[0]
        if first.finish_reason is not None:
            return
        try:
            self._guidance.guide(request, None if grammar is None else grammar.result())
        except (Rejected, CancelledError) as error:
            param = error.param if isinstance(error, Rejected) else None
            self._committer.end_request(request, "error", str(error), param)
            return
        self._scheduler.enqueue(first)
        self._scheduler.tiers.asked(first)

    def step(self) -> bool:
        """Launch what there is to launch, and commit one step; False when there was nothing to do.

        One more step may be in flight when it returns.

        What the executor raises, other than `StepFailed`, ends the engine and every stream, not
        this call. A broken invariant of the engine's own is raised as well.
        """
        if not self.healthy:
            return False
        try:
            with self._intake.step():
                try:
                    return self._step()
                except Exception as error:
                    self._die(error)
                    raise
        finally:
            self._outbox.flush()

    def _step(self) -> bool:
        self._read_inbox()
        self._end_aborted()
        if not self._flights:
            if not self._launch(self._schedule()):
                return self._guidance.wait_for_one() or self._wait_by_hand()
            self._read_inbox()  # requests that came meanwhile may join the next step
            self._end_aborted()
        elif self._tiers is not None:
            self._tiers.storing.advance()  # it reads what is fixed, and no step writes
        if not self._intake.stopping:
            self._launch(self._schedule_ahead())
        self._land()
        return True

    def _schedule(self) -> Scheduled | None:
        """With nothing in flight, plan a step of whoever may run."""
        self._guidance.wait()
        self._end_misguided()
        if self._tiers is not None:
            self._tiers.advance()
        return self._scheduler.schedule()

    def _schedule_ahead(self) -> Scheduled | None:
        """Plan the step after the one in flight, if that need not end first."""
        self._end_misguided()
        return self._ahead.plan(self._flights.scheduled[0], guided=not self._guidance.is_idle)

    def _launch(self, scheduled: Scheduled | None) -> bool:
        """Hand a plan to the device; False when there is none."""
        if scheduled is None:
            return False
        self._guidance.bind(scheduled, drafting=self.capabilities.num_draft_tokens > 0)
        self._audit(scheduled)
        self._flights.launch(scheduled)
        return True

    def _end_misguided(self) -> None:
        for request, why, param in self._guidance.failed():
            self._committer.end_request(request, "error", why, param)

    def _land(self) -> None:
        """Wait for the older step in flight, and commit it."""
        landed = self._flights.land()
        if not self.healthy:  # it was given up, and all streams have ended
            self._scheduler.abandon()
            return
        # What was asked during the forward counts before anything of it is published.
        self._read_inbox()
        if landed.result is None:
            self._committer.fail(landed.scheduled, landed.why, landed.after)
        else:
            self._ledger.measured(landed.scheduled.plan, landed.seconds)
            self._committer.apply(landed.scheduled, landed.result)
            self._guidance.begin(landed.result.drafts)
        self._end_aborted()
        for flying in self._flights.scheduled:
            if flying.plan.draws_later:
                self._flights.draw(self._guidance.masks(flying))
        if landed.error is not None:
            self._die(landed.error)
        self._audit()

    def _read_inbox(self) -> None:
        for call in self._intake.take():
            call()

    def _end_aborted(self) -> None:
        aborting, self._aborting = self._aborting, []
        for request in aborting:
            self._committer.end_request(request, "abort")

    def _wait_by_hand(self) -> bool:
        """Where nobody else lets time pass: wait for a transfer that a request waits for."""
        if self._intake.thread is not None or self._tiers is None:
            return False
        return bool(self._scheduler.waiting or self._scheduler.running) and self._tiers.wait()

    def _transferred(self, job: Job, report: Report) -> None:
        """Called by a thread of the store: no rank touches the memory of a job any more."""
        tiers = self._tiers
        if tiers is None:
            return
        self._intake.post(lambda: tiers.ended(job, report))
        tiers.news.set()

    def _run(self) -> None:
        try:
            while not self._intake.ended:
                if not self.step():
                    self._intake.wait(None if self._tiers is None else self._tiers.patience())
        except Exception as error:
            logger.exception("the engine failed; no request is served any more")
            if self.healthy:  # not by a step: also then nothing more may be accepted
                self._die(error)
        self._shut()

    def _shut(self) -> None:
        """End what is left, give everything back, close the executor."""
        try:
            while self._flights:
                self._land()
        except Exception as error:
            logger.exception("the engine failed while it was closed")
            self._die(error)  # nobody waits for an answer for ever
        self._read_inbox()
        for request in self._intake.live():
            self._committer.end_request(request, "abort")
        if self._tiers is not None:
            self._tiers.close(drain=self._intake.draining)
            self._read_inbox()
        self._ledger.index.clear()
        self._outbox.flush()
        self._guidance.close()
        self._executor.close()
        if self._watchdog is not None:
            self._watchdog.stop()

    def _give_up(self, why: str) -> None:
        """A step does not end: end every stream. The engine's own thread waits meanwhile."""
        self._intake.fail(why)
        self._end_streams()
        self._outbox.flush()

    def _die(self, error: Exception) -> None:
        """End every stream; nothing is accepted from here on."""
        self._intake.fail(f"{type(error).__name__}: {error}")
        self._flights.abandon()
        self._end_streams()
        self._scheduler.abandon()

    def _end_streams(self) -> None:
        self._read_inbox()
        for request in self._intake.live():
            for sequence in request.samples:
                self._outbox.end(sequence, "error", f"the engine has failed: {self.failure}")

    def _audit(self, *about: Scheduled) -> None:
        """Check every invariant of the ledger, where the settings ask for it.

        A step `about` to be launched counts as in flight.
        """
        if self.settings.debug_audit:
            transfers = None if self._tiers is None else self._tiers.transfers
            flights = (*self._flights.scheduled, *about)
            auditing.check(self._ledger, self._scheduler, transfers, flights)
