"""Outcomes of a load as numbers, a table, JSON and a picture; sends nothing."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.table import Table

from millpond.errors import Refused
from millpond.front.load.drive import Outcome

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed, between neighbours where it lies between."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * share
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, quantiles and maximum, in milliseconds of values in seconds; None of nothing."""
    if not values:
        return None
    made = {"mean": statistics.fmean(values)}
    made |= {name: quantile(values, share) for name, share in QUANTILES.items()}
    made["max"] = max(values)
    return {name: round(1000 * value, 3) for name, value in made.items()}


def summary(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """All numbers; rates are per second of the whole run, which took `seconds`."""
    good = [o for o in outcomes if o.error is None]
    prompt, answer = (
        sum(getattr(o, f"{n}_tokens") for o in good) for n in ("prompt", "completion")
    )
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(good),
        "errors": dict(Counter(o.error for o in outcomes if o.error is not None).most_common(10)),
        "seconds": round(seconds, 3),
        "peak_at_once": at_once(outcomes),
        "requests_per_second": round(len(good) / seconds, 3),
        "prompt_tokens": prompt,
        "cached_tokens": sum(o.cached_tokens for o in good),
        "completion_tokens": answer,
        "prompt_tokens_per_second": round(prompt / seconds, 1),
        "completion_tokens_per_second": round(answer / seconds, 1),
        "ttft_ms": spread([o.first for o in good]),
        "itl_ms": spread([gap for o in good for gap in o.gaps]),
        "tpot_ms": spread([t for o in good if (t := o.per_token) is not None]),
        "latency_ms": spread([o.latency for o in good]),
    }


def at_once(outcomes: Sequence[Outcome]) -> int:
    """The most requests that were under way together."""
    moments = sorted([(o.due, 1) for o in outcomes] + [(o.end, -1) for o in outcomes])
    most = now = 0
    for _, step in moments:
        now += step
        most = max(most, now)
    return most


NAMES = {
    "ttft_ms": "time to first token",
    "itl_ms": "between chunks of text",
    "tpot_ms": "per token after the first",
    "latency_ms": "whole request",
}


def table(made: dict[str, Any]) -> Table:
    """The numbers for people."""
    shown = Table()
    for i, name in enumerate(("", "mean", *QUANTILES, "max")):
        shown.add_column(name, justify="right" if i else "left")
    for key, name in NAMES.items():
        if (found := made[key]) is not None:
            shown.add_row(f"{name}, ms", *(f"{value:,.1f}" for value in found.values()))
    shown.add_section()
    shown.add_row("requests a second", f"{made['requests_per_second']:,.2f}")
    shown.add_row("tokens a second, generated", f"{made['completion_tokens_per_second']:,.0f}")
    shown.add_row("tokens a second, of prompts", f"{made['prompt_tokens_per_second']:,.0f}")
    cached = made["cached_tokens"] / made["prompt_tokens"] if made["prompt_tokens"] else 0.0
    shown.add_row("share of prompt tokens cached", f"{cached:.1%}")
    shown.add_row("at once, at most", f"{made['peak_at_once']:,}")
    shown.add_row("requests, failed", f"{made['requests']:,}", f"{made['failed']:,}")
    shown.add_row("seconds", f"{made['seconds']:,.1f}")
    return shown


def plot(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """A picture: how times are spread, and how they went along the run. Raises `Refused`."""
    try:
        matplotlib = import_module("matplotlib")
        matplotlib.use("agg")
        pyplot = import_module("matplotlib.pyplot")
    except ImportError as error:
        raise Refused("a plot needs matplotlib: pip install 'millpond[bench]'") from error
    good = [o for o in outcomes if o.error is None]
    if not good:
        raise Refused("no request was answered, there is nothing to draw")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, values in (
        ("first token", [o.first for o in good]),
        ("between chunks", [gap for o in good for gap in o.gaps]),
        ("whole request", [o.latency for o in good]),
    ):
        if values:
            ordered = sorted(max(1e-5, value) * 1000 for value in values)
            left.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], label=name)
    left.set(xscale="log", xlabel="milliseconds", ylabel="share not slower")
    left.legend()
    left.grid(alpha=0.3)
    begin = min(o.due for o in good)
    for name, values in (
        ("first token", [o.first for o in good]),
        ("whole request", [o.latency for o in good]),
    ):
        right.plot([o.due - begin for o in good], [1000 * v for v in values], ".", label=name)
    right.set(yscale="log", xlabel="seconds since the first request", ylabel="milliseconds")
    right.legend()
    right.grid(alpha=0.3)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise Refused(f"cannot write {path}: {error}") from error
    finally:
        pyplot.close(figure)
