"""What a store of named byte strings promises; knows nothing of records, states or requests.

A store is a cache: it may lose anything at any moment, and is never a system of record. It never
gives back bytes that were not put under that key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from millpond.errors import Unavailable

Item = tuple[str, memoryview]
"""A key, and the contiguous bytes that are put under it or that shall receive them."""


class StoreUnavailable(Unavailable):
    """The store cannot be reached, is closed or hangs; the caller leaves it alone for a while.

    Once it is raised nothing touches the memory of that call any more, unless `memory_in_use`:
    then a transfer could not be stopped, and its memory may be reused after `close` only.
    """

    def __init__(self, message: str, *, memory_in_use: bool = False) -> None:
        super().__init__(message)
        self.memory_in_use = memory_in_use


@dataclass(frozen=True, slots=True)
class BackendStats:
    """What a store holds, where it knows (None: it does not), and what befell it since it opened.

    `refused` are puts for which there was no room, `evicted` objects dropped to make room,
    `corrupt` objects whose bytes were not those that were put. Bytes count payloads.
    """

    objects: int | None = None
    bytes_held: int | None = None
    capacity: int | None = None
    refused: int = 0
    evicted: int = 0
    corrupt: int = 0


class Backend(Protocol):
    """One store. Every call blocks, for `bound` seconds at most, and may come from any thread.

    Threads of the connector call it, never the engine's thread or the event loop. Every call
    may raise `StoreUnavailable`; what went wrong with one object alone is a False in its place.
    Keys are not empty, views are contiguous bytes and not empty.
    """

    name: str
    bound: float
    """Seconds after which every call has returned or raised."""
    seals: bool
    """Whether it keeps a checksum of key and bytes with each object and compares it at every get:
    then no other checksum is needed."""

    def register(self, memory: memoryview) -> None:
        """Announce a long-lived range that views of later calls will lie in."""

    def put(self, items: Sequence[Item]) -> list[bool]:
        """Store each; True: believed stored, which only a get can prove. A key keeps its bytes.

        An item larger than the whole store is False, as is one for which there is no room now.
        """

    def get(self, items: Sequence[Item]) -> list[bool]:
        """Fill each view; True: all its bytes are those that were put, of exactly that length.

        False: absent, of another length or damaged, and the view then holds anything.
        """

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which keys a get would probably find; an eviction may come between."""

    def remove(self, keys: Sequence[str]) -> None:
        """Forget the keys; those that are absent are no error."""

    def stats(self) -> BackendStats:
        """What it holds and what befell it."""

    def close(self) -> None:
        """Let go of it, twice if need be, after all callers have returned; later calls raise."""
