"""A store in this process's own memory; knows how many bytes it may take, and no other process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from millpond.store.backend import BackendStats, Item, StoreUnavailable
from millpond.store.copying import copy
from millpond.units import human


@dataclass(slots=True)
class _Object:
    data: bytearray
    readers: int = 0


class HostStore:
    """Copies in ordinary memory, at most `capacity` bytes of them, the least recently used go.

    Memory of an object that made room is used again for the next of its size, so that a full
    store takes no fresh pages. Bytes are copied outside the lock: calls wait for each other's
    bookkeeping only.
    """

    name = "host"
    seals = False
    bound = 10.0

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._objects: OrderedDict[str, _Object] = OrderedDict()
        self._held = 0  # bytes of the objects, and of those that are being written
        self._refused = self._evicted = 0
        self._open = True

    def __repr__(self) -> str:
        return f"host memory, {human(self.capacity)}"

    def register(self, memory: memoryview) -> None:
        """Nothing to do."""
        self._check()

    def put(self, items: Sequence[Item]) -> list[bool]:
        """Copy each in, making room by dropping what was used longest ago."""
        return [self._put(key, view) for key, view in items]

    def get(self, items: Sequence[Item]) -> list[bool]:
        """Copy each out."""
        return [self._get(key, view) for key, view in items]

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which are here."""
        with self._lock:
            self._check()
            return [key in self._objects for key in keys]

    def remove(self, keys: Sequence[str]) -> None:
        """Drop them."""
        with self._lock:
            self._check()
            for key in keys:
                found = self._objects.pop(key, None)
                self._held -= len(found.data) if found else 0

    def stats(self) -> BackendStats:
        """All of it is known."""
        with self._lock:
            return BackendStats(
                objects=len(self._objects),
                bytes_held=self._held,
                capacity=self.capacity,
                refused=self._refused,
                evicted=self._evicted,
            )

    def close(self) -> None:
        """Drop everything."""
        with self._lock:
            self._open = False
            self._objects.clear()
            self._held = 0

    def _check(self) -> None:
        if not self._open:
            raise StoreUnavailable("the host store is closed")

    def _put(self, key: str, view: memoryview) -> bool:
        with self._lock:
            self._check()
            if key in self._objects:
                self._objects.move_to_end(key)
                return True
            data = self._make_room(view.nbytes)
            if data is None:
                self._refused += 1
                return False
        fresh = data or bytearray(view.nbytes)
        copy(memoryview(fresh), view)
        with self._lock:
            if not self._open or key in self._objects:  # closed, or another put came first
                self._held -= len(fresh) if self._open else 0
                self._check()
                return True
            self._objects[key] = _Object(fresh)
        return True

    def _make_room(self, size: int) -> bytearray | None:
        """Reserve `size` bytes: None if there is no room, else memory of that size or of none."""
        if size > self.capacity:
            return None
        spare = bytearray()
        while self._held + size > self.capacity:
            if not self._objects:
                return None  # the rest is being written
            _, oldest = self._objects.popitem(last=False)
            self._held -= len(oldest.data)
            self._evicted += 1
            if len(oldest.data) == size and not oldest.readers:
                spare = oldest.data
        self._held += size
        return spare

    def _get(self, key: str, view: memoryview) -> bool:
        with self._lock:
            self._check()
            found = self._objects.get(key)
            if found is None or len(found.data) != view.nbytes:
                return False
            self._objects.move_to_end(key)
            found.readers += 1
        try:
            copy(view, memoryview(found.data))
        finally:
            with self._lock:
                found.readers -= 1
        return True
