"""Grades a model on tasks whose right answers are known, through the same door as everybody."""

from millpond.evaluate.cases import Case, Dialect
from millpond.evaluate.gates import Gate, Judged, default_gates, judge, parse_gates
from millpond.evaluate.running import Mode, Outcome, run
from millpond.evaluate.score import Report, TaskScore, compare, score

__all__ = [
    "Case", "Dialect", "Gate", "Judged", "Mode", "Outcome", "Report", "TaskScore", "compare",
    "default_gates", "judge", "parse_gates", "run", "score",
]  # fmt: skip
