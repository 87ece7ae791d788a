"""Ranks with memory of their own over one store, and stores that do what a test tells them."""

from __future__ import annotations

import queue
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from millpond.state.checkpoint import AnchorKind
from millpond.state.lease import PageId, SlotId
from millpond.store.backend import Backend, BackendStats, Item, StoreUnavailable
from millpond.store.connector import Connector, Limits
from millpond.store.door import Door
from millpond.store.identity import Identity
from millpond.store.jobs import Epoch, Get, Job, Lookup, Put, Report
from millpond.store.memory import HostMemory, Parts, RankMemory
from millpond.store.rank import RankStore
from millpond.store.record import pack_tokens, record_root

SLOT, PAGE = 96, 40


def identity(**changes: object) -> Identity:
    """Of some model."""
    given: dict = dict(
        model="m",
        draft="",
        dtype="float32",
        state_dtype="float32",
        layout="l",
        alignment=64,
        kernels="torch",
    )
    return Identity(**{**given, **changes})


class Shelf:
    """What several `ScriptedStore` share: objects, and calls counted by kind."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.calls: Counter[str] = Counter()
        self.open_stores = 0


class ScriptedStore:
    """A store in a dictionary, with a script: what happens before each call.

    `before(name, keys)` may raise, wait, or change the objects. `refuse(key)` says which puts find
    no room.
    """

    name = "scripted"
    seals = False
    bound = 30.0

    def __init__(self, shelf: Shelf | None = None) -> None:
        self.shelf = shelf or Shelf()
        self.before: Callable[[str, Sequence[str]], object] = lambda name, keys: None
        self.refuse: Callable[[str], bool] = lambda key: False
        self.registered: list[memoryview] = []
        self.closed = False
        self.threads: set[str] = set()

    @property
    def objects(self) -> dict[str, bytes]:
        return self.shelf.objects

    def _call(self, name: str, keys: Sequence[str]) -> None:
        self.threads.add(threading.current_thread().name)
        self.shelf.calls[name] += 1
        if self.closed:
            raise StoreUnavailable("closed")
        self.before(name, keys)

    def register(self, memory: memoryview) -> None:
        self.registered.append(memory)

    def put(self, items: Sequence[Item]) -> list[bool]:
        self._call("put", [key for key, _ in items])
        done = []
        for key, view in items:
            done.append(not self.refuse(key))
            if done[-1]:
                self.objects.setdefault(key, bytes(view))
        return done

    def get(self, items: Sequence[Item]) -> list[bool]:
        self._call("get", [key for key, _ in items])
        done = []
        for key, view in items:
            found = self.objects.get(key)
            done.append(found is not None and len(found) == len(view))
            view[:] = found if done[-1] else b"\xee" * len(view)  # a failed get leaves anything
        return done

    def exists(self, keys: Sequence[str]) -> list[bool]:
        self._call("exists", keys)
        return [key in self.objects for key in keys]

    def remove(self, keys: Sequence[str]) -> None:
        self._call("remove", keys)
        for key in keys:
            self.objects.pop(key, None)

    def stats(self) -> BackendStats:
        return BackendStats(objects=len(self.objects))

    def close(self) -> None:
        self.closed = True


def arenas(slots: int = 6, pages: int = 12, seed: int = 0) -> HostMemory:
    """Random bytes."""
    dice = random.Random(seed)
    return HostMemory(
        memoryview(bytearray(dice.randbytes(slots * SLOT))),
        SLOT,
        memoryview(bytearray(dice.randbytes(pages * PAGE))),
        PAGE,
    )


class World:
    """A connector over `num_ranks` ranks and one shelf; jobs are waited for."""

    def __init__(
        self,
        num_ranks: int = 1,
        shelf: Shelf | None = None,
        who: Identity | None = None,
        limits: Limits | None = None,
        seed: int = 0,
        memories: Sequence[RankMemory] | None = None,
        backends: Sequence[Backend] | None = None,
    ) -> None:
        self.shelf = shelf or Shelf()
        who = who or identity(tp_size=num_ranks)
        names = tuple(who.namespace(rank) for rank in range(num_ranks))
        self.epoch = Epoch(namespaces=names)
        self.stores = backends or [ScriptedStore(self.shelf) for _ in range(num_ranks)]
        self.memories = memories or [arenas(seed=seed + rank) for rank in range(num_ranks)]
        self.doors = [
            Door(lambda store=store: store, memory.regions(), retry_after=0.0)
            for store, memory in zip(self.stores, self.memories, strict=True)
        ]
        ranks = [
            RankStore(rank, self.memories[rank], self.doors[rank]) for rank in range(num_ranks)
        ]
        self.connector = Connector(ranks, self.memories[0], "scripted", limits)
        self.ended: queue.SimpleQueue[tuple[Job, Report]] = queue.SimpleQueue()
        self.connector.start(lambda job, report: self.ended.put((job, report)))

    def do(self, job: Lookup | Put | Get) -> Report:
        """The report of a job, when it is over."""
        assert self.connector.submit(job) is not None
        return self.ended.get(timeout=10)[1]

    def put(self, tokens: Sequence[int], slot: int, pages: Sequence[int], **changes) -> Report:
        given = dict(
            number=0,
            epoch=self.epoch,
            root=record_root(cache_salt=""),
            tokens=pack_tokens(tokens),
            parts=parts(slot, pages),
            began=1.0,
            kind=AnchorKind.PROMPT_END,
        )
        return self.do(Put(**{**given, **changes}))

    def lookup(self, tokens: Sequence[int], **changes) -> Report:
        given = dict(
            number=0,
            epoch=self.epoch,
            root=record_root(cache_salt=""),
            tokens=pack_tokens(tokens),
            floor=0,
            limit=len(tokens),
            step=64,
        )
        return self.do(Lookup(**{**given, **changes}))

    def get(self, report: Report, slot: int, pages: Sequence[int]) -> Report:
        assert report.record is not None
        return self.do(
            Get(number=0, epoch=self.epoch, record=report.record, parts=parts(slot, pages))
        )

    def bytes_of(self, slot: int, pages: Sequence[int], rank: int = 0) -> list[bytes]:
        with self.memories[rank].reading(parts(slot, pages)) as views:
            return [bytes(view) for view in views]

    def close(self) -> None:
        assert self.connector.close(10)


def parts(slot: int, pages: Sequence[int]) -> Parts:
    return Parts(SlotId(slot), tuple(PageId(page) for page in pages))
