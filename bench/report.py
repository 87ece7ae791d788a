"""One table and one plot of a run of `bench.engine`, from its JSON lines.

python -m bench.report FILE [--run NAME] [--to FOLDER]

Without --run it is the newest run in the file. Writes `engine-RUN.md` and `engine-RUN.png`; without
matplotlib only the table. Where kernels were watched it says which kinds of steps spend their time
in which of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import peers
from bench.engine.ceilings import COSTS, least_seconds

Record = dict[str, Any]
Key = tuple[str, str]

LIMITS = """
**What this does not show.** A trained model: weights are random, so answers, routes of tokens to
experts and acceptance of drafts are not natural. HTTP and tokenizers. More than one GPU, other
GPUs, traffic that comes and goes. *Idle* is the device's time between steps; what a step waits for
inside itself is not in it. Peers were measured on another day, on a GPU of the same kind, with the
same sizes and other tokens."""


@dataclass(frozen=True, slots=True)
class Row:
    """One variant: its counted repetitions, the best of them by output tokens per second."""

    key: Key
    trials: tuple[Record, ...]
    asked: Record
    tower: Record
    full: bool = True  # as large as the workload is meant to be

    @property
    def best(self) -> Record:
        """The measures of the best repetition."""
        return max(self.trials, key=lambda m: m["output_tokens_per_s"] or 0.0)

    def median(self, name: str) -> float | None:
        """Over the repetitions."""
        found = [m[name] for m in self.trials if m[name] is not None]
        return statistics.median(found) if found else None

    @property
    def has_peers(self) -> bool:
        """Whether peers were measured on the like."""
        tower = self.tower
        return self.full and tower["model"] == peers.MODEL and peers.GPU in tower["machine"]


@dataclass(frozen=True, slots=True)
class Results:
    """What one run recorded."""

    run: str
    towers: tuple[Record, ...]
    rows: tuple[Row, ...]
    others: tuple[Record, ...]  # kernels, errors, soaks

    def watched(self, key: Key) -> list[Record]:
        """The kernels of one variant, by kind of step."""
        kernels = (r for r in self.others if r["kind"] == "kernels")
        return [r for r in kernels if (r["workload"], r["variant"]) == key]

    @classmethod
    def read(cls, lines: Iterable[str], run: str | None = None) -> Results:
        """Those of `run`, or of the newest one. `ValueError` if there is none."""
        records = [json.loads(line) for line in lines if line.strip()]
        names = sorted({r["run"] for r in records})
        name = run or (names[-1] if names else None)
        if name not in names:
            raise ValueError(f"no run {name!r}; there are {names}")
        mine = [r for r in records if r["run"] == name]
        trials: dict[Key, list[Record]] = {}
        of_tower: dict[Key, tuple[Record, Record, bool]] = {}
        tower: Record = {}
        for record in mine:
            if record["kind"] == "tower":
                tower = record
            elif record["kind"] == "trial" and record["trial"] > 0:
                key = (record["workload"], record["variant"])
                trials.setdefault(key, []).append(record["measures"])
                of_tower[key] = (record["asked"], tower, record["full"])
        return cls(
            run=str(name),
            towers=tuple(r for r in mine if r["kind"] == "tower"),
            rows=tuple(Row(key, tuple(found), *of_tower[key]) for key, found in trials.items()),
            others=tuple(r for r in mine if r["kind"] not in ("tower", "trial")),
        )


HEADS = (
    "workload",
    "asked",
    "trials",
    "output tok/s, best (median)",
    "of the ceiling",
    "TTFT s, mean / p50 / p99",
    "ms a token",
    "ms a step, by kind",
    "cached",
    "host us a step: steady; with prompts",
    "idle; when steady",
    "steps (with prompts); graphs; late kernels",
    "peak GiB; slots",
    "peers, tok/s; TTFT",
    "bar",
)


def table(results: Results) -> str:
    """Markdown: header, table, and what it does not show."""
    lines = [*_header(results), "", _line(HEADS), _line(["---"] * len(HEADS))]
    lines += [_line(_cells(row, results)) for row in results.rows]
    lines += _failures(results)
    return "\n".join([*lines, LIMITS, ""])


def _failures(results: Results) -> list[str]:
    errors = [r for r in results.others if r["kind"] == "error"]
    return [f"\n`{r['what']}` failed: {r['error']}" for r in errors]


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _header(results: Results) -> list[str]:
    found = []
    for t in results.towers:
        slots, most = 1 + t["seat_mb"] / t["slot_mb"], peers.SLOTS_A_SEQUENCE.get(t["drafts"])
        bar = "" if most is None else "; " + _verdict(slots <= most, f"{slots:.3f} of {most}")
        found.append(
            f"{t['model']} in {t['dtype']}, {t['drafts']} drafts: commit {t['commit']},"
            f" {t['date']}; {t['machine']}; {t['versions']}. {t['num_seats']} sequences,"
            f" {t['num_slots']} slots of {t['slot_mb']:.1f} MB, {t['num_pages']} pages of"
            f" {t['page_mb']:.2f} MB, a seat takes {t['seat_mb']:.2f} MB"
            f" ({slots:.3f} slots a sequence{bar}); loaded in"
            f" {t['load_s']:.1f} s, warm after {t['warm_up_s']:.1f} s more."
        )
    return ["\n\n".join(found)]


def _cells(row: Row, results: Results) -> list[str]:
    best = row.best
    asked = ", ".join(f"{k} {v}" for k, v in row.asked.items() if v is not None)
    accepted = ""
    if best["draft_tokens"]:
        accepted = f"; {best['accepted_tokens'] / best['draft_tokens']:.2f} accepted"
    times = " / ".join(_show(best[f"ttft_{n}_s"]) for n in ("mean", "p50", "p99"))
    groups = [f"{label} {_show(mean)}" for label, mean in best["ttft_by_label_s"].items()]
    if best["ttft_cold_p99_s"] is not None:
        groups.append(f"cold p99 {_show(best['ttft_cold_p99_s'])}")
    times += f" ({', '.join(groups)})" if groups else ""
    peak = best.get("device_used_gib", best.get("peak_resident_gib"))
    return [
        " ".join(row.key).strip() + (", cut short" if best["cut"] else ""),
        asked + accepted + ("" if row.full else "; smaller than it is meant to be"),
        str(len(row.trials)),
        f"{_show(best['output_tokens_per_s'])} ({_show(row.median('output_tokens_per_s'))})",
        _of_ceiling(row),
        times,
        _per_token(row),
        ", ".join(f"{kind} {_show(ms)}" for kind, ms in best["ms_by_kind"].items()),
        f"{best['cached_tokens']} of {best['prompt_tokens']}",
        f"{best['engine_us_steady']:.0f} + {best['launch_us_steady']:.0f};"
        f" {best['engine_us_with_prompts']:.0f} + {best['launch_us_with_prompts']:.0f}",
        _idle(best),
        f"{best['steps']} ({best['steps_with_prompts']}); {best['graph_replays']};"
        f" {best['late_compiles']}",
        f"{_show(peak)}; {best['slots_peak']}",
        _peers(row),
        "; ".join(_bars(row, results)),
    ]


def _of_ceiling(row: Row) -> str:
    """The least time of the work, by bytes and products alone, as a share of what it took."""
    costs = COSTS.get(row.tower["model"]) if peers.GPU in row.tower["machine"] else None
    least = None if costs is None else least_seconds(*row.key, row.asked, costs)
    took = row.best["ttft_mean_s" if row.key[0] == "E" else "wall_s"]
    return "-" if least is None or not took else f"{least / took:.0%} ({_show(least)} s)"


def _idle(measures: Record) -> str:
    shares = (measures["idle_between_steps"], measures["idle_when_steady"])
    return "; ".join("-" if share is None else f"{100 * share:.1f} %" for share in shares)


def _per_token(row: Row) -> str:
    """Milliseconds, and how many times the floor."""
    value, floor = row.best["ms_per_token_at_the_end"], peers.FLOORS_MS.get(row.key)
    if value is None or floor is None or not row.has_peers:
        return _show(value)
    return f"{_show(value)} ({value / floor:.2f} x the floor)"


def _show(value: float | None) -> str:
    """Four digits, as plainly as they can be written."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _peers(row: Row) -> str:
    found = peers.MEASURED.get(row.key)
    if found is None or not row.has_peers:
        return ""
    rates = " / ".join(_show(v) for v in (found.lmdeploy, found.vllm))
    return f"{rates}; " + " / ".join(_show(v) for v in (found.lmdeploy_ttft, found.vllm_ttft))


