"""Which kernels the device spends some steps in, and how much of the time it spends in none.

Slows the host down while it looks, so steps launched from Python look idler than they are; replayed
graphs do not.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

MOST = 24


@dataclass(frozen=True, slots=True)
class Busy:
    """One kernel or copy on the device, microseconds."""

    name: str
    begin: float
    end: float


class KernelProfile:
    """Called before every step, with its number: watches steps `first` to `first + count - 1`."""

    def __init__(self, windows: Iterable[tuple[int, int]]) -> None:
        self._windows = sorted(windows)
        self._profile: profile | None = None
        self._began = 0.0
        self.found: list[dict[str, Any]] = []

    def __call__(self, step: int) -> None:
        """Begin or end where a window does."""
        if self._profile is not None and step >= sum(self._windows[0]):
            self._stop(step)
        if self._profile is None and self._windows and step >= self._windows[0][0]:
            torch.cuda.synchronize()
            self._profile = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
            self._profile.start()
            self._began = time.perf_counter()
            self._windows[0] = (step, self._windows[0][1])

    def finish(self, step: int) -> None:
        """The run has ended before its step `step`."""
        self._stop(step)

    def _stop(self, step: int) -> None:
        watching, self._profile = self._profile, None
        if watching is None:
            return
        torch.cuda.synchronize()
        seconds = time.perf_counter() - self._began
        watching.stop()
        first, _ = self._windows.pop(0)
        events = [
            Busy(e.name, e.time_range.start, e.time_range.end)
            for e in watching.events()
            if e.device_type == torch.autograd.DeviceType.CUDA
        ]
        if step > first:
            self.found.append(summary(events, first, step - first, seconds))


def summary(events: Sequence[Busy], first: int, steps: int, seconds: float) -> dict[str, Any]:
    """Microseconds a step, the share of the time in which nothing ran, and the costliest kernels.

    `seconds` is the time on the clock of all `steps`.
    """
    spent: dict[str, tuple[int, float]] = {}
    for one in events:
        count, micro = spent.get(one.name, (0, 0.0))
        spent[one.name] = (count + 1, micro + one.end - one.begin)
    ranked = sorted(spent.items(), key=lambda item: -item[1][1])
    busy = covered(events)
    return {
        "first_step": first,
        "steps": steps,
        "us_per_step": 1e6 * seconds / steps,
        "busy_us_per_step": busy / steps,
        "idle": max(0.0, 1 - busy / (1e6 * seconds)),
        "launches_per_step": len(events) / steps,
        "kernels": [
            {"name": name[:90], "per_step": count / steps, "us_per_step": micro / steps}
            for name, (count, micro) in ranked[:MOST]
        ],
        "other_us_per_step": sum(micro for _, (_, micro) in ranked[MOST:]) / steps,
    }


def covered(events: Sequence[Busy]) -> float:
    """Microseconds in which at least one of them ran."""
    total, until = 0.0, float("-inf")
    for one in sorted(events, key=lambda e: e.begin):
        total += max(0.0, one.end - max(one.begin, until))
        until = max(until, one.end)
    return total
