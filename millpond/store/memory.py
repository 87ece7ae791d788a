"""The bytes of one rank's slots and pages, as a store may reach them; knows no tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from millpond.state.lease import PageId, SlotId


@dataclass(frozen=True, slots=True)
class Parts:
    """Some of what lies in a rank's arenas: a slot, or none, and pages in their order."""

    slot: SlotId | None
    pages: tuple[PageId, ...]


class RankMemory(Protocol):
    """Lends slots and pages of one rank to whoever holds the leases. Called from worker threads.

    Views come in the order slot, pages. Where the arenas cannot be reached by a store, they are
    views of a staging area of `batch_bytes` bytes, which bounds what may be lent at once.
    """

    slot_bytes: int
    page_bytes: int
    batch_bytes: int | None

    def regions(self) -> Sequence[memoryview]:
        """The long-lived ranges that views lie in."""

    def reading(self, parts: Parts) -> AbstractContextManager[list[memoryview]]:
        """Their bytes, to be read until it is left."""

    def writing(self, parts: Parts) -> AbstractContextManager[list[memoryview]]:
        """Views to fill; once it is left without an error, what they hold is in the arenas."""


class HostMemory:
    """Arenas in ordinary memory: entries are lent where they lie, no byte is staged.

    `slots` and `pages` are writable bytes of whole arenas, entry-major.
    """

    batch_bytes: int | None = None

    def __init__(
        self, slots: memoryview, slot_bytes: int, pages: memoryview, page_bytes: int
    ) -> None:
        self.slot_bytes = slot_bytes
        self.page_bytes = page_bytes
        self._slots = slots
        self._pages = pages

    def regions(self) -> Sequence[memoryview]:
        """Both arenas."""
        return [self._slots, self._pages]

    @contextmanager
    def reading(self, parts: Parts) -> Iterator[list[memoryview]]:
        """Views of the arenas."""
        yield self._views(parts)

    @contextmanager
    def writing(self, parts: Parts) -> Iterator[list[memoryview]]:
        """Views of the arenas."""
        yield self._views(parts)

    def _views(self, parts: Parts) -> list[memoryview]:
        views = [] if parts.slot is None else [_entry(self._slots, parts.slot, self.slot_bytes)]
        return views + [_entry(self._pages, page, self.page_bytes) for page in parts.pages]


def _entry(arena: memoryview, index: int, size: int) -> memoryview:
    if index < 0 or (index + 1) * size > arena.nbytes:
        raise IndexError(f"entry {index} of {size} bytes lies outside {arena.nbytes} bytes")
    return arena[index * size : (index + 1) * size]


def batches(memory: RankMemory, parts: Parts) -> Iterator[Parts]:
    """The same parts in runs that may be lent at once: all of them, where nothing is staged."""
    limit = memory.batch_bytes
    if limit is None:
        yield parts
        return
    slot = parts.slot
    pages: list[PageId] = []
    room = limit - (0 if slot is None else memory.slot_bytes)
    for page in parts.pages:
        if room < memory.page_bytes and (pages or slot is not None):
            yield Parts(slot, tuple(pages))
            slot, pages, room = None, [], limit
        pages.append(page)
        room -= memory.page_bytes
    if pages or slot is not None:
        yield Parts(slot, tuple(pages))