def _bars(row: Row, results: Results) -> list[str]:
    """Every bar there is for a row, and whether it was met."""
    found = []
    for bar in peers.BARS.get(row.key, ()) if row.has_peers else ():
        value = row.best[bar.measure]
        if value is not None:
            found.append(
                _verdict(bar.met(value), f"{_show(value)} of {_show(bar.limit)}, {bar.why}")
            )
    for ratio in peers.RATIOS:
        other = next((r for r in results.rows if r.key == ratio.beside), None)
        if ratio.key == row.key and other is not None:
            mine, theirs = row.median(ratio.measure), other.median(ratio.measure)
            if mine and theirs:
                reached = ratio.of(mine, theirs)
                what = f"{reached:.3f} of {ratio.least}, {ratio.why}"
                found.append(_verdict(reached >= ratio.least, what))
    return found + _bars_of_verify(row, results)


def _bars_of_verify(row: Row, results: Results) -> list[str]:
    """How long the delta rule takes in a step that verifies drafts, against one that decodes."""
    drafts = row.asked.get("drafts") or 0
    most = peers.VERIFY_TIMES.get(drafts)
    mine = _part(results, row.key, "verify", peers.DELTA)
    plain = _part(results, ("F", "B, 0 drafts"), "decode", peers.DELTA)
    if most is None or row.key[0] != "F" or not mine or not plain:
        return []
    return [_verdict(mine / plain <= most, f"{mine / plain:.2f} of {most}, its {peers.DELTA}")]


