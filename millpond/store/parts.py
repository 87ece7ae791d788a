"""Objects cut into the pointers and sizes that a transfer library takes; knows no such library.

An object in a store is its bytes and a seal after them: their number and a checksum of key and
bytes. Large ones in registered memory are sent from where they lie, the seal from the stage; small
ones, and those from other memory, are copied to the stage and go in one piece.
"""

from __future__ import annotations

import bisect
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from millpond.errors import Broken
from millpond.store.backend import Item
from millpond.store.copying import copy, octets
from millpond.units import KIB, MIB

STAGE = 2 * MIB  # bytes of staging for one batch
SMALL = 64 * KIB  # bytes up to which copying is cheaper than one more piece
PIECES = 8  # of one batch: when a peer hangs, pieces time out one after another
SEAL = struct.Struct("<4sIQ")  # magic, checksum, bytes of the payload
MAGIC = b"MPS1"


class Ranges:
    """Registered memory, which is kept alive as long as this is; iterates (address, bytes)."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._arrays: list[Any] = []

    def add(self, memory: memoryview) -> tuple[int, int]:
        """(address, bytes) of the new range. `Broken` if it overlaps another."""
        array = octets(memory)
        start, size = array.ctypes.data, array.nbytes
        at = bisect.bisect(self._starts, start)
        before = at > 0 and self._starts[at - 1] + self._arrays[at - 1].nbytes > start
        if before or (at < len(self._starts) and start + size > self._starts[at]):
            raise Broken("memory was registered twice")
        self._starts.insert(at, start)
        self._arrays.insert(at, array)
        return start, size

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((s, a.nbytes) for s, a in zip(self._starts, self._arrays, strict=True))

    def hold(self, address: int, size: int) -> bool:
        """Whether all these bytes lie in one range."""
        at = bisect.bisect(self._starts, address) - 1
        return at >= 0 and address + size <= self._starts[at] + self._arrays[at].nbytes


class Batch:
    """Some objects, as few pieces as a call may have. `pointers` and `sizes` are per object."""

    def __init__(self, stage: Any) -> None:
        self.keys: list[str] = []
        self.pointers: list[list[int]] = []
        self.sizes: list[list[int]] = []
        self._views: list[memoryview] = []
        self._places: list[int] = []  # where in the stage the seal lies
        self._stage: memoryview = stage.data
        self._address = stage.ctypes.data
        self._used = self._pieces = 0

    def add(self, key: str, view: memoryview, ranges: Ranges) -> bool:
        """Take one more; False if it is to be in the next batch."""
        address, size = octets(view).ctypes.data, view.nbytes
        in_place = size > SMALL and ranges.hold(address, size)
        need, pieces = (SEAL.size, 2) if in_place else (size + SEAL.size, 1)
        if need > len(self._stage):
            raise Broken(f"{size} bytes are put or got from memory that was never registered")
        if self._used + need > len(self._stage) or self._pieces + pieces > PIECES:
            return False
        place = self._address + self._used
        self.keys.append(key)
        self.pointers.append([address, place] if in_place else [place])
        self.sizes.append([size, SEAL.size] if in_place else [need])
        self._views.append(view)
        self._places.append(self._used + need - SEAL.size)
        self._used += need
        self._pieces += pieces
        return True

    def total(self, n: int) -> int:
        """Bytes of an object with its seal."""
        return sum(self.sizes[n])

    def fill(self) -> None:
        """Copy to the stage what goes from there, and every seal."""
        for n, view in enumerate(self._views):
            if len(self.sizes[n]) == 1:
                copy(self._staged(n), view)
            seal = MAGIC, self._checksum(n, view), view.nbytes
            SEAL.pack_into(self._stage, self._places[n], *seal)

    def accept(self, n: int) -> bool:
        """Whether what came is what was put; if so its view holds it."""
        staged, view = len(self.sizes[n]) == 1, self._views[n]
        came = self._staged(n) if staged else view
        seal = SEAL.unpack_from(self._stage, self._places[n])
        if seal != (MAGIC, self._checksum(n, came), view.nbytes):
            return False
        if staged:
            copy(view, came)
        return True

    def _staged(self, n: int) -> memoryview:
        end = self._places[n]
        return self._stage[end - self._views[n].nbytes : end]

    def _checksum(self, n: int, data: memoryview) -> int:
        return zlib.crc32(data, zlib.crc32(self.keys[n].encode()))


def batches(items: Sequence[Item], ranges: Ranges, stage: Any) -> Iterator[Batch]:
    """All items, in order, in batches that use the stage one after another."""
    batch = Batch(stage)
    for key, view in items:
        if not batch.add(key, view, ranges):
            yield batch
            batch = Batch(stage)
            batch.add(key, view, ranges)
    if batch.keys:
        yield batch
