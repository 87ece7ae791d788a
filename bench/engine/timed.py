"""An executor that times the steps of another: where the device waits, and where the host does.

On a GPU a step lies between two events of the stream, so that the time from the end of a step to
the beginning of the next is read from the device's own clock. What a step waits for inside itself
(launches that come too late) is not seen that way; `bench.engine.kernels` sees it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from millpond.plan.counts import DeviceCounts, counts_of
from millpond.plan.step import Capabilities, Executor, Launched, StepPlan, StepResult


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
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)  # without a GPU: on the clock

    def idle_share(self) -> float | None:
        """Between the first step's begin and the last one's end, how much lies between steps."""
        if self.events:
            torch.cuda.synchronize()
            first, last = self.events[0][0], self.events[-1][1]
            whole = first.elapsed_time(last)
            pairs = zip(self.events, self.events[1:], strict=False)
            gaps = sum(max(0.0, a[1].elapsed_time(b[0])) for a, b in pairs)
        elif self.spans:
            whole = self.spans[-1][1] - self.spans[0][0]
            pairs = zip(self.spans, self.spans[1:], strict=False)
            gaps = sum(max(0.0, b[0] - a[1]) for a, b in pairs)
        else:
            return None
        return gaps / whole if whole > 0 else None


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
            events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            events[0].record()
            launched = self._inner.launch(plan)
            events[1].record()
            log.events.append(events)
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
