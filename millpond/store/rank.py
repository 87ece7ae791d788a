"""One rank's side of a store: threads that move its bytes, and report each job once.

Knows records, memory and a backend; knows no lease, no request and no other rank's bytes.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from millpond.errors import Refused
from millpond.store.backend import Backend, BackendStats, StoreUnavailable
from millpond.store.door import Door
from millpond.store.jobs import Epoch, Forget, Get, Job, Lookup, Put, Record, Report
from millpond.store.memory import Parts, RankMemory, batches
from millpond.store.record import PAGE, Keys, Manifest, chain, checksum, manifest_bytes
from millpond.telemetry import logger

log = logger("store")

REMEMBERED_PAGES = 1 << 18
"""Pages put in this generation whose checksums are kept, so as to put each once."""

SEALED = 0
"""In a manifest, in place of a checksum: the store keeps one with the object (`Backend.seals`)."""

FIRST_LOOK, NEXT_LOOKS = 32, 256
"""Ends asked for at once, deepest first: a conversation that goes on is found in the first."""


class _Failed(Exception):
    """A job ends here, for this reason."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class RankStore:
    """Works off jobs in three lanes, each with a thread: lookups wait for no get, gets for no put.

    A lookup finds what every rank has. `report` is called from the threads, once for every job.
    """

    def __init__(
        self,
        rank: int,
        memory: RankMemory,
        door: Door,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.rank = rank
        self._memory = memory
        self._door = door
        self._clock = clock
        self._report: Callable[[Report], object] = lambda report: None
        self._wanted: set[int] = set()  # numbers of jobs that are neither over nor cancelled
        self._sums: OrderedDict[bytes, int] = OrderedDict()  # of pages put in this generation
        self._generation = b""
        lookups, gets, puts = (_Lane(f"{rank}-{name}") for name in ("lookup", "get", "put"))
        self._lanes = (lookups, gets, puts)
        self._lane_of = {Lookup: lookups, Get: gets, Put: puts, Forget: puts}

    def start(self, report: Callable[[Report], object]) -> None:
        """Begin to work, and to report."""
        self._report = report
        for lane in self._lanes:
            lane.start()

    @property
    def state(self) -> str:
        """Of the breaker: see `Door.state`."""
        return self._door.state

    @property
    def times_tripped(self) -> int:
        """How often the breaker opened."""
        return self._door.times_tripped

    def stats(self) -> BackendStats | None:
        """Of the store, where it is open."""
        return self._door.stats()

    def submit(self, job: Job) -> None:
        """Queue a job; returns at once. It is reported whatever becomes of it."""
        self._wanted.add(job.number)
        self._enqueue(job)

    def cancel(self, number: int) -> None:
        """A job need not be done any more; it ends as soon as it can, and is reported.

        Jobs that are over, and those of other ranks, are ignored.
        """
        self._wanted.discard(number)

    def close(self, deadline: float) -> bool:
        """End the threads and the backend by `deadline` (`time.monotonic`); False: one hangs."""
        for lane in self._lanes:
            lane.stop()
        ended = [lane.join(deadline) for lane in self._lanes]
        return all(ended) and self._door.close()

    def _enqueue(self, job: Job) -> None:
        self._lane_of[type(job)].submit(lambda: self._work(job))

    def _work(self, job: Job) -> None:
        begin, record, moved, why = self._clock(), None, 0, ""
        try:
            with self._door.enter() as backend:
                begin = self._clock()
                try:
                    self._check(job)
                    match job:
                        case Lookup():
                            record = self._lookup(backend, job)
                        case Put():
                            moved = self._put(backend, job)
                        case Get():
                            moved = self._get(backend, job)
                        case Forget():
                            self._forget(backend, job)
                except _Failed as failed:
                    why = failed.why
        except (StoreUnavailable, Refused):
            why = "unavailable"
        except Exception:
            log.exception("a transfer failed")
            why = "error"
        self._wanted.discard(job.number)
        self._report(
            Report(
                number=job.number,
                rank=self.rank,
                why=why,
                num_bytes=moved,
                seconds=self._clock() - begin,
                record=record,
            )
        )

    def _check(self, job: Job) -> None:
        if job.number not in self._wanted:
            raise _Failed("cancelled")

    # The three jobs.

    def _lookup(self, backend: Backend, job: Lookup) -> Record:
        digests = chain(job.root, job.tokens, job.limit)
        ends = [end for end in range(len(digests) * PAGE, job.floor, -PAGE) if end % job.step == 0]
        at, count = 0, FIRST_LOOK
        while at < len(ends):
            self._check(job)
            some = ends[at : at + count]
            at, count = at + count, NEXT_LOOKS
            whole = [True] * len(some)
            for namespace in job.epoch.namespaces:
                keys = Keys(namespace)
                there = backend.exists([keys.manifest(digests[end // PAGE - 1]) for end in some])
                whole = [have and more for have, more in zip(whole, there, strict=True)]
            for end in (end for end, have in zip(some, whole, strict=True) if have):
                manifest = self._manifest(backend, digests[end // PAGE - 1], end, job.epoch)
                if manifest is not None:
                    return Record(tuple(digests[: end // PAGE]), manifest)
                backend.remove([self._keys(job.epoch).manifest(digests[end // PAGE - 1])])
        raise _Failed("absent")

    def _put(self, backend: Backend, job: Put) -> int:
        end, keys = len(job.tokens) // 4, self._keys(job.epoch)
        digests = chain(job.root, job.tokens, end)
        digest = digests[-1]
        if self._manifest(backend, digest, end, job.epoch) is not None:
            raise _Failed("present")
        generation = job.epoch.generation
        if generation != self._generation:
            self._generation = generation
            self._sums.clear()
        missing = self._missing(backend, digests, job)
        todo = Parts(job.parts.slot, tuple(job.parts.pages[at] for at in missing))
        names = [keys.state(digest, generation)]
        names += [keys.page(digests[at], generation) for at in missing]
        sums: list[int] = []
        moved = 0
        for batch in batches(self._memory, todo):
            self._check(job)
            with self._memory.reading(batch) as views:
                sums += [SEALED if backend.seals else checksum(view) for view in views]
                some = names[len(sums) - len(views) : len(sums)]
                stored = backend.put(list(zip(some, views, strict=True)))
                moved += sum(view.nbytes for view in views)
            if not all(stored):
                raise _Failed("full")
        for at, value in zip(missing, sums[1:], strict=True):
            self._sums[digests[at]] = value
        manifest = Manifest(
            namespace=keys.namespace,
            digest=digest,
            generation=generation,
            put=job.number,
            end=end,
            slot_bytes=self._memory.slot_bytes,
            page_bytes=self._memory.page_bytes,
            began=job.began,
            kind=job.kind,
            sums=(sums[0], *(self._sums[link] for link in digests)),
        )
        while len(self._sums) > REMEMBERED_PAGES:
            self._sums.popitem(last=False)
        self._check(job)
        packed = memoryview(bytearray(manifest.pack()))
        if not backend.put([(keys.manifest(digest), packed)])[0]:
            raise _Failed("full")
        return moved + packed.nbytes

    def _missing(self, backend: Backend, digests: Sequence[bytes], job: Put) -> list[int]:
        """Which pages the store has not got in this generation; nobody else puts any of it."""
        known = [at for at, link in enumerate(digests) if link in self._sums]
        names = [self._keys(job.epoch).page(digests[at], self._generation) for at in known]
        gone = set()
        if names:
            there = backend.exists(names)
            gone = {at for at, have in zip(known, there, strict=True) if not have}
        for at in known:
            self._sums.move_to_end(digests[at])
        return [at for at, link in enumerate(digests) if at in gone or link not in self._sums]

    def _get(self, backend: Backend, job: Get) -> int:
        digests, end, keys = job.record.digests, job.record.end, self._keys(job.epoch)
        manifest = self._manifest(backend, digests[-1], end, job.epoch)
        if manifest is None:
            backend.remove([keys.manifest(digests[-1])])
            raise _Failed("absent")
        if not manifest.is_of(job.record.manifest):
            raise _Failed("absent")
        first = len(digests) - len(job.parts.pages)
        names = [keys.state(digests[-1], manifest.generation)]
        names += [keys.page(link, manifest.generation) for link in digests[first:]]
        sums = [manifest.sums[0], *manifest.sums[1 + first :]]
        moved = at = 0
        for batch in batches(self._memory, job.parts):
            self._check(job)
            with self._memory.writing(batch) as views:
                some = names[at : at + len(views)]
                there = backend.get(list(zip(some, views, strict=True)))
                if not all(there):
                    gone = [name for name, have in zip(some, there, strict=True) if not have]
                    self._drop(backend, keys, manifest, gone)
                    raise _Failed("absent")
                right = [] if backend.seals else [checksum(view) for view in views]
                if right and right != sums[at : at + len(views)]:
                    pairs = zip(some, right, sums[at : at + len(views)], strict=True)
                    self._drop(backend, keys, manifest, [n for n, a, b in pairs if a != b])
                    raise _Failed("damaged")
                moved += sum(view.nbytes for view in views)
                at += len(views)
        return moved

    def _forget(self, backend: Backend, job: Forget) -> None:
        # Whatever its generation: where ranks hold different ones, none is of use.
        self._drop(backend, self._keys(job.epoch), job.record.manifest, ())

    # Manifests.

    def _manifest(self, backend: Backend, digest: bytes, end: int, epoch: Epoch) -> Manifest | None:
        """This rank's manifest of a record; one that does not count makes room for another.

        One of the wrong length looks like none here, and is removed by whoever saw that it exists.
        """
        keys = self._keys(epoch)
        key = keys.manifest(digest)
        data = memoryview(bytearray(manifest_bytes(end)))
        if not backend.get([(key, data)])[0]:
            return None
        found = Manifest.unpack(data, keys.namespace, digest)
        sizes = (self._memory.slot_bytes, self._memory.page_bytes)
        if (
            found is not None
            and (found.slot_bytes, found.page_bytes) == sizes
            and found.end == end
            and epoch.covers(found)
        ):
            return found
        backend.remove([key])
        return None

    def _drop(self, backend: Backend, keys: Keys, manifest: Manifest, bad: Sequence[str]) -> None:
        """A record is not whole: nobody shall try it again."""
        state = keys.state(manifest.digest, manifest.generation)
        backend.remove([keys.manifest(manifest.digest), state, *bad])

    def _keys(self, epoch: Epoch) -> Keys:
        return Keys(epoch.namespaces[self.rank])


class _Lane:
    """One thread and what it has to do, in order."""

    def __init__(self, name: str) -> None:
        self._todo: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(
            target=self._run, name=f"millpond-store-{name}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def submit(self, do: Callable[[], None]) -> None:
        with self._changed:
            self._todo.append(do)
            self._changed.notify()

    def stop(self) -> None:
        """End once everything is done."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self, deadline: float) -> bool:
        if self._thread.ident is None:
            return True
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._todo or self._stopping)
                if not self._todo:
                    return
                do = self._todo.popleft()
            do()
