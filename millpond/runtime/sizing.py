"""How much memory a device has left for slots, pages and seats, found by running the largest step.

Knows how a device counts its bytes, through a meter; does not know what becomes of what is left.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from millpond.errors import Refused, StepFailed
from millpond.plan.step import Capabilities, StepPlan
from millpond.runtime.graphs import Capturer, Recorded, Tensors, num_graphs, reach_sizes
from millpond.runtime.warmup import largest
from millpond.units import MIB, human

LUMP = 32 * MIB
"""The largest pieces, in bytes, in which drivers take memory for themselves."""

TRIED_SIZES = 3
"""For so many batch sizes, the largest first, graphs are captured to measure what they take."""

Run = Callable[[StepPlan], object]


class Meter(Protocol):
    """What a device says of its memory, in bytes."""

    def free(self) -> int:
        """What may be allocated, once everything unused has been given back."""

    def held(self) -> int:
        """What is allocated now, once everything unused has been given back."""

    def restart(self) -> None:
        """The peak begins anew."""

    def peak(self) -> int:
        """The most that was allocated at a time."""


class CudaMeter:
    """Of one GPU: torch's own numbers, and the driver's for what is free.

    Blocks that torch keeps for reuse count as allocated: nobody else can have them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        """As the driver says."""
        _give_back()
        return torch.cuda.mem_get_info(self._device)[0]

    def held(self) -> int:
        """As torch says."""
        _give_back()
        return torch.cuda.memory_reserved(self._device)

    def restart(self) -> None:
        """As torch counts."""
        _give_back()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """As torch counted."""
        return torch.cuda.max_memory_reserved(self._device)


def _give_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()


LEAST_MORE = 64 * MIB
"""Bytes that are added at least where the graphs did not fit what was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Bytes that steps take at most beside weights, slots, pages and seats."""

    activations: int  # of the largest step
    graphs: int  # of all graphs of steady steps: their tensors, and what the driver needs

    def with_more_for_graphs(self) -> Peaks:
        """The same with half as much again for graphs, at least `LEAST_MORE` more."""
        return replace(self, graphs=self.graphs + max(self.graphs // 2, LEAST_MORE))

    def left(self, free: int) -> int:
        """How many of `free` bytes are left for slots, pages and seats."""
        return max(0, free - self.activations - self.graphs)


def activation_bytes(run: Run, c: Capabilities, prefill_tokens: int, meter: Meter) -> int:
    """Run the largest steps on memory of their own, that of `c`, and see what they take.

    Raises `Refused` when even one step does not fit.
    """
    what = f"{prefill_tokens} prompt tokens and {c.num_seats} running requests"
    return _peak(run, largest(c, prefill_tokens), meter, what)


def graph_bytes(
    capture: Callable[[Capturer], object],
    capturer: Capturer,
    meter: Meter,
    *,
    rows: int,
    pages: int,
) -> int:
    """Bytes that all graphs for up to `rows` rows, of up to `pages` pages each, will take.

    `capture` records graphs one after the other, the largest first, and is broken off after those
    of `TRIED_SIZES` batch sizes. Later ones take no more than these: they share the tensors of the
    largest, and what is their own is for fewer rows. A driver takes memory in pieces of `LUMP`: the
    graphs measured may have used up one that was there before, and the last may begin another, so
    one is added for each. Raises `Refused` when not even the graphs measured fit.
    """
    size = 2 * len(reach_sizes(pages))  # recordings for one number of rows
    trial = _Trial(capturer, meter, TRIED_SIZES * size)
    with fitting(f"memory for graphs of {rows} running requests", meter), suppress(_Enough):
        capture(trial)
    later = trial.took[size:]
    left = num_graphs(rows, pages) - len(trial.took)
    if left <= 0 or not later:
        return sum(trial.took)
    each = -(-(sum(later) + LUMP) // len(later))
    return sum(trial.took) + left * each + LUMP


class _Enough(Exception):
    """Breaks off the recording: enough graphs were captured to measure by."""


class _Trial:
    """A capturer that measures the device bytes of each graph, and stops after `most` graphs."""

    def __init__(self, capturer: Capturer, meter: Meter, most: int) -> None:
        self._capturer, self._meter, self._most = capturer, meter, most
        self.took: list[int] = []

    def capture(self, work: Callable[[], Tensors]) -> Recorded:
        """Record a graph and measure it. Raises `_Enough` after the last that is wanted."""
        if len(self.took) == self._most:
            raise _Enough
        before = self._meter.free()
        recorded = self._capturer.capture(work)
        self.took.append(max(0, before - self._meter.free()))
        return recorded

    def reserved_bytes(self) -> int:
        """Of the device."""
        return self._capturer.reserved_bytes()


def _peak(run: Run, plans: Iterator[StepPlan], meter: Meter, what: str) -> int:
    before = meter.held()
    meter.restart()
    with fitting(f"a step of {what}", meter):
        for plan in plans:
            run(plan)
    return max(0, meter.peak() - before)


def ran_out(error: BaseException) -> bool:
    """Whether an error goes back to a lack of memory, as that of a recording broken off may."""
    at: BaseException | None = error
    while at is not None and not isinstance(at, torch.OutOfMemoryError):
        at = at.__cause__ or at.__context__
    return at is not None


@contextmanager
def fitting(what: str, meter: Meter) -> Iterator[None]:
    """`Refused`, saying that `what` does not fit, where memory runs out within."""
    try:
        yield
    except (RuntimeError, StepFailed) as error:
        if not ran_out(error):
            raise
        raise Refused(
            f"{what} does not fit beside what the GPU holds, {human(meter.free())} are free: lower"
            " max_prefill_token_num, max_batch_size or session_len, or use a GPU with more memory"
        ) from error
