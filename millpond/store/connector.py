"""Transfers of whole records over all ranks: bounded, counted, over when the last rank is done.

Never blocks its caller. Knows ranks and what they report; knows no lease, no request and no index.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol, TypeVar

from millpond.store.backend import BackendStats
from millpond.store.jobs import Forget, Get, Job, Lookup, Put, Report
from millpond.store.memory import RankMemory
from millpond.store.rates import TransferRate
from millpond.telemetry import logger

log = logger("store")

AnyJob = TypeVar("AnyJob", Lookup, Put, Get)


class Rank(Protocol):
    """What does jobs on one rank. `report` may be called from any thread, once for each job."""

    def start(self, report: Callable[[Report], object]) -> None:
        """Begin to work."""

    @property
    def state(self) -> str:
        """closed (in use), open (left alone), trying, hung, or refused."""

    @property
    def times_tripped(self) -> int:
        """How often the breaker opened."""

    def stats(self) -> BackendStats | None:
        """Of the store, where it is known."""

    def submit(self, job: Job) -> None:
        """Queue a job; returns at once."""

    def cancel(self, number: int) -> None:
        """A job need not be done any more; it is reported all the same."""

    def close(self, deadline: float) -> bool:
        """End everything by `deadline` (`time.monotonic`); False when something hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Jobs under way at once; what comes beyond is shed, and counted."""

    lookups: int = 256
    gets: int = 4
    puts: int = 8


@dataclass(slots=True)
class _UnderWay:
    job: Job
    missing: int  # ranks that have not reported
    report: Report  # of all so far, as one


class Connector:
    """Asks all ranks at once, and answers once for all of them.

    `on_end` hears of every job that was accepted, from some thread, when no rank touches the memory
    of the job any more. A get or a put has worked when it worked on every rank. `submit` comes from
    one thread.
    """

    def __init__(
        self, ranks: Sequence[Rank], memory: RankMemory, tier: str, limits: Limits | None = None
    ) -> None:
        """`memory` is that of any rank: all are alike."""
        self.tier = tier
        self.slot_bytes = memory.slot_bytes
        self.page_bytes = memory.page_bytes
        self.num_ranks = len(ranks)
        self.limits = limits or Limits()
        self.gets, self.puts = TransferRate(), TransferRate()
        self.bytes: Counter[str] = Counter()  # moved, by kind of job
        self.ended: Counter[tuple[str, str]] = Counter()  # jobs, by kind and why
        self.sheds: Counter[str] = Counter()  # not accepted, by kind and why
        self._ranks = ranks
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._jobs: dict[int, _UnderWay] = {}
        self._closed = False
        self._on_end: Callable[[Job, Report], object] = lambda job, report: None

    def start(self, on_end: Callable[[Job, Report], object]) -> None:
        """Begin to take jobs."""
        self._on_end = on_end
        for rank in self._ranks:
            rank.start(self._reported)

    # Facts.

    @property
    def state(self) -> str:
        """The worst of all ranks: see `Rank.state`."""
        states = [rank.state for rank in self._ranks]
        for state in ("refused", "hung", "open", "trying"):
            if state in states:
                return state
        return "closed"

    @property
    def times_tripped(self) -> int:
        """How often a breaker opened."""
        return sum(rank.times_tripped for rank in self._ranks)

    def record_bytes(self, num_pages: int) -> int:
        """Of a slot and so many pages, on one rank."""
        return self.slot_bytes + num_pages * self.page_bytes

    def under_way(self, kind: type[Job]) -> int:
        """Jobs of one kind that are not over."""
        with self._lock:
            return sum(isinstance(one.job, kind) for one in self._jobs.values())

    def stats(self) -> list[BackendStats | None]:
        """Of each rank's store."""
        return [rank.stats() for rank in self._ranks]

    # Jobs.

    def submit(self, job: AnyJob) -> AnyJob | None:
        """Take a job, with a number of its own; None when it is shed."""
        kind = type(job).__name__.lower()
        limit = {Lookup: self.limits.lookups, Get: self.limits.gets, Put: self.limits.puts}[
            type(job)
        ]
        state = self.state
        why = "closed" if self._closed else state if state in ("open", "hung", "refused") else ""
        if not why and self.under_way(type(job)) >= limit:
            why = "busy"
        if why:
            self.sheds[f"{kind}_{why}"] += 1
            return None
        job = replace(job, number=next(self._numbers))
        ranks = self._ranks[:1] if isinstance(job, Lookup) else self._ranks
        self._begin(job, ranks)
        return job

    def cancel(self, number: int) -> None:
        """A job need not be done any more."""
        for rank in self._ranks:
            rank.cancel(number)

    def close(self, timeout: float) -> bool:
        """Take no more jobs and end all others; False when one of them hangs after `timeout` s."""
        self._closed = True
        deadline = time.monotonic() + timeout
        ended = [rank.close(deadline) for rank in self._ranks]  # every one, even after one hangs
        if not all(ended):
            log.warning("a transfer of the %s store hangs; it is left to itself", self.tier)
        return all(ended)

    def _begin(self, job: Job, ranks: Sequence[Rank]) -> None:
        with self._lock:
            self._jobs[job.number] = _UnderWay(job, len(ranks), Report(number=job.number, rank=-1))
        for rank in ranks:
            rank.submit(job)

    def _reported(self, report: Report) -> None:
        """Called by a rank's thread."""
        with self._lock:
            one = self._jobs[report.number]
            so_far = one.report
            one.report = replace(
                so_far,
                why=so_far.why or report.why,
                num_bytes=so_far.num_bytes + report.num_bytes,
                seconds=max(so_far.seconds, report.seconds),
                record=report.record or so_far.record,
            )
            one.missing -= 1
            if one.missing:
                return
            del self._jobs[report.number]
            job, whole = one.job, one.report
            self._count(job, whole)
        if isinstance(job, Get) and whole.why in ("absent", "damaged") and self.num_ranks > 1:
            self._begin(
                Forget(number=next(self._numbers), epoch=job.epoch, record=job.record), self._ranks
            )
        if not isinstance(job, Forget):
            self._on_end(job, whole)

    def _count(self, job: Job, whole: Report) -> None:
        kind = type(job).__name__.lower()
        self.ended[kind, whole.why or "done"] += 1
        self.bytes[kind] += whole.num_bytes
        if isinstance(job, Lookup) and whole.why in ("", "absent"):
            self.gets.answered(whole.seconds)
        if isinstance(job, Get | Put) and not whole.why and whole.num_bytes:
            rate = self.gets if isinstance(job, Get) else self.puts
            rate.moved(whole.num_bytes // self.num_ranks, whole.seconds)
