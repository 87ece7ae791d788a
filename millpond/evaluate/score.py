"""From outcomes to numbers: accuracy, margin, drift, by task; knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles

from millpond.evaluate.cases import Dialect
from millpond.evaluate.grading import is_right, parses
from millpond.evaluate.running import Drafts, Outcome, Ran


@dataclass(frozen=True, slots=True)
class TaskScore:
    """One task's numbers; None where there is nothing to say.

    accuracy: share of right replies. parses: share of readable objects and calls. margin: 5th
    percentile, over all tokens of right replies, of the best log probability minus the second
    (nats). drift: largest difference of a log probability between two modes, over all tokens up to
    the first that the modes did not share (nats); diverged: replies in which there was one. cached:
    share of prompt tokens from the prefix cache. acceptance: of drafts.
    """

    task: str
    replies: int
    failed: int
    accuracy: float | None
    parses: float | None
    margin: float | None
    cached: float
    acceptance: float | None
    drift: float | None = None
    diverged: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Scores of a mode, and of what it was compared with."""

    model: str
    mode: str
    other: str | None
    scores: tuple[TaskScore, ...]

    @property
    def drift(self) -> float | None:
        """The largest drift of any task."""
        found = [s.drift for s in self.scores if s.drift is not None]
        return max(found) if found else None


def score(ran: Ran, dialect: Dialect, other: Ran | None = None) -> tuple[TaskScore, ...]:
    """Numbers of every task of a run; with `other`, the drift between the two."""
    return tuple(
        _of_task(task, outcomes, ran.drafts[task], dialect, other.outcomes[task] if other else None)
        for task, outcomes in ran.outcomes.items()
    )


def _of_task(
    task: str,
    outcomes: Sequence[Outcome],
    drafts: Drafts,
    dialect: Dialect,
    others: Sequence[Outcome] | None,
) -> TaskScore:
    said = [dialect.spoken(o.tokens) for o in outcomes]
    verdicts = [is_right(o.case, text) for o, text in zip(outcomes, said, strict=True)]
    graded = [bool(v) for v in verdicts if v is not None]
    formal = [
        p for o, text in zip(outcomes, said, strict=True) if (p := parses(o.case, text)) is not None
    ]
    gaps = [gap for o, v in zip(outcomes, verdicts, strict=True) if v for gap in margins(o)]
    compared = None
    if others is not None:
        compared = [compare(a, b) for a, b in zip(outcomes, others, strict=True)]
    return TaskScore(
        task=task,
        replies=len(outcomes),
        failed=sum(o.error is not None for o in outcomes),
        accuracy=fmean(graded) if graded else None,
        parses=fmean(formal) if formal else None,
        margin=_fifth(gaps),
        cached=sum(o.cached for o in outcomes) / max(1, sum(len(o.case.prompt) for o in outcomes)),
        acceptance=drafts.acceptance,
        drift=max((drift for drift, _ in compared), default=0.0) if compared is not None else None,
        diverged=sum(apart for _, apart in compared) if compared is not None else None,
    )


def margins(outcome: Outcome) -> list[float]:
    """Best minus second log probability of every token, in nats."""
    found = []
    for top in outcome.top:
        first, second = sorted(top.values(), reverse=True)[:2]
        found.append(first - second)
    return found


def compare(one: Outcome, two: Outcome) -> tuple[float, bool]:
    """(largest difference of a log probability, whether the replies part).

    Counted at every place where both have the same tokens behind them, over the ids that both
    report there.
    """
    drift = 0.0
    for index, (a, b) in enumerate(zip(one.top, two.top, strict=False)):
        drift = max([drift, *(abs(a[token] - b[token]) for token in a.keys() & b.keys())])
        if one.tokens[index] != two.tokens[index]:
            return drift, True
    return drift, len(one.tokens) != len(two.tokens)


def _fifth(values: Sequence[float]) -> float | None:
    """The 5th percentile, between the two nearest values; None of nothing."""
    if len(values) < 2:
        return values[0] if values else None
    return quantiles(values, n=20, method="inclusive")[0]
