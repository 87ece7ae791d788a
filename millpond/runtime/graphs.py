"""Work that is recorded once and repeated at the same addresses, for any number of rows up to one.

Knows how a device records; does not know what is recorded. On the CPU nothing can be recorded: the
stand-in calls again and keeps the addresses of what came of it, so that whoever builds on fixed
addresses is shown wrong there too.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Tensors = tuple[torch.Tensor, ...]

FINE = (1, 2, 4, 8)
"""Numbers of rows that have a recording each; from 16 on it is every power of two and the middle
between it and the next."""


REACHES = (32, 256)
"""Pages of a sequence up to which there are recordings of their own, beside those for as many as it
may have: 2,048 tokens, up to which published indexers select nothing, and 16,384. What a longer
sequence might need is not launched for a short one."""


def bucket_sizes(most: int) -> tuple[int, ...]:
    """For which numbers of rows something is recorded: rising, the last is `most`."""
    sizes, power = list(FINE), 2 * FINE[-1]
    while power < most:
        sizes += [power, power + power // 2]
        power *= 2
    return (*(size for size in sizes if size < most), most)


def reach_sizes(most: int) -> tuple[int, ...]:
    """For sequences of how many pages something is recorded: rising, the last is `most`."""
    return (*(pages for pages in REACHES if pages < most), most)


def num_graphs(rows: int, pages: int) -> int:
    """How many recordings there are for up to so many rows, of up to so many pages each."""
    return 2 * len(bucket_sizes(rows)) * len(reach_sizes(pages))


def least_with_room(need: int, sizes: tuple[int, ...]) -> int | None:
    """The least of `sizes` that is large enough; None where none is."""
    at = bisect_left(sizes, need)
    return sizes[at] if at < len(sizes) else None


@dataclass(frozen=True, slots=True)
class Recorded:
    """Work that can be repeated. What came of it lies in `outputs`, anew after every `replay`."""

    outputs: Tensors
    replay: Callable[[], None]


class Capturer(Protocol):
    """Records work that reads and writes tensors at fixed addresses and never asks the host."""

    def capture(self, work: Callable[[], Tensors]) -> Recorded:
        """Run `work` and record it: its outputs keep their addresses."""

    def reserved_bytes(self) -> int:
        """Memory of the device that is set aside, recordings included."""


class CallAgain:
    """The CPU's stand-in."""

    def capture(self, work: Callable[[], Tensors]) -> Recorded:
        """A recording that calls `work` again."""
        outputs = work()

        def replay() -> None:
            for kept, fresh in zip(outputs, work(), strict=True):
                kept.copy_(fresh)

        return Recorded(outputs, replay)

    def reserved_bytes(self) -> int:
        """Nothing is set aside."""
        return 0


def capturer_of(device: torch.device) -> Capturer | None:
    """What records on a device; None where nothing can be recorded."""
    return CudaCapturer(device) if device.type == "cuda" else None


class CudaCapturer:
    """CUDA graphs that share one pool of memory: what one of them leaves, the next one may use.

    They are replayed one after the other on one stream, so only outputs must outlive a replay:
    those are held, and their memory is in nobody else's way.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, work: Callable[[], Tensors]) -> Recorded:
        """Runs `work` once for kernels to be compiled, then records it."""
        current = torch.cuda.current_stream(self._device)
        work()
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        # A collection could free memory of the device, which must not happen while recording.
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    outputs = work()
                finally:
                    graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        current.wait_stream(self._stream)
        return Recorded(outputs, graph.replay)

    def reserved_bytes(self) -> int:
        """All that torch has taken from the device."""
        return torch.cuda.memory_reserved(self._device)
