"""Repeats workloads on one device tower, in turns and within a time limit, and records each result.

Every repetition has an engine of its own with an empty cache, prompts of its own, and one other
request before the clock starts. The first one is smaller and not counted.
"""

from __future__ import annotations

import gc
import json
import re
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.engine.drive import Run, Watched
from bench.engine.kernels import KernelProfile
from bench.engine.timed import Before
from bench.engine.tower import Tower
from bench.engine.traffic import Ask, Draw, Given, Traffic
from bench.engine.workloads import Variant

TEACHING = 8192
"""Tokens of the request before the clock starts: it tells the engine how fast it is."""


class Lost(Exception):
    """The device no longer answers, so that nothing more can be measured."""


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
class _Spent:
    """Of one variant so far: seconds of all counted repetitions and of the last; steps by kind."""

    seconds: float = 0.0
    longest: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Trials:
    """How often and how long, where results go, and what failed."""

    lines: Lines
    trials: int = 3
    limit: float = 60.0  # seconds of a variant; of a single repetition, too
    until: float = float("inf")  # `time.perf_counter()` after which nothing more is begun
    brief: bool = False  # only the first variant of a workload is warmed up
    profiled: str | None = None  # labels of variants whose kernels are watched, a pattern
    full: frozenset[str] = frozenset()  # workloads that are as large as they are meant to be
    failed: list[str] = field(default_factory=list)
    kinds: dict[str, dict[str, int]] = field(default_factory=dict)  # of steps, by variant

    def guarded(self, what: str, do: Callable[[], None]) -> bool:
        """Call `do`; whether it raised nothing. An error is recorded, and the run goes on.

        Raises `Lost` when the device no longer answers.
        """
        try:
            do()
            return True
        except Lost:
            raise
        except Exception as error:  # what comes next can still be measured
            why = f"{type(error).__name__}: {error}"
            self.failed.append(what)
            self.lines.add("error", what=what, error=why, trace=traceback.format_exc())
            print(f"{what}: {why}", flush=True)
            traceback.print_exc()
            if not _answers():
                raise Lost(why) from error
        return False

    def workload(self, tower: Tower, pairs: list[tuple[Variant, Variant]]) -> None:
        """All repetitions of the variants of one workload; pairs of a variant and its warm-up.

        A variant that fails is left out from then on.
        """
        going = {one.label: _Spent() for one, _ in pairs}
        for trial in range(self.trials + 1):
            for one, smaller in pairs[:1] if self.brief and not trial else pairs:
                so_far = going.get(one.label)
                if so_far is None or self._over(trial, so_far):
                    continue
                work = partial(self._again, tower, smaller if trial == 0 else one, trial, so_far)
                if not self.guarded(one.label, work):
                    del going[one.label]
        self.kinds |= {label: so_far.kinds for label, so_far in going.items() if so_far.kinds}

    def by_kernel(self, tower: Tower, variants: Iterable[Variant]) -> None:
        """Profile the kernels of one more repetition of each variant that `profiled` matches.

        Call it after everything that is timed: a profiler may slow down launches for good.
        """
        if self.profiled is None or tower.device.type != "cuda":
            return
        for one in variants:
            kinds = self.kinds.get(one.label)
            if kinds and re.search(self.profiled, one.label) and not self.too_late:
                work = partial(self.kernels, tower, one, kinds)
                self.guarded(f"{one.label} by kernel", work)

    @property
    def too_late(self) -> bool:
        """Whether the time for the whole run is over."""
        return time.perf_counter() > self.until

    def _over(self, trial: int, so_far: _Spent) -> bool:
        return self.too_late or (trial > 1 and so_far.seconds + so_far.longest > self.limit)

    def _again(self, tower: Tower, one: Variant, trial: int, so_far: _Spent) -> None:
        began = time.perf_counter()
        run = self.trial(tower, one, trial)
        so_far.longest = time.perf_counter() - began
        so_far.seconds += so_far.longest if trial else 0.0
        so_far.kinds = {kind: number for kind, (number, _) in run.log.by_kind().items()}

    def trial(self, tower: Tower, one: Variant, trial: int) -> Run:
        """One repetition, recorded."""
        run = measure(tower, one, 1000 * trial + 1, self.limit)
        found = run.measures()
        self.lines.add(
            "trial",
            workload=one.workload,
            variant=one.name,
            trial=trial,
            full=one.workload in self.full,
            asked=one.asked,
            settings=one.settings,
            measures=found,
        )
        print(f"{one.label} #{trial}: {in_short(found)}", flush=True)
        return run

    def kernels(self, tower: Tower, one: Variant, expected: Mapping[str, int]) -> None:
        """Profile some steps of every kind in one repetition, and record the result."""
        watching = KernelProfile(expected)
        measure(tower, one, 7, self.limit, watching)
        for kind, found in watching.found().items():
            where = {"workload": one.workload, "variant": one.name, "step_kind": kind}
            self.lines.add("kernels", **where, **found)
            parts = sorted(found["parts"].items(), key=lambda item: -item[1])
            print(
                f"{one.label} {kind}: {found['us_per_step']:.0f} us a step, idle"
                f" {found['idle']:.3f}, {found['launches_per_step']:.0f} launches; "
                + "; ".join(f"{name} {micro:.0f}" for name, micro in parts),
                flush=True,
            )


def measure(
    tower: Tower,
    one: Variant,
    seed: int,
    limit: float,
    before_step: Before | None = None,
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
        ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in m["ms_by_kind"].items()),
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
