"""How much memory a device has left for slots, pages and seats, found by running the largest step.

Knows how a device counts its bytes, through a meter; does not know what becomes of what is left.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from millpond.errors import Refused, StepFailed
from millpond.plan.step import Capabilities, StepPlan
from millpond.runtime.warmup import largest, steady
from millpond.units import MIB, human

GRAPH_BYTES = 12 * MIB
"""What one captured graph takes beside its tensors. Not measured yet."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Bytes that steps take at most beside weights, slots, pages and seats."""

    activations: int  # of the largest step
    graphs: int  # of the graphs of steady steps, whose tensors stay

    def left(self, free: int) -> int:
        """Of `free` bytes, what slots, pages and seats may share."""
        return max(0, free - self.activations - self.graphs)


def measure(
    run: Run, c: Capabilities, prefill_tokens: int, meter: Meter, *, num_graphs: int = 0
) -> Peaks:
    """Run the largest steps on memory of their own, that of `c`, and see what they take.

    `num_graphs` will be captured of steady steps; they share their tensors. Raises `Refused` when
    even one step does not fit.
    """
    what = f"{prefill_tokens} prompt tokens and {c.num_seats} running requests"
    activations = _peak(run, largest(c, prefill_tokens), meter, what)
    graphs = 0
    if num_graphs:
        graphs = _peak(run, steady(c), meter, f"{c.num_seats} running requests")
        graphs += num_graphs * GRAPH_BYTES
    return Peaks(activations=activations, graphs=graphs)


def _peak(run: Run, plans: Iterator[StepPlan], meter: Meter, what: str) -> int:
    before = meter.held()
    meter.restart()
    with fitting(f"a step of {what}", meter):
        for plan in plans:
            run(plan)
    return max(0, meter.peak() - before)


@contextmanager
def fitting(what: str, meter: Meter) -> Iterator[None]:
    """`Refused`, saying that `what` does not fit, where memory runs out within."""
    try:
        yield
    except (torch.OutOfMemoryError, StepFailed) as error:
        cause = error.__cause__ if isinstance(error, StepFailed) else error
        if not isinstance(cause, torch.OutOfMemoryError):
            raise
        raise Refused(
            f"{what} does not fit beside what the GPU holds, {human(meter.free())} are free: lower"
            " max_prefill_token_num, max_batch_size or session_len, or use a GPU with more memory"
        ) from error
