"""A report as tables for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from millpond.evaluate.gates import Judged
from millpond.evaluate.score import Report, TaskScore


def _number(value: float | None, form: str = ".3f") -> str:
    return "–" if value is None else format(value, form)


def table(report: Report) -> Table:
    """One line for each task; columns that nothing is known of are left out."""
    columns: dict[str, Callable[[TaskScore], str]] = {
        "replies": lambda s: str(s.replies),
        "right": lambda s: _number(s.accuracy),
        "parses": lambda s: _number(s.parses),
        "margin": lambda s: _number(s.margin, ".2f"),
        "cached": lambda s: _number(s.cached, ".2f"),
        "drafts": lambda s: _number(s.acceptance, ".2f"),
        "drift": lambda s: _number(s.drift, ".1e"),
        "apart": lambda s: "–" if s.diverged is None else str(s.diverged),
        "failed": lambda s: str(s.failed),
    }
    made = Table(
        title=report.model,
        caption=_caption(report),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    made.add_column("task", no_wrap=True)
    shown = {n: f for n, f in columns.items() if _known(n, report.scores)}
    for name in shown:
        made.add_column(name, justify="right", no_wrap=True)
    for score in report.scores:
        made.add_row(score.task, *(show(score) for show in shown.values()))
    return made


def _known(name: str, scores: Sequence[TaskScore]) -> bool:
    fields = {"drafts": "acceptance", "right": "accuracy", "apart": "diverged"}
    if name == "failed":
        return any(s.failed for s in scores)
    return any(getattr(s, fields.get(name, name)) is not None for s in scores)


def _caption(report: Report) -> str:
    lines = [f"mode: {report.mode}"]
    if report.other is not None:
        lines.append(f"drift against: {report.other}")
    return "\n".join(lines)


def gate_table(judged: Sequence[Judged]) -> RenderableType:
    """Value, threshold and verdict of every gate."""
    if not judged:
        return Text("no gates")
    made = Table(title="gates", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("task", "measure"):
        made.add_column(name, no_wrap=True)
    for name in ("value", "threshold"):
        made.add_column(name, justify="right")
    made.add_column("ok")
    for one in judged:
        form = ".1e" if one.gate.measure == "drift" else ".3f"
        sign = "≤" if one.gate.is_upper else "≥"
        made.add_row(
            one.task,
            one.gate.measure,
            format(one.value, form),
            f"{sign} {one.gate.threshold:g}",
            "yes" if one.ok else Text("NO", style="bold red"),
        )
    return made


def as_json(report: Report, judged: Sequence[Judged]) -> str:
    """Everything, for programs."""
    made: dict[str, Any] = {
        "model": report.model,
        "mode": report.mode,
        "compared_with": report.other,
        "drift": report.drift,
        "tasks": {s.task: dataclasses.asdict(s) for s in report.scores},
        "gates": [
            {
                "task": j.task,
                "measure": j.gate.measure,
                "value": j.value,
                "threshold": j.gate.threshold,
                "ok": j.ok,
            }
            for j in judged
        ],
        "ok": all(j.ok for j in judged),
    }
    return json.dumps(made, indent=2, ensure_ascii=False) + "\n"
