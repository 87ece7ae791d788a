"""Profiles some steps of every kind: time by kernel and part of the model, and idle time.

A profiled step runs by itself: the step before it has ended, and it ends before the next is
launched. Profiling slows the host down, so steps launched from Python show more idle time than they
have; replayed graphs do not.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import millpond
from bench.engine.timed import kind_of
from millpond.plan.step import StepPlan

MOST = 24
"""Kernels that are listed for a kind of step; the others are summed up."""

WATCHED = 4
"""Steps that are profiled of each kind, at most."""

PARTS: Mapping[str, str] = {
    "thin": "products",
    "moe": "experts",
    "narrow": "streams, routers",
    "hyper": "streams, routers",
    "attention": "attention",
    "latent": "attention",
    "splits": "attention",
    "writes": "attention",
    "indexer": "indexer",
    "conv": "delta rule",
    "ready": "delta rule",
    "steps": "delta rule",
    "chunk_prepare": "delta rule",
    "chunk_recur": "delta rule",
    "norms": "norms, activations",
    "elementwise": "norms, activations",
    "sampling": "drawing",
    "staging": "staging",
    "slots": "staging",
}
"""Parts of a model by the modules of our kernels; other modules are parts by their own names."""

PRODUCTS = re.compile("nvjet|gemm|splitK|cutlass")
"""Kernels of cuBLAS."""

OTHER = "copies, elementwise"


@cache
def modules() -> Mapping[str, str]:
    """The module of each kernel of this package, by the kernel's name.

    Kernels have a decorator of the package; functions that kernels call have `triton.jit` itself.
    """
    return {
        each.name: file.stem
        for file in sorted(Path(millpond.__file__).parent.glob("ops/triton/*.py"))
        for each in ast.parse(file.read_text("utf-8")).body
        if isinstance(each, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and d.id != "cache" for d in each.decorator_list)
    }


def part_of(kernel: str) -> str:
    """Which part of a model a kernel belongs to."""
    module = modules().get(kernel)
    if module is not None:
        return PARTS.get(module, module)
    return "products" if PRODUCTS.search(kernel) else OTHER


@dataclass(frozen=True, slots=True)
class Busy:
    """One kernel or copy on the device, microseconds."""

    name: str
    begin: float
    end: float


@dataclass(slots=True)
class Watched:
    """Profiled steps of one kind: what ran in each, and the seconds they took together."""

    events: list[list[Busy]] = field(default_factory=list)
    seconds: float = 0.0


class KernelProfile:
    """Called before every step with its number and plan: profiles some steps of every kind.

    `expected`: by kind, how many steps there will be; those profiled are spread over them.
    """

    def __init__(self, expected: Mapping[str, int]) -> None:
        self._wanted = {kind: frozenset(spread(count)) for kind, count in expected.items()}
        self._seen = dict.fromkeys(expected, 0)
        self._profile: profile | None = None
        self._kind, self._began = "", 0.0
        self._found: dict[str, Watched] = {}

    def __call__(self, step: int, plan: StepPlan) -> None:
        """End the profile of the step before, and begin one if this step is to be profiled."""
        del step
        self._stop()
        kind = kind_of(plan)
        at = self._seen.get(kind, 0)
        self._seen[kind] = at + 1
        if at in self._wanted.get(kind, ()):
            torch.cuda.synchronize()
            self._kind = kind
            self._profile = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
            self._profile.start()
            self._began = time.perf_counter()

    def found(self) -> dict[str, dict[str, Any]]:
        """After the last step: by kind, where its time went."""
        self._stop()
        return {kind: summary(steps.events, steps.seconds) for kind, steps in self._found.items()}

    def _stop(self) -> None:
        watching, self._profile = self._profile, None
        if watching is None:
            return
        torch.cuda.synchronize()
        seconds = time.perf_counter() - self._began
        watching.stop()
        of_kind = self._found.setdefault(self._kind, Watched())
        of_kind.seconds += seconds
        of_kind.events.append(
            [
                Busy(e.name, e.time_range.start, e.time_range.end)
                for e in watching.events()
                if e.device_type == torch.autograd.DeviceType.CUDA
            ]
        )


def spread(count: int, most: int = WATCHED) -> list[int]:
    """At most `most` of the numbers below `count`, evenly, none of them at the very end."""
    some = min(count, most)
    return [count * (2 * i + 1) // (2 * some) for i in range(some)]


def summary(steps: Sequence[Sequence[Busy]], seconds: float) -> dict[str, Any]:
    """Microseconds a step, the share of the time in which nothing ran, parts and costliest kernels.

    `seconds` is the time on the clock of all `steps`.
    """
    spent: dict[str, tuple[int, float]] = {}
    for one in (event for events in steps for event in events):
        count, micro = spent.get(one.name, (0, 0.0))
        spent[one.name] = (count + 1, micro + one.end - one.begin)
    number, busy = len(steps), sum(map(covered, steps))
    ranked = sorted(spent.items(), key=lambda item: -item[1][1])
    parts: dict[str, float] = {}
    for name, (_, micro) in ranked:
        parts[part_of(name)] = parts.get(part_of(name), 0.0) + micro / number
    return {
        "steps": number,
        "us_per_step": 1e6 * seconds / number,
        "busy_us_per_step": busy / number,
        "idle": max(0.0, 1 - busy / (1e6 * seconds)),
        "launches_per_step": sum(map(len, steps)) / number,
        "parts": parts,
        "kernels": [
            {"name": name[:90], "per_step": count / number, "us_per_step": micro / number}
            for name, (count, micro) in ranked[:MOST]
        ],
        "other_us_per_step": sum(micro for _, (_, micro) in ranked[MOST:]) / number,
    }


def covered(events: Iterable[Busy]) -> float:
    """Microseconds in which at least one of them ran."""
    total, until = 0.0, float("-inf")
    for one in sorted(events, key=lambda e: e.begin):
        total += max(0.0, one.end - max(one.begin, until))
        until = max(until, one.end)
    return total
