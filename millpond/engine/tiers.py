"""What an engine keeps beyond its own slots: when to store, when to look, and who waits for it.

Called by the engine's thread alone, and never waits for a store. Knows the ledger and sequences;
how bytes move is the connector's business.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import gcd
from typing import Literal, Protocol

from millpond.engine.admission import find_start
from millpond.engine.ledger import Ledger
from millpond.engine.request import Sequence
from millpond.engine.storing import Storing, root_of
from millpond.engine.transfers import Holding, Transfers
from millpond.engine.types import StoreStats
from millpond.plan.step import PAGE_SIZE, Capabilities
from millpond.state.lease import PageId, SlotId
from millpond.state.prefix import PrefixMatch
from millpond.store.connector import Connector
from millpond.store.jobs import Epoch, Get, Job, Lookup, Put, Record, Report
from millpond.store.record import pack_tokens

LOOKUP_PATIENCE = 0.05
"""Seconds for which a request waits to hear whether there is anything, where computing takes as
long: an eighth of what computing takes where that is more."""

Role = Literal["kv_both", "kv_producer", "kv_consumer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """A store for one engine: keys begin with the `namespaces`, one for each rank."""

    connector: Connector
    namespaces: tuple[str, ...]
    role: Role = "kv_both"
    close_seconds: float = 10.0


class Queued(Protocol):
    """What is asked of the scheduler."""

    tiers: DeviceOnly

    def spare(self, slots: Collection[SlotId], pages: Collection[PageId]) -> None:
        """A transfer writes these: nothing else does."""

    def unblock(self) -> None:
        """Something was given back, or can be found."""


@dataclass(eq=False, slots=True)
class Wait:
    """A sequence that is not admitted before `until`: it may start from a record instead.

    Computing tokens `start .. end` takes as long as it may wait.
    """

    sequence: Sequence
    salt: bytes
    start: int
    since: float
    until: float
    number: int  # of the lookup, then of the get
    record: Record | None = None
    loading: bool = False


@dataclass(eq=False, slots=True)
class _Loading:
    """A get under way; it is for whoever asks, not for the request that asked first."""

    job: Get
    holding: Holding
    salt: bytes
    tokens: bytes
    epoch: int
    waits: list[Wait] = field(default_factory=list)


class DeviceOnly:
    """No store: what is asked for in passing is nothing."""

    def asked(self, sequence: Sequence) -> None:
        """A request came."""

    def holds(self, sequence: Sequence) -> bool:
        """Whether it has to wait."""
        del sequence
        return False

    def left(self, sequence: Sequence) -> None:
        """A request waits no longer, whatever for."""

    def admitted(self, sequence: Sequence, match: PrefixMatch) -> int:
        """A request starts from `match`; how many of its tokens came from the store."""
        del sequence, match
        return 0

    @property
    def wants_room(self) -> bool:
        """Whether a record waits for nothing but the end of a step to be loaded."""
        return False

    def new_epoch(self, namespaces: tuple[str, ...] | None = None) -> None:
        """Nothing older may be found."""


class Tiers(DeviceOnly):
    """The device's slots and pages, and one store beyond.

    What is stored is decided in `millpond.engine.storing`.

    **Looked up** is a prompt when its request is queued. What is found is loaded if that is
    expected to take less time than computing it, by rates measured for both, and published when it
    is there. Meanwhile the request waits, but never longer than computing would have taken: then it
    is admitted as if there were nothing, and the record is for the next who asks.
    """

    def __init__(
        self,
        ledger: Ledger,
        scheduler: Queued,
        capabilities: Capabilities,
        store: Store,
        clock: Callable[[], float],
    ) -> None:
        """From here on, ledger and scheduler tell this one what happens."""
        settings, connector, role = ledger.settings, store.connector, store.role
        self._ledger = ledger
        self._connector = connector
        self._unblock = scheduler.unblock
        self._clock = clock
        self.transfers = Transfers(ledger, capabilities, scheduler.spare)
        self._reads = role != "kv_producer" and settings.prefix_caching
        self._step = gcd(settings.smallest_prefix(capabilities), settings.decode_anchor_step)
        self._epoch = Epoch(namespaces=store.namespaces)
        self.storing = Storing(ledger, connector, self.transfers, self._epoch)
        if role == "kv_consumer":
            self.storing.stop()
        self._refused = False
        self._waits: dict[Sequence, Wait] = {}
        self._lookups: dict[int, Wait] = {}
        self._gets: dict[int, _Loading] = {}
        self._from_store: dict[Sequence, int] = {}  # loaded for it, from which end on
        self.ends: Counter[str] = Counter()  # of waits, by reason
        self.waited = 0.0  # seconds, of waits that are over
        self.hit_tokens: Counter[str] = Counter()  # by tier
        self.news = threading.Event()  # something ended since it was last cleared
        self._close_seconds = store.close_seconds
        scheduler.tiers = self
        ledger.on_publish = self.storing.published

    # What the engine tells.

    @property
    def wants_room(self) -> bool:
        """Whether a record waits for nothing but the end of a step to be loaded."""
        waiting = any(one.record is not None and not one.loading for one in self._waits.values())
        return waiting and self._connector.under_way(Get) < self._connector.limits.gets

    def asked(self, sequence: Sequence) -> None:
        """A request came: look for more of its prompt than the device has."""
        ledger, spec = self._ledger, sequence.request.spec
        if not self._reads or self._refused or sequence.request.prompt_logprobs is not None:
            return
        sequence.salt = ledger.salt(spec.cache_salt)
        match = find_start(ledger, sequence)
        limit = (len(sequence.tokens) - 1) // self._step * self._step
        computing = ledger.prefill_rate.seconds(match.end, limit)
        if computing <= self._connector.gets.seconds(self._connector.record_bytes(0)):
            return
        job = self._connector.submit(
            Lookup(
                number=0,
                epoch=self._epoch,
                root=root_of(sequence.salt),
                tokens=pack_tokens(sequence.tokens[:limit]),
                floor=match.end,
                limit=limit,
                step=self._step,
            )
        )
        if job is None:
            return
        now = self._clock()
        patience = max(LOOKUP_PATIENCE, 8 * self._connector.gets.overhead, computing / 8)
        wait = Wait(
            sequence, sequence.salt, match.end, now, now + min(computing, patience), job.number
        )
        self._waits[sequence] = self._lookups[job.number] = wait

    def advance(self) -> None:
        """Between steps: begin what there is room for, and let nobody wait too long."""
        now = self._clock()
        for wait in tuple(self._waits.values()):
            if now >= wait.until:
                self._end(wait, "too_slow")
            elif wait.record is not None and not wait.loading:
                self._load(wait)
        self.storing.advance()

    def ended(self, job: Job, report: Report) -> None:
        """No rank touches the memory of a job any more; called between steps, or before a commit"""
        if isinstance(job, Lookup):
            self._looked_up(job, report)
        elif isinstance(job, Get):
            self._loaded(self._gets.pop(job.number), report)
        elif isinstance(job, Put):
            self.storing.ended(job)
        self._unblock()

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence waits for a record, and still may."""
        wait = self._waits.get(sequence)
        if wait is None:
            return False
        if self._clock() >= wait.until:
            self._end(wait, "too_slow")
            return False
        return True

    def left(self, sequence: Sequence) -> None:
        """A sequence waits no longer; a get under way is finished for others."""
        wait = self._waits.get(sequence)
        if wait is not None:
            self._end(wait, "left")
        self._from_store.pop(sequence, None)

    def admitted(self, sequence: Sequence, match: PrefixMatch) -> int:
        """A sequence starts from `match`: count its tokens where they came from."""
        start = self._from_store.get(sequence, match.end)
        loaded = max(0, match.end - start)
        self.left(sequence)
        if sequence.request.outcome is None:
            self.hit_tokens[self._connector.tier] += loaded
            self.hit_tokens["device"] += match.end - loaded
        return loaded

    def new_epoch(self, namespaces: tuple[str, ...] | None = None) -> None:
        """Nothing stored before is found from here on; what is under way is dropped on arrival.

        Other weights store under `namespaces` of their own; with () they have none, and the store
        is left alone.
        """
        self._refused = namespaces == () or (self._refused and namespaces is None)
        self._epoch = self._epoch.next(time.time(), namespaces or None)
        for number in (*self._lookups, *self._gets):
            self._connector.cancel(number)
        self.storing.new_epoch(self._epoch, refused=self._refused)
        for wait in tuple(self._waits.values()):
            self._end(wait, "epoch")
        self._from_store.clear()

    # Waiting without anything to do.

    def patience(self) -> float | None:
        """Seconds until somebody waits no longer; None when nobody does."""
        if not self._waits:
            return None
        return max(0.0, min(wait.until for wait in self._waits.values()) - self._clock())

    def wait(self) -> bool:
        """Let time pass until something ends or somebody waits no longer; False: nothing will."""
        patience = self.patience()
        if patience is None and not self.transfers.num_slots:
            return False
        self.news.wait(patience)
        self.news.clear()
        return True

    def close(self, *, drain: bool) -> None:
        """End all transfers. Puts under way are finished, for less time without `drain`."""
        self._reads = False
        self.storing.stop()
        for number in (*self._lookups, *self._gets):
            self._connector.cancel(number)
        self._connector.close(self._close_seconds if drain else min(2.0, self._close_seconds))

    def stats(self) -> StoreStats:
        """A snapshot."""
        c = self._connector
        stored = [one for one in c.stats() if one is not None]
        held = [one.bytes_held for one in stored if one.bytes_held is not None]
        return StoreStats(
            tier=c.tier,
            breaker=c.state,
            breaker_trips=c.times_tripped,
            jobs={f"{kind}_{why}": number for (kind, why), number in tuple(c.ended.items())},
            sheds=dict(c.sheds),
            moved_bytes=dict(c.bytes),
            get_rate=c.gets.bytes_per_second,
            put_rate=c.puts.bytes_per_second,
            waits=dict(self.ends),
            waited_seconds=self.waited,
            waiting=len(self._waits),
            hit_tokens=dict(self.hit_tokens),
            slots_held=self.transfers.num_slots,
            pages_held=self.transfers.num_pages,
            bytes_held=sum(held) if held else None,
        )

    # Loading.

    def _looked_up(self, job: Lookup, report: Report) -> None:
        wait = self._lookups.pop(job.number)
        if self._waits.get(wait.sequence) is not wait:
            return
        if report.record is None:
            self._end(wait, "absent" if report.why == "absent" else "failed")
            return
        wait.record = report.record
        computing = self._ledger.prefill_rate.seconds(wait.start, report.record.end)
        wait.until = wait.since + computing

    def _load(self, wait: Wait) -> None:
        """Begin to fill a slot with what was found for a sequence, if that is still of use."""
        record, ledger = wait.record, self._ledger
        if record is None:
            return
        same = next((one for one in self._gets.values() if _is_of(one, record, wait.salt)), None)
        if same is not None:
            wait.loading = True
            same.waits.append(wait)
            return
        match = find_start(ledger, wait.sequence)
        if match.end >= record.end:
            self._end(wait, "found_on_device")
            return
        tokens = wait.sequence.tokens[: record.end]
        known = ledger.index.pages_of(tokens, wait.salt, record.end)
        fresh = record.end // PAGE_SIZE - len(known)
        loading = self._connector.gets.seconds(self._connector.record_bytes(fresh))
        if loading >= ledger.prefill_rate.seconds(match.end, record.end):
            self._end(wait, "slower_than_computing")
            return
        if self._connector.under_way(Get) >= self._connector.limits.gets:
            return  # until one is over, or it has waited too long
        if not self.transfers.has_room(record.end // PAGE_SIZE):
            return
        name = f"get {wait.sequence.name}"
        holding = self.transfers.receive(known, fresh, match.checkpoint, name)
        if holding is None:
            self._end(wait, "no_room")
            return
        job = self._connector.submit(
            Get(number=0, epoch=self._epoch, record=record, parts=holding.parts)
        )
        if job is None:
            self.transfers.release(holding)
            self._end(wait, "failed")
            return
        wait.loading = True
        self._gets[job.number] = _Loading(
            job, holding, wait.salt, pack_tokens(tokens), ledger.epoch, [wait]
        )

    def _loaded(self, loading: _Loading, report: Report) -> None:
        """A get is over: publish what it brought, all of it, or give everything back."""
        record, ledger = loading.job.record, self._ledger
        if report.why or loading.epoch != ledger.epoch or self._refused:
            self.transfers.release(loading.holding)
            for wait in loading.waits:
                self._end(wait, "failed")
            return
        lease = self.transfers.hand_over(loading.holding)
        ledger.pool.record_end(lease, record.end)
        tokens = array("i")
        tokens.frombytes(loading.tokens)
        ledger.index_state(
            tokens,
            record.end,
            loading.holding.pages,
            ledger.pool.seal(lease),
            record.manifest.kind,
            loading.salt,
        )
        ledger.pages.release(loading.holding.pages)
        for wait in loading.waits:
            if self._waits.get(wait.sequence) is wait:
                self._from_store[wait.sequence] = wait.start
                self._end(wait, "loaded")

    def _end(self, wait: Wait, why: str) -> None:
        if self._waits.get(wait.sequence) is not wait:
            return
        del self._waits[wait.sequence]
        self.ends[why] += 1
        self.waited += self._clock() - wait.since
        self._unblock()


def _is_of(loading: _Loading, record: Record, salt: bytes) -> bool:
    same = loading.job.record.digests[-1] == record.digests[-1]
    return same and loading.salt == salt