def _part(results: Results, key: Key, kind: str, part: str) -> float | None:
    """Microseconds that a step of one kind spends in one part of the model; None: not profiled."""
    for r in results.watched(key):
        if r["step_kind"] == kind:
            return float(r["parts"].get(part, 0.0))
    return None


def _verdict(met: bool, what: str) -> str:
    return ("met: " if met else "missed: ") + what


NAMED = 16
"""Kernels of a variant that the report names."""


def kernels(results: Results) -> str:
    """Device time of the profiled steps of every variant by part of the model, a column a kind."""
    keys = dict.fromkeys(
        (r["workload"], r["variant"]) for r in results.others if r["kind"] == "kernels"
    )
    return "\n".join(_kernels_of(key, results.watched(key)) for key in keys)


def _kernels_of(key: Key, kinds: Sequence[Record]) -> str:
    parts: dict[str, list[float]] = {}
    named: dict[str, list[str]] = {}
    cost: dict[str, float] = {}
    for place, r in enumerate(kinds):
        for part, micro in r["parts"].items():
            parts.setdefault(part, [0.0] * len(kinds))[place] = micro
        for k in r["kernels"]:
            cells = named.setdefault(k["name"], [""] * len(kinds))
            cells[place] = f"{k['us_per_step']:.0f} ({k['per_step']:.0f})"
            share = k["us_per_step"] / r["us_per_step"]
            cost[k["name"]] = max(cost.get(k["name"], 0.0), share)
    costliest = sorted(cost, key=lambda name: -cost[name])[:NAMED]
    heads = [f"{r['step_kind']}, {r['steps']} watched" for r in kinds]
    return "\n".join(
        [
            f"\n{' '.join(key).strip()}: microseconds a step (launches)\n",
            _line(("", *heads)),
            _line(("---", *["---:"] * len(kinds))),
            _line(("on the clock", *(f"{r['us_per_step']:.0f}" for r in kinds))),
            _line(("idle", *(f"{100 * r['idle']:.1f} %" for r in kinds))),
            _line(("launches", *(f"{r['launches_per_step']:.0f}" for r in kinds))),
            *(
                _line((f"**{part}**", *(f"{micro:.0f}" for micro in of)))
                for part, of in sorted(parts.items(), key=lambda item: -max(item[1]))
            ),
            *(_line((f"`{name[:60]}`", *named[name])) for name in costliest),
        ]
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    """Output rates and first tokens, ours as bars, those of peers as marks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 1.5 + 0.34 * len(rows)), sharey=True)
    places = range(len(rows))
    panels = (
        ("output_tokens_per_s", "output tokens per second", ("lmdeploy", "vllm")),
        ("ttft_mean_s", "mean time to the first token, seconds", ("lmdeploy_ttft", "vllm_ttft")),
    )
    for axis, (measure, title, fields) in zip(axes, panels, strict=True):
        axis.barh(places, [r.best[measure] or 0.0 for r in rows], color="#4878a8", label="millpond")
        for name, attribute, mark in zip(peers.NAMES, fields, ("o", "D"), strict=True):
            found = [
                (getattr(peers.MEASURED[r.key], attribute), place)
                for place, r in zip(places, rows, strict=True)
                if r.has_peers and r.key in peers.MEASURED
            ]
            if found:
                axis.plot(*zip(*found, strict=True), mark, color="#c04040", label=name, ls="")
        axis.set_xlabel(title)
        axis.grid(axis="x", alpha=0.3)
        axis.margins(y=0.02)
    axes[0].set_yticks(places, [" ".join(r.key).strip() for r in rows])
    axes[0].invert_yaxis()
    axes[0].legend(loc="best", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(arguments: list[str]) -> int:
    """Exit 1 when the file holds no such run, or no repetition that counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--run")
    parser.add_argument("--to", type=Path, help="a folder; else that of the file")
    given = parser.parse_args(arguments)
    try:
        results = Results.read(given.file.read_text("utf-8").splitlines(), given.run)
    except (OSError, ValueError) as error:
        print(f"report: {error}")
        return 1
    if not results.rows:
        print(f"report: run {results.run} has no repetition that counts")
        print(*_failures(results), sep="\n")
        return 1
    folder = given.to or given.file.parent
    folder.mkdir(parents=True, exist_ok=True)
    text = table(results) + kernels(results)
    target = folder / f"engine-{results.run}.md"
    target.write_text(text, "utf-8")
    print(text)
    print(f"written to {target}")
    if find_spec("matplotlib") is None:
        print("report: no plot, because matplotlib is not installed")
        return 0
    plot(results.rows, target.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
