"""Puts traffic through an engine, stepped by hand, and says what came of it.

Times are the engine's: a token counts when its step is committed. Knows neither models nor
workloads.
"""

from __future__ import annotations

import heapq
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.engine.timed import Step, StepLog, Timed
from bench.engine.traffic import Ask, Traffic
from millpond.engine.loop import Engine
from millpond.engine.types import Delta, EngineRequest, EngineStats
from millpond.plan.sampling import SamplingParams

SAMPLE_STATS = 16
"""Every so many steps slots and pages are looked at, and at each of the first ones."""


@dataclass(slots=True)
class Track:
    """One request on its way; times on the clock, 0 until something came."""

    ask: Ask
    submitted: float
    first: float = 0.0
    last: float = 0.0
    out: int = 0
    cached: int = 0
    answer: list[int] = field(default_factory=list)
    finished: Counter[str] = field(default_factory=Counter)


class Recorder:
    """The sink of an engine: when which tokens came."""

    def __init__(self) -> None:
        self.tracks: dict[str, Track] = {}
        self.over: list[Track] = []

    def __call__(self, deltas: list[Delta]) -> None:
        """The deltas of one step."""
        now = time.perf_counter()
        for delta in deltas:
            track = self.tracks[delta.request_id]
            if delta.outcome is not None:
                track.cached = delta.outcome.cached_tokens
            if delta.tokens:
                track.first = track.first or now
                track.last = now
                track.out += len(delta.tokens)
                if delta.sample_index == 0:
                    track.answer += [one.token for one in delta.tokens]
            if delta.finish_reason is not None:
                track.finished[delta.finish_reason] += 1
                if track.finished.total() == track.ask.n:
                    self.over.append(track)


@dataclass(frozen=True, slots=True)
class Watched:
    """An engine, its sink, and its executor."""

    engine: Engine
    recorder: Recorder
    timed: Timed

    def run(self, traffic: Traffic, limit: float = float("inf")) -> Run:
        """Serve it to its end, or for `limit` seconds; then what is left is broken off."""
        self.recorder.tracks.clear()
        self.timed.log = StepLog()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        counted = self.timed.counts()
        run = Run(time.perf_counter(), self.engine.stats())
        began = run.began
        waiting: list[tuple[float, int, Ask]] = []
        self._expect(waiting, traffic.first(), began)
        while True:
            now = time.perf_counter()
            while waiting and waiting[0][0] <= now:
                due, _, ask = heapq.heappop(waiting)
                self._submit(ask, max(due, began))
            if now - began > limit and not run.cut:
                run.cut = True
                waiting.clear()
                for name in self.recorder.tracks:
                    self.engine.abort(name)
            log, known, waited = self.timed.log, len(self.timed.log.steps), self.timed.log.waiting
            busy = self.engine.step()
            run.spend(time.perf_counter() - now - (log.waiting - waited), log.steps[known:])
            if len(log.steps) < SAMPLE_STATS or len(log.steps) % SAMPLE_STATS == 0:
                run.look(self.engine.stats())
            over, self.recorder.over = self.recorder.over, []
            for track in over:
                run.tracks.append(track)
                if not run.cut:
                    more = traffic.after(track.ask, tuple(track.answer))
                    self._expect(waiting, more, time.perf_counter())
            if not busy:
                if not waiting:
                    break
                time.sleep(max(0.0, waiting[0][0] - time.perf_counter()))
        run.end(self.engine.stats(), self.timed.log)
        now_counted = self.timed.counts()
        run.graph_replays = now_counted.graph_replays - counted.graph_replays
        run.late_compiles = now_counted.late_compiles - counted.late_compiles
        return run

    def _expect(self, waiting: list[tuple[float, int, Ask]], asks: list[Ask], known: float) -> None:
        for ask in asks:
            heapq.heappush(waiting, (known + ask.at, len(self.recorder.tracks) + len(waiting), ask))

    def _submit(self, ask: Ask, due: float) -> None:
        name = f"r{len(self.recorder.tracks)}"
        self.recorder.tracks[name] = Track(ask, due)
        params = SamplingParams(max_tokens=ask.out, temperature=0.0, ignore_eos=True, n=ask.n)
        self.engine.submit(EngineRequest(request_id=name, tokens=ask.tokens, params=params))


