"""What crosses between host and device in a step, without either waiting for the other.

Knows bytes, where they are staged and when a stage may be used again; does not know what they mean.
On a GPU staged bytes lie in page-locked memory and are copied in the order of the stream; on the
CPU the same code copies plain memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from millpond.memory.pinned import page_locked

FIRST_BYTES = 8 << 20
"""Of a ring when it is made: thousands of steps of decoding, dozens of the largest prompts. What
needs more makes it grow."""

REPORT_BYTES = 64 << 10
"""Of a place where a report lands: one of hundreds of rows. What is larger gets one of its own."""

REPORTS = 3
"""Places made beforehand: page-locking memory in the middle of things would hold up the device."""

ALIGNMENT = 16
"""Bytes; every array begins on a multiple, on both sides."""

DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.uint8): torch.uint8,
}
"""What may be sent."""


class Mark(Protocol):
    """A point in the order of the device's work."""

    def query(self) -> bool:
        """Whether the device is past it."""

    def synchronize(self) -> None:
        """Wait until it is."""


class Link(Protocol):
    """How one device and the host exchange bytes."""

    def stage(self, num_bytes: int) -> torch.Tensor:
        """Host memory uint8 [num_bytes] that the device copies from and to by itself.

        Dropped while a copy is queued, it is not given to anybody else before that is done.
        """

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy in the order of the device's work; the host does not wait."""

    def mark(self) -> Mark:
        """The point after all work queued so far."""


class _Past:
    """A mark of a device that has done all it was told."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class HostLink:
    """The CPU: every copy is done when it returns."""

    def stage(self, num_bytes: int) -> torch.Tensor:
        """Plain memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """At once."""
        target.copy_(source)

    def mark(self) -> Mark:
        """Always past."""
        return _Past()


class CudaLink:
    """One CUDA device, on the stream that is current when a call is made."""

    def stage(self, num_bytes: int) -> torch.Tensor:
        """Page-locked memory; torch's allocator remembers the copies that it is part of.

        Raises `Refused` where there is none.
        """
        return page_locked(num_bytes, "the numbers of a step", "lower max_prefill_token_num")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queued."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        """An event."""
        event = torch.cuda.Event()
        event.record()
        return event


def link_of(device: torch.device) -> Link:
    """The way to `device`."""
    return CudaLink() if device.type == "cuda" else HostLink()


@dataclass(slots=True)
class _Lent:
    """Bytes of the ring that the device may still be reading."""

    begin: int
    end: int
    mark: Mark


class HostRing:
    """Sends arrays to the device: one copy a call, whatever their number and types.

    Bytes are staged one after the other in a ring and used again only once the device is past their
    copy. The host waits for the device where a whole ring of copies is outstanding, and nowhere
    else.
    """

    def __init__(
        self, device: torch.device, *, num_bytes: int = FIRST_BYTES, link: Link | None = None
    ) -> None:
        self.device = device
        self.num_waits = 0  # how often the host had to wait for bytes to come free
        self._link = link or link_of(device)
        self._buffer = self._link.stage(num_bytes)
        self._bytes = self._buffer.numpy()
        self._next = 0
        self._lent: deque[_Lent] = deque()

    def send(self, arrays: Sequence[np.ndarray]) -> tuple[torch.Tensor, ...]:
        """The arrays on the device, of the same shapes and types (see `DTYPES`)."""
        ends = np.cumsum([_padded(a.nbytes) for a in arrays], dtype=np.int64).tolist()
        total = ends[-1] if ends else 0
        there = torch.empty(total, dtype=torch.uint8, device=self.device)
        if total:
            begin = self._take(total)
            for array, end in zip(arrays, ends, strict=True):
                self._write(begin + end - _padded(array.nbytes), array)
            self._give(there, begin, total)
        begins = (0, *ends)
        return tuple(
            there[at : at + array.nbytes].view(DTYPES[array.dtype]).view(array.shape)
            for at, array in zip(begins, arrays, strict=False)
        )

    def integers(self, values: object) -> torch.Tensor:
        """Nested sequences of integers as int64, on the device."""
        return self.send((np.array(values, np.int64),))[0]

    def fill(self, target: torch.Tensor, array: np.ndarray) -> None:
        """Overwrite `target`, contiguous and on the device, by as many bytes of `array`."""
        if target.nbytes != array.nbytes:
            raise ValueError(f"{array.nbytes} bytes do not fill {target.nbytes}")
        begin = self._take(array.nbytes)
        self._write(begin, array)
        self._give(target.view(-1).view(torch.uint8), begin, array.nbytes)

    def _write(self, begin: int, array: np.ndarray) -> None:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._bytes[begin : begin + flat.nbytes] = flat

    def _give(self, target: torch.Tensor, begin: int, num_bytes: int) -> None:
        self._link.copy(target, self._buffer[begin : begin + num_bytes])
        self._lent.append(_Lent(begin, begin + _padded(num_bytes), self._link.mark()))

    def _take(self, num_bytes: int) -> int:
        """Where `num_bytes` may be staged."""
        need = _padded(num_bytes)
        if need > len(self._bytes):
            self._grow(need)
        if self._next + need > len(self._bytes):
            self._next = 0
        begin, end = self._next, self._next + need
        while self._lent and self._lent[0].mark.query():
            self._lent.popleft()
        # The ring is lent in order: what is in the way is found from the oldest on.
        while any(lent.begin < end and begin < lent.end for lent in self._lent):
            self.num_waits += 1
            self._lent.popleft().mark.synchronize()
        self._next = end
        return begin

    def _grow(self, num_bytes: int) -> None:
        """A larger ring. Whoever allocates stages keeps the old one until its copies are done."""
        self._lent.clear()
        self._buffer = self._link.stage(1 << (num_bytes - 1).bit_length())
        self._bytes = self._buffer.numpy()
        self._next = 0


class Arrival:
    """Bytes on their way to the host. Not read yet, they keep their stage."""

    def __init__(
        self, stage: torch.Tensor, num_bytes: int, mark: Mark, free: list[torch.Tensor]
    ) -> None:
        self._stage, self._num_bytes, self._mark, self._free = stage, num_bytes, mark, free

    def wait(self) -> np.ndarray:
        """The bytes, uint8 [n], once the device has come so far. To be called once."""
        self._mark.synchronize()
        found = self._stage.numpy()[: self._num_bytes].copy()
        self._free.append(self._stage)
        return found


class Landing:
    """Brings tensors to the host: a copy is queued now, and waited for when somebody reads."""

    def __init__(
        self, device: torch.device, link: Link | None = None, *, num_stages: int = REPORTS
    ) -> None:
        self._link = link or link_of(device)
        self._free = [self._link.stage(REPORT_BYTES) for _ in range(num_stages)]

    def receive(self, source: torch.Tensor) -> Arrival:
        """All bytes of `source`, contiguous."""
        flat = source.view(-1).view(torch.uint8)
        num_bytes = flat.numel()
        fits = [i for i, stage in enumerate(self._free) if stage.numel() >= num_bytes]
        if fits:
            stage = self._free.pop(fits[0])
        else:
            stage = self._link.stage(max(REPORT_BYTES, 1 << max(num_bytes - 1, 0).bit_length()))
        self._link.copy(stage[:num_bytes], flat)
        return Arrival(stage, num_bytes, self._link.mark(), self._free)

    def settle(self) -> None:
        """Wait until the device has done all that was queued so far."""
        self._link.mark().synchronize()


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
