"""Thresholds a report is held against, by default those a bundled model is released by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from millpond.errors import Refused
from millpond.evaluate.score import Report, TaskScore

Measure = Literal["accuracy", "parses", "margin", "drift", "acceptance", "unpredictable"]

_LOWER_IS_BETTER = ("drift", "unpredictable")
_FIELD = {"unpredictable": "acceptance"}
MEASURES = ("accuracy", "parses", "margin", "drift", "acceptance", "unpredictable")


@dataclass(frozen=True, slots=True)
class Gate:
    """A threshold for one measure of one task, or of every task that has it (`task` None).

    `drift` and `unpredictable` (an acceptance that must stay low) are upper bounds, others lower.
    """

    measure: Measure
    threshold: float
    task: str | None = None

    @property
    def is_upper(self) -> bool:
        """Whether values above the threshold fail."""
        return self.measure in _LOWER_IS_BETTER

    def value(self, score: TaskScore) -> float | None:
        """What a task has of the measure."""
        found: float | None = getattr(score, _FIELD.get(self.measure, self.measure))
        return found

    def holds(self, value: float) -> bool:
        """Whether a value passes."""
        return value <= self.threshold if self.is_upper else value >= self.threshold


@dataclass(frozen=True, slots=True)
class Judged:
    """A gate applied to one task."""

    gate: Gate
    task: str
    value: float
    ok: bool


def default_gates(*, drafts: int = 0) -> tuple[Gate, ...]:
    """The release gates of the bundled models, in full precision.

    With three drafts a step also those of the draft layer: text that follows from what stands
    there is drafted right, and random words are not, so that rejections happen.
    """
    found = [
        *(Gate("accuracy", 0.99, task) for task in ("ledger", "recall", "arithmetic")),
        Gate("accuracy", 0.98, "copy"),
        *(Gate("parses", 0.99, task) for task in ("tools", "json")),
        *(Gate("margin", 5.0, task) for task in ("ledger", "recall", "arithmetic", "copy")),
        Gate("drift", 0.01),
    ]
    if drafts == 3:
        found += [Gate("acceptance", 0.9, task) for task in ("speech", "ledger")]
        found += [Gate("acceptance", 0.3, "random"), Gate("unpredictable", 0.8, "random")]
    return tuple(found)


def parse_gates(text: str) -> tuple[Gate, ...]:
    """Gates from "accuracy=0.9,ledger.margin=5,drift=0.01". Raises `Refused`."""
    found = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, number = part.partition("=")
        task, _, measure = name.strip().rpartition(".")
        try:
            threshold = float(number)
        except ValueError:
            threshold = float("nan")
        if measure not in MEASURES or threshold != threshold:
            raise Refused(
                f"gate {part!r} is not measure=number or task.measure=number, with a measure of "
                f"{', '.join(MEASURES)}"
            )
        found.append(Gate(measure, threshold, task or None))  # type: ignore[arg-type]
    return tuple(found)


def judge(report: Report, gates: Sequence[Gate]) -> tuple[Judged, ...]:
    """Every gate on every task it is for and that has the measure; drift for all is judged once.

    A later gate for the same task and measure replaces an earlier one; one for a task by name
    comes before one for all.
    """
    judged = []
    overall = [g for g in gates if g.measure == "drift" and g.task is None]
    if overall and report.drift is not None:
        judged.append(Judged(overall[-1], "all", report.drift, overall[-1].holds(report.drift)))
    gates = [g for g in gates if g not in overall]
    for score in report.scores:
        by_measure: dict[Measure, Gate] = {}
        for gate in sorted(gates, key=lambda g: g.task is not None):
            if gate.task in (None, score.task):
                by_measure[gate.measure] = gate
        for gate in by_measure.values():
            value = gate.value(score)
            if value is not None:
                judged.append(Judged(gate, score.task, value, gate.holds(value)))
    return tuple(judged)