@dataclass(slots=True)
class Run:
    """One drive, and what it measured."""

    began: float
    before: EngineStats
    cut: bool = False
    host: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    tracks: list[Track] = field(default_factory=list)
    slots_peak: int = 0
    pages_peak: int = 0
    graph_replays: int = 0
    late_compiles: int = 0  # kernels that a request waited for
    after: EngineStats | None = None
    log: StepLog = field(default_factory=StepLog)

    def spend(self, host: float, launched: list[Step]) -> None:
        """Seconds of the host beside waiting, in a turn of the engine that launched these steps.

        Counted, without the launches, as that of steady steps unless one of them was not.
        """
        steady = all(step.steady for step in launched)
        self.host[steady] += host - sum(step.launching for step in launched)

    def look(self, stats: EngineStats) -> None:
        """What is in use at this moment."""
        self.slots_peak = max(self.slots_peak, stats.slots_total - stats.slots_free)
        self.pages_peak = max(self.pages_peak, stats.pages_used)

    def end(self, stats: EngineStats, log: StepLog) -> None:
        """The last look."""
        self.look(stats)
        self.after, self.log = stats, log

    def gained(self, name: str) -> int:
        """How much a counter of the engine grew."""
        return int(getattr(self.after, name) - getattr(self.before, name))

    def measures(self) -> dict[str, Any]:
        """Plain numbers, named with their units."""
        told = [t for t in self.tracks if t.out]
        wall = max((t.last for t in told), default=self.began) - self.began
        wall = wall or float("nan")
        out = sum(t.out for t in told)
        prompt = sum(len(t.ask.tokens) for t in self.tracks)
        first = [t.first - t.submitted for t in told]
        cold = [t.first - t.submitted for t in told if t.ask.label == "cold"]
        finished: Counter[str] = Counter()
        for track in self.tracks:
            finished += track.finished
        found: dict[str, Any] = {
            "cut": self.cut,
            "requests": len(self.tracks),
            "finished": dict(finished),
            "short": sum(t.out != t.ask.out * t.ask.n for t in self.tracks),
            "wall_s": wall,
            "prompt_tokens": prompt,
            "output_tokens": out,
            "output_tokens_per_s": out / wall,
            "total_tokens_per_s": (out + prompt) / wall,
            "ttft_mean_s": statistics.fmean(first) if first else None,
            "ttft_p50_s": percentile(first, 50),
            "ttft_p99_s": percentile(first, 99),
            "ttft_last_s": max((t.first for t in told), default=self.began) - self.began,
            "ttft_by_label_s": by_label(told, statistics.fmean),
            "ttft_p99_by_label_s": by_label(told, lambda times: percentile(times, 99) or 0.0),
            "ttft_cold_p99_s": percentile(cold, 99),
            "tpot_mean_ms": mean_tpot(told),
            "cached_tokens": sum(t.cached for t in self.tracks),
        }
        return found | self._steps(told) | self._engine() | memory()

    def _steps(self, told: list[Track]) -> dict[str, Any]:
        """Where the time of steps went; at the end is after the last first token."""
        log, steps = self.log, len(self.log.steps)
        by_kind, steady = log.by_kind(), sum(step.steady for step in log.steps)
        count = {True: max(1, steady), False: max(1, steps - steady)}
        longest = max((t.ask.out for t in told), default=0)
        alone = None
        if told and longest > 1 and not self.cut:
            begin = max(t.first for t in told)
            alone = 1e3 * (max(t.last for t in told) - begin) / (longest - 1)
        return {
            "steps": steps,
            "steps_with_prompts": steps - steady,
            "ms_per_token_at_the_end": alone,
            "steps_by_kind": {kind: of for kind, (of, _) in by_kind.items()},
            "ms_by_kind": {kind: 1e3 * spent / of for kind, (of, spent) in by_kind.items()},
            "rows_per_step": log.live_rows / max(1, steps),
            "engine_us_steady": 1e6 * self.host[True] / count[True],
            "launch_us_steady": 1e6 * log.launching(True) / count[True],
            "engine_us_with_prompts": 1e6 * self.host[False] / count[False],
            "launch_us_with_prompts": 1e6 * log.launching(False) / count[False],
            "wait_us_per_step": 1e6 * log.waiting / max(1, steps),
            "idle_between_steps": log.idle(),
            "idle_when_steady": log.idle_when_steady(),
            "late_steady": sum(step.late and step.steady for step in log.steps),
            "graph_replays": self.graph_replays,
            "late_compiles": self.late_compiles,
            "computed_prompt_tokens": log.prompt_tokens,
            "drawn_tokens": log.drawn,
            "wasted_tokens": log.drawn - self.gained("generated_tokens"),
        }

    def _engine(self) -> dict[str, Any]:
        """What the engine's own counters say."""
        after = self.after or self.before
        published = Counter(after.checkpoints_published)
        published.subtract(self.before.checkpoints_published)
        skipped = Counter(after.checkpoints_skipped)
        skipped.subtract(self.before.checkpoints_skipped)
        return {
            "draft_tokens": self.gained("draft_tokens"),
            "accepted_tokens": self.gained("accepted_tokens"),
            "published": {k: v for k, v in published.items() if v},
            "skipped": {k: v for k, v in skipped.items() if v},
            "evicted": self.gained("checkpoints_evicted"),
            "preemptions": self.gained("preemptions"),
            "held_s": after.held_seconds - self.before.held_seconds,
            "nonfinite": self.gained("nonfinite"),
            "steps_failed": self.gained("steps_failed"),
            "slots_peak": self.slots_peak,
            "slots_total": after.slots_total,
            "pages_peak": self.pages_peak,
            "pages_total": after.pages_total,
        }


def percentile(values: list[float], percent: int) -> float | None:
    """The smallest value that `percent` of them do not exceed."""
    if not values:
        return None
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, max(0, -(-len(ranked) * percent // 100) - 1))]


def mean_tpot(told: list[Track]) -> float | None:
    """Milliseconds between tokens of a request, the mean over requests (of one sample)."""
    each = [(t.last - t.first) / (t.out - 1) for t in told if t.ask.n == 1 and t.out > 1]
    return 1e3 * statistics.fmean(each) if each else None


def by_label(told: list[Track], of: Callable[[list[float]], float]) -> dict[str, float]:
    """What `of` says of the times to the first token of every group."""
    groups: dict[str, list[float]] = {}
    for track in told:
        if track.ask.label:
            groups.setdefault(track.ask.label, []).append(track.first - track.submitted)
    return {label: of(times) for label, times in groups.items()}


def memory() -> dict[str, Any]:
    """Peaks of this process, in GiB."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return {
            "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
            "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
            "device_used_gib": (total - free) / 2**30,
        }
    return {"peak_resident_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
