"""A host tower with a store beyond it, whose transfers happen when a test says so."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from millpond.engine.loop import Engine
from millpond.engine.tiers import Store
from millpond.plan.step import PAGE_SIZE
from millpond.store.backend import Backend
from millpond.store.connector import Connector, Limits
from millpond.store.door import Door
from millpond.store.identity import Identity
from millpond.store.jobs import Forget, Job, Report
from millpond.store.memory import Parts
from millpond.store.rank import RankStore
from tests.store.worlds import ScriptedStore, Shelf, identity
from tests.support.symbolic import SymbolicExecutor
from tests.support.towers import Tower

TOKENS = 1022  # that a slot holds at most
EMPTY = -(1 << 63)


class SymbolicMemory:
    """One rank's share of the symbolic slots and pages: every `num_ranks`-th word of their bytes.

    What a rank wrote alone leaves a state that nobody can read; `halves` are the bytes of such.
    """

    def __init__(
        self,
        executor: SymbolicExecutor,
        rank: int,
        num_ranks: int,
        batch: int | None,
        halves: dict[int, tuple[Any, bytes]],
    ) -> None:
        self.executor = executor
        self.halves = halves
        self.rank, self.num_ranks = rank, num_ranks
        self.slot_bytes = 4 * (TOKENS + 2) // num_ranks
        self.page_bytes = 8 * PAGE_SIZE // num_ranks
        self.batch_bytes = None if batch is None else batch * self.page_bytes + self.slot_bytes

    def regions(self) -> Sequence[memoryview]:
        return []

    @contextmanager
    def reading(self, parts: Parts) -> Iterator[list[memoryview]]:
        yield [memoryview(bytearray(self._share(data))) for data in self._packed(parts)]

    @contextmanager
    def writing(self, parts: Parts) -> Iterator[list[memoryview]]:
        whole = [bytearray(data) for data in self._packed(parts)]
        views = [bytearray(len(self._share(data))) for data in whole]
        try:
            yield [memoryview(view) for view in views]
        finally:
            for data, view in zip(whole, views, strict=True):
                words = memoryview(data).cast("q")
                for at, word in enumerate(memoryview(view).cast("q")):
                    words[self.rank + at * self.num_ranks] = word
            if parts.slot is not None:
                data = whole.pop(0)
                state = _unpack_state(data)
                self.executor.slots[parts.slot] = state
                if state is not None and _pack_state(state) != data:
                    self.halves[parts.slot] = (state, bytes(data))
            for page, data in zip(parts.pages, whole, strict=True):
                entries = struct.unpack(f"<{PAGE_SIZE}q", data)
                self.executor.pages[page] = [None if e == EMPTY else e for e in entries]

    def _packed(self, parts: Parts) -> list[bytes]:
        found = []
        if parts.slot is not None:
            state = self.executor.slots[parts.slot]
            half, data = self.halves.get(parts.slot, (None, b""))
            found.append(data if state is not None and half is state else _pack_state(state))
        for page in parts.pages:
            entries = [EMPTY if e is None else e for e in self.executor.pages[page]]
            found.append(struct.pack(f"<{PAGE_SIZE}q", *entries))
        return found

    def _share(self, data: bytes) -> bytes:
        words = memoryview(bytes(data)).cast("q")
        mine = words.tolist()[self.rank :: self.num_ranks]
        return struct.pack(f"<{len(mine)}q", *mine)


def _pack_state(state: tuple[int, ...] | None) -> bytes:
    tokens = () if state is None else state
    words = [-1 if state is None else len(tokens), 0, *tokens]
    return struct.pack(f"<{TOKENS + 2}i", *words, *[0] * (TOKENS + 2 - len(words)))


def _unpack_state(data: bytes) -> tuple[int, ...] | None:
    count, _, *tokens = struct.unpack(f"<{TOKENS + 2}i", data)
    if count == -1 and not any(tokens):
        return None
    return tuple(tokens[:count] if 0 <= count <= TOKENS else tokens[:1])


class SteppedRank(RankStore):
    """Does its jobs when told to, in the caller's thread."""

    todo: list[Job]

    def start(self, report: Callable[[Report], object]) -> None:
        self._report, self.todo = report, []

    def _enqueue(self, job: Job) -> None:
        self.todo.append(job)

    def do(self, which: int = 0) -> bool:
        """One of its jobs, the oldest first unless told otherwise; False when there is none."""
        if not self.todo:
            return False
        self._work(self.todo.pop(which % len(self.todo)))
        return True

    def close(self, deadline: float) -> bool:
        while self.do():
            pass
        return self._door.close()


class StoredTower(Tower):
    """A tower with `num_ranks` ranks, each with a scripted store over one shelf.

    Time stands still but where a test moves `now`, or everybody waits. `eager` transfers happen
    before every step; while it `hangs` none happen by themselves.
    """

    def __init__(
        self,
        shelf: Shelf | None = None,
        *,
        num_ranks: int = 1,
        eager: bool = True,
        batch: int | None = None,
        who: Identity | None = None,
        limits: Limits | None = None,
        backend: Callable[[], Backend] | None = None,
        role: Any = "kv_both",
        **numbers: Any,
    ) -> None:
        self.shelf = shelf or Shelf()
        self.stores = [ScriptedStore(self.shelf) for _ in range(num_ranks)]
        self.eager, self.hangs, self.now = eager, False, 0.0
        self._batch, self._who, self._limits = batch, who or identity(tp_size=num_ranks), limits
        self._backend, self._role = backend, role
        given = {"session_len": 1000, "num_slots": 14, "num_pages": 80}
        super().__init__(**{**given, **numbers})

    def _open(self) -> Engine:
        self.ranks: list[SteppedRank] = []
        halves: dict[int, tuple[Any, bytes]] = {}
        for rank, store in enumerate(self.stores):
            memory = SymbolicMemory(self.executor, rank, len(self.stores), self._batch, halves)
            opener = self._backend or (lambda store=store: store)
            door = Door(opener, (), retry_after=5.0, clock=lambda: self.now)
            self.ranks.append(SteppedRank(rank, memory, door, clock=lambda: self.now))
        connector = Connector(self.ranks, self.ranks[0]._memory, "scripted", self._limits)
        names = tuple(self._who.namespace(rank) for rank in range(len(self.ranks)))
        store = Store(connector=connector, namespaces=names, role=self._role)
        engine = Engine(self.settings, self.executor, clock=lambda: self.now, store=store)
        self.tiers = engine._tiers
        self.tiers.wait = self._let_time_pass
        return engine

    def step(self) -> bool:
        if self.eager:
            self.settle()
        return super().step()

    def settle(self) -> None:
        """All transfers, to their end."""
        while any(rank.todo for rank in self.ranks):
            for rank in self.ranks:
                rank.do()

    def under_way(self, kind: type[Job]) -> int:
        """Jobs of a kind that are not done, on all ranks."""
        return sum(isinstance(job, kind) for rank in self.ranks for job in rank.todo)

    def assert_nothing_is_held(self) -> None:
        self.settle()
        self.engine._read_inbox()
        assert not self.tiers.transfers.leases
        assert not self.tiers._waits
        assert not self.tiers._gets
        assert not self.tiers.storing._puts
        super().assert_nothing_is_held()

    def _let_time_pass(self) -> bool:
        """Everybody waits: a transfer ends, or somebody's patience does."""
        if not self.hangs and any(rank.do() for rank in self.ranks):
            return True
        patience = self.tiers.patience()
        self.now += patience or 0.0
        return patience is not None


__all__ = ["Forget", "Shelf", "StoredTower", "SymbolicMemory"]
