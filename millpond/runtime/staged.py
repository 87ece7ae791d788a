"""Slots and pages on a device, as a store reaches them: through one pinned ring in host memory.

Knows arenas and copies; does not know who moves bytes, nor when. A record is lent in batches that
fit the ring's area for that direction, so that neither direction waits for the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from millpond.errors import Refused
from millpond.memory.arena import Arena
from millpond.memory.pinned import page_locked
from millpond.state.lease import PageId
from millpond.store.memory import Parts
from millpond.units import MIB, human

PAGES_AT_ONCE = 64 * MIB
"""Room for pages in an area, beside a slot: enough for copies to run at full speed."""


class StagedMemory:
    """Satisfies `millpond.store.memory.RankMemory` for arenas on any device.

    What `reading` lends was copied from the arenas before; what `writing` lends is copied to them
    when it is left without an error. Both copies are over when the call returns: whoever holds the
    leases until then may reuse slots, pages and ring. Copies run beside the forwards, on a stream
    of their own; entries must not be written by a forward meanwhile, as the leases say.
    """

    def __init__(self, slots: Arena, pages: Arena, *, batch_bytes: int | None = None) -> None:
        """`batch_bytes`, of one area, default to a slot and `PAGES_AT_ONCE`; at least one entry.

        Raises `Refused` where they are less than that, or the host cannot give them.
        """
        self.slot_bytes, self.page_bytes = slots.spec.num_bytes, pages.spec.num_bytes
        room = max(self.page_bytes, min(PAGES_AT_ONCE, pages.count * self.page_bytes))
        size = self.slot_bytes + room if batch_bytes is None else batch_bytes
        if size < max(self.slot_bytes, self.page_bytes):
            raise Refused(
                f"store_staging: each of two areas of {human(size)} must hold a slot"
                f" ({human(self.slot_bytes)}) or a page ({human(self.page_bytes)}): use at least"
                f" {human(2 * max(self.slot_bytes, self.page_bytes))}"
            )
        self._size = size
        self.batch_bytes: int | None = size
        self._slots, self._pages = slots.storage, pages.storage
        self._device = slots.storage.device
        on_gpu = self._device.type == "cuda"
        ring = self._page_locked(2 * size) if on_gpu else torch.empty(2 * size, dtype=torch.uint8)
        ring = ring.zero_().view(2, size)
        self._ring = ring.numpy().reshape(-1).data
        self._areas = tuple(ring.unbind(0))
        self._locks = (threading.Lock(), threading.Lock())
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None

    def _page_locked(self, num_bytes: int) -> torch.Tensor:
        least = max(self.slot_bytes, self.page_bytes)
        if num_bytes > 2 * least:
            remedy = f"lower store_staging, of which this model needs {human(2 * least)} at least"
        else:
            remedy = "a store needs that much for this model: free host memory, or leave it out"
        return page_locked(num_bytes, "what goes between the GPU and a store", remedy)

    def regions(self) -> Sequence[memoryview]:
        """The ring: views never lie elsewhere."""
        return [self._ring]

    @contextmanager
    def reading(self, parts: Parts) -> Iterator[list[memoryview]]:
        """Copies of the entries."""
        area = self._areas[0]
        with self._locks[0]:
            self._copy(parts, area, to_arenas=False)
            yield self._views(parts, area)

    @contextmanager
    def writing(self, parts: Parts) -> Iterator[list[memoryview]]:
        """Room for the entries, copied to them in the end."""
        area = self._areas[1]
        with self._locks[1]:
            yield self._views(parts, area)
            self._copy(parts, area, to_arenas=True)

    def _views(self, parts: Parts, area: torch.Tensor) -> list[memoryview]:
        sizes = [] if parts.slot is None else [self.slot_bytes]
        sizes += [self.page_bytes] * len(parts.pages)
        self._check(sum(sizes))
        lent, at = area.numpy().data, 0
        views = []
        for size in sizes:
            views.append(lent[at : at + size])
            at += size
        return views

    def _copy(self, parts: Parts, area: torch.Tensor, *, to_arenas: bool) -> None:
        """Every entry between ring and arenas; the slot comes first. Returns when all is there."""
        pieces: list[torch.Tensor] = []
        if parts.slot is not None:
            pieces.append(self._entries(self._slots, parts.slot, 1))
        pieces += [self._entries(self._pages, page, count) for page, count in _runs(parts.pages)]
        self._check(sum(piece.numel() for piece in pieces))
        with torch.cuda.stream(self._stream):
            at = 0
            for piece in pieces:
                staged = area[at : at + piece.numel()].view(piece.shape)
                into, source = (piece, staged) if to_arenas else (staged, piece)
                into.copy_(source, non_blocking=True)
                at += piece.numel()
        if self._stream is not None:
            self._stream.synchronize()

    def _entries(self, storage: torch.Tensor, first: int, count: int) -> torch.Tensor:
        if first < 0 or first + count > storage.shape[0]:
            raise IndexError(f"entries {first}.. of {storage.shape[0]} are lent to a store")
        return storage[first : first + count]

    def _check(self, wanted: int) -> None:
        if wanted > self._size:
            raise ValueError(f"{wanted} bytes are lent at once, a batch has {self._size}")


def _runs(pages: Sequence[PageId]) -> Iterator[tuple[int, int]]:
    """Neighbours in both the arena and the list, as (first page, count): one copy each."""
    first = count = 0
    for page in pages:
        if count and page == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = page, 1
    if count:
        yield first, count
