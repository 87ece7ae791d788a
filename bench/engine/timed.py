"""An executor that times the steps of another: where the device waits, and where the host does.

On a GPU a step lies between two events of the stream, so that the time from the end of a step to
the beginning of the next is read from the device's own clock. What a step waits for inside itself
is not seen that way; `bench.engine.kernels` sees it. A steady step has no row of a prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from millpond.plan.counts import DeviceCounts, counts_of
from millpond.plan.step import Capabilities, Executor, Launched, SeatMask, StepPlan, StepResult

Mark = torch.cuda.Event | float
"""A moment: an event of the stream, or on a CPU the clock in seconds."""

KINDS = ("prompt", "mixed", "decode", "verify")
"""Steps of prompts alone, of prompts beside live rows, of live rows without and with drafts."""


def kind_of(plan: StepPlan) -> str:
    """One of `KINDS`."""
    if plan.prefill:
        return "mixed" if plan.decode or plan.verify else "prompt"
    return "verify" if any(row.num_drafts for row in plan.verify) else "decode"


@dataclass(frozen=True, slots=True)
class Step:
    """One step, in the order of launching. `late`: the device had nothing to do by then."""

    kind: str
    late: bool
    launching: float  # the host, in seconds
    begin: Mark
    end: Mark

    @property
    def steady(self) -> bool:
        """Whether no row of it is a prompt's."""
        return self.kind in ("decode", "verify")


@dataclass(slots=True)
class StepLog:
    """The steps since it was made, and sums over them; seconds."""

    steps: list[Step] = field(default_factory=list)
    waiting: float = 0.0  # the host, for results
    drawn: int = 0  # tokens that steps report
    live_rows: int = 0  # decode and verify rows
    prompt_tokens: int = 0  # tokens of prefill rows

    def launching(self, steady: bool) -> float:
        """Seconds of the host in `launch`."""
        return sum(step.launching for step in self.steps if step.steady == steady)

    def by_kind(self) -> dict[str, tuple[int, float]]:
        """For each kind of step: how many there were, and their seconds on the device."""
        found: dict[str, tuple[int, float]] = {}
        for step in self.steps:
            count, spent = found.get(step.kind, (0, 0.0))
            found[step.kind] = (count + 1, spent + seconds(step.begin, step.end))
        return {kind: found[kind] for kind in KINDS if kind in found}

    def idle(self) -> float | None:
        """From the first step's begin to the last one's end, the share between steps."""
        if not self.steps:
            return None
        whole = seconds(self.steps[0].begin, self.steps[-1].end)
        gaps = (max(0.0, seconds(a.end, b.begin)) for a, b in pairwise(self.steps))
        return sum(gaps) / whole if whole > 0 else None

    def idle_when_steady(self) -> float | None:
        """The same among steady steps that follow each other, at most: a late one counts as begun
        when its launch ended.
        """
        whole = waste = 0.0
        for before, step in pairwise(self.steps):
            if step.steady and before.steady:
                whole += seconds(before.end, step.end)
                waste += max(0.0, seconds(before.end, step.begin))
                waste += step.launching if step.late else 0.0
        return min(1.0, waste / whole) if whole > 0 else None


def seconds(a: Mark, b: Mark) -> float:
    """From a to b."""
    if isinstance(a, float) or isinstance(b, float):
        return float(b) - float(a)  # type: ignore[arg-type]
    b.synchronize()
    return a.elapsed_time(b) / 1e3


Before = Callable[[int, StepPlan], None]


class Timed:
    """Satisfies `plan.step.Executor`; `log` is replaced by whoever measures.

    `before` is called with the number and the plan of every step before it is launched.
    """

    def __init__(self, inner: Executor, device: torch.device) -> None:
        self._inner = inner
        self._on_gpu = device.type == "cuda"
        self.log = StepLog()
        self.before: Before | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Those of the other executor."""
        return self._inner.capabilities

    def launch(self, plan: StepPlan) -> Launched:
        """As the other executor does."""
        log = self.log
        if self.before is not None:
            self.before(len(log.steps), plan)
        late = not log.steps or (self._on_gpu and log.steps[-1].end.query())
        began = time.perf_counter()
        begin = self._mark()
        launched = self._inner.launch(plan)
        end = self._mark()
        launching = time.perf_counter() - began
        log.steps.append(Step(kind_of(plan), late, launching, begin, end))
        log.live_rows += len(plan.decode) + len(plan.verify)
        log.prompt_tokens += sum(len(row.tokens) for row in plan.prefill)
        return _Collected(launched, log)

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def counts(self) -> DeviceCounts:
        """Those of the other executor."""
        return counts_of(self._inner) or DeviceCounts()

    def close(self) -> None:
        """Close the other executor."""
        self._inner.close()


class _Collected:
    """A step under way, timed where it is collected."""

    def __init__(self, launched: Launched, log: StepLog) -> None:
        self._launched = launched
        self._log = log

    def draw(self, masks: tuple[SeatMask, ...]) -> None:
        """Tell the other executor's step what its seats may draw."""
        self._launched.draw(masks)

    def result(self) -> StepResult:
        """What the step did."""
        asked = time.perf_counter()
        found = self._launched.result()
        self._log.waiting += time.perf_counter() - asked
        self._log.drawn += len(found.emitted)
        return found
