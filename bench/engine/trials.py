"""Repetitions of workloads on one tower: in turns, on the disk as they end, within a time limit.

Every repetition has an engine of its own with an empty cache, prompts of its own, and one other
request before the clock starts. The first one is smaller and not counted.
"""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.engine.drive import Run, Watched
from bench.engine.kernels import KernelProfile
from bench.engine.tower import Tower
from bench.engine.traffic import Ask, Draw, Given, Traffic
from bench.engine.workloads import Variant

TEACHING = 8192
"""Tokens of the request before the clock starts: it tells the engine how fast it is."""


class Lost(Exception):
    """The device answers no more."""


class Lines:
    """Appends records to a file of JSON lines, all with the name of this run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._run = time.strftime("%Y%m%d-%H%M%S")
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, kind: str, **fields: Any) -> None:
        """One line, on the disk when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run": self._run, "kind": kind, **fields}) + "\n")


@dataclass(slots=True)
class Trials:
    """How often and how long, where results go, and what failed."""

    lines: Lines
    trials: int = 3
    limit: float = 60.0  # seconds of a variant; of a single repetition, too
    profile: bool = False
    failed: list[str] = field(default_factory=list)

    def guarded(self, what: str, do: Callable[[], None]) -> None:
        """Run it; an error is recorded, and the others go on. Raises `Lost`."""
        try:
            do()
        except Lost:
            raise
        except Exception as error:  # the others still have something to say
            why = f"{type(error).__name__}: {error}"
            self.failed.append(what)
            self.lines.add("error", what=what, error=why, trace=traceback.format_exc())
            print(f"{what}: {why}", flush=True)
            traceback.print_exc()
            if not _answers():
                raise Lost(why) from error

    def workload(self, tower: Tower, pairs: list[tuple[Variant, Variant]]) -> None:
        """All repetitions of the variants of one workload, each with what warms it up."""
        spent = dict.fromkeys((one.label for one, _ in pairs), 0.0)
        longest = dict.fromkeys(spent, 0.0)
        steps = dict.fromkeys(spent, 0)
        for trial in range(self.trials + 1):
            for one, smaller in pairs:
                label = one.label
                if trial > 1 and spent[label] + longest[label] > self.limit:
                    continue
                began = time.perf_counter()
                run = self.trial(tower, smaller if trial == 0 else one, trial)
                longest[label] = time.perf_counter() - began
                spent[label] += longest[label] if trial else 0.0
                steps[label] = len(run.log.steps)
        if self.profile and tower.device.type == "cuda":
            for one, _ in pairs:
                self.kernels(tower, one, steps[one.label])

    def trial(self, tower: Tower, one: Variant, trial: int) -> Run:
        """One repetition, recorded."""
        run = measure(tower, one, 1000 * trial + 1, self.limit)
        found = run.measures()
        self.lines.add(
            "trial",
            workload=one.workload,
            variant=one.name,
            trial=trial,
            asked=one.asked,
            settings=one.settings,
            measures=found,
        )
        print(f"{one.label} #{trial}: {in_short(found)}", flush=True)
        return run

    def kernels(self, tower: Tower, one: Variant, steps: int) -> None:
        """A repetition whose kernels are watched, early and late in its `steps`, and recorded."""
        watching = KernelProfile([(steps // 6, 6), (steps * 2 // 3, 20)])
        watching.finish(len(measure(tower, one, 7, self.limit, watching).log.steps))
        for found in watching.found:
            self.lines.add("kernels", workload=one.workload, variant=one.name, **found)
            costliest = "; ".join(
                f"{k['name'][:40]} x{k['per_step']:.0f} {k['us_per_step']:.0f}"
                for k in found["kernels"][:10]
            )
            print(
                f"{one.label} kernels from step {found['first_step']}:"
                f" {found['us_per_step']:.0f} us a step, idle {found['idle']:.3f},"
                f" {found['launches_per_step']:.0f} launches; {costliest}",
                flush=True,
            )


def measure(
    tower: Tower,
    one: Variant,
    seed: int,
    limit: float,
    before_step: Callable[[int], None] | None = None,
) -> Run:
    """One repetition on a new engine. Raises what the engine raises."""
    watched = tower.engine(**one.settings)
    draw = Draw(seed, tower.worker.capabilities.vocab_size)
    if tower.forced is not None and one.chance is not None:
        tower.forced.expect(one.chance)
    try:
        traffic = _prepare(watched, one, draw)
        gc.collect()
        watched.timed.before = before_step
        return watched.run(traffic, limit)
    finally:
        watched.engine.close(drain=False)


def _prepare(watched: Watched, one: Variant, draw: Draw) -> Traffic:
    """Let the engine learn its rate, then forget the prompt; prime it where the variant says so."""
    long = min(TEACHING, watched.engine.settings.session_len - 16)
    watched.run(Given([Ask(draw.tokens(long), 8)]))
    watched.engine.flush_cache()
    if one.primed is None:
        return one.traffic(draw)
    before, rest = one.primed(draw)
    watched.run(before)
    return rest


def in_short(m: dict[str, Any]) -> str:
    """One line of a repetition, and what it should not have had."""
    shown = [
        f"{m['output_tokens_per_s']:.1f} tok/s",
        f"{m['wall_s']:.2f} s",
        f"TTFT {number(m['ttft_mean_s'], 3)} s (p99 {number(m['ttft_p99_s'], 3)})",
        f"at the end {number(m['ms_per_token_at_the_end'], 2)} ms",
        f"cached {m['cached_tokens']}",
        f"host {m['engine_us_steady']:.0f} + {m['launch_us_steady']:.0f} us,"
        f" with prompts {m['engine_us_with_prompts']:.0f} + {m['launch_us_with_prompts']:.0f}",
        f"{m['steps']} steps ({m['steps_with_prompts']} with prompts, {m['late_steady']} others"
        f" late), {m['graph_replays']} graphs",
        f"idle {number(m['idle_between_steps'], 3)}, steady {number(m['idle_when_steady'], 3)}",
    ]
    if m["draft_tokens"]:
        shown.append(f"accepted {m['accepted_tokens'] / m['draft_tokens']:.2f}")
    wrong = ("late_compiles", "cut", "nonfinite", "steps_failed", "preemptions", "short")
    return ", ".join(shown + [f"{name} {m[name]}" for name in wrong if m[name]])


def number(value: float | None, digits: int) -> str:
    """`-` for what was not measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def _answers() -> bool:
    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
