"""An executor that times the steps of another: where the device waits, and where the host does.

On a GPU a step lies between two events of the stream, so that the time from the end of a step to
the beginning of the next is read from the device's own clock. A step that is launched when the
device has nothing left to do may begin only at the end of its launch: so there are two shares of
idle time, at least and at most. What is between is seen by `bench.engine.kernels`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from millpond.plan.counts import DeviceCounts, counts_of
from millpond.plan.step import Capabilities, Executor, Launched, StepPlan, StepResult

Events = tuple[torch.cuda.Event, torch.cuda.Event]


@dataclass(slots=True)
class StepLog:
    """Sums over the steps since it was made; seconds."""

    steps: int = 0
    steady: int = 0  # of them without a row of a prompt
    launching: float = 0.0  # the host, in `launch`
    waiting: float = 0.0  # the host, for results
    drawn: int = 0  # tokens that steps report
    live_rows: int = 0  # decode and verify rows
    prompt_tokens: int = 0  # tokens of prefill rows
    late: int = 0  # launched when the device had nothing to do
    launching_late: float = 0.0
    events: list[Events] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)  # without a GPU: on the clock

    def idle(self) -> tuple[float, float] | None:
        """From the first step's begin to the last one's end: the share of idle time, at least and
        at most; None without steps.
        """
        if self.events:
            torch.cuda.synchronize()
            whole = self.events[0][0].elapsed_time(self.events[-1][1]) / 1e3
            pairs = zip(self.events, self.events[1:], strict=False)
            gaps = sum(max(0.0, a[1].elapsed_time(b[0])) for a, b in pairs) / 1e3
        elif self.spans:
            whole = self.spans[-1][1] - self.spans[0][0]
            spans = zip(self.spans, self.spans[1:], strict=False)
            gaps = sum(max(0.0, later[0] - earlier[1]) for earlier, later in spans)
        else:
            return None
        if whole <= 0:
            return None
        return gaps / whole, min(1.0, (gaps + self.launching_late) / whole)


class Timed:
    """Satisfies `plan.step.Executor`; `log` is replaced by whoever measures.

    `before` is called with the number of every step of the log before it is launched.
    """

    def __init__(self, inner: Executor, device: torch.device) -> None:
        self._inner = inner
        self._on_gpu = device.type == "cuda"
        self.log = StepLog()
        self.before: Callable[[int], None] | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Those of the other executor."""
        return self._inner.capabilities

    def launch(self, plan: StepPlan) -> Launched:
        """As the other executor does."""
        log = self.log
        if self.before is not None:
            self.before(log.steps)
        began = time.perf_counter()
        if self._on_gpu:
            late = not log.events or log.events[-1][1].query()
            events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            events[0].record()
            launched = self._inner.launch(plan)
            events[1].record()
            log.events.append(events)
            log.late += late
            log.launching_late += late * (time.perf_counter() - began)
        else:
            launched = self._inner.launch(plan)
        log.launching += time.perf_counter() - began
        log.steps += 1
        log.steady += not plan.prefill
        log.live_rows += len(plan.decode) + len(plan.verify)
        log.prompt_tokens += sum(len(row.tokens) for row in plan.prefill)
        return _Collected(launched, log, None if self._on_gpu else began)

    def counts(self) -> DeviceCounts:
        """Those of the other executor."""
        return counts_of(self._inner) or DeviceCounts()

    def close(self) -> None:
        """Close the other executor."""
        self._inner.close()


class _Collected:
    """A step under way, timed where it is collected."""

    def __init__(self, launched: Launched, log: StepLog, began: float | None) -> None:
        self._launched = launched
        self._log = log
        self._began = began

    def result(self) -> StepResult:
        """What the step did."""
        asked = time.perf_counter()
        found = self._launched.result()
        now = time.perf_counter()
        self._log.waiting += now - asked
        self._log.drawn += len(found.emitted)
        if self._began is not None:
            self._log.spans.append((self._began, now))
        return found
