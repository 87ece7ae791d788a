"""Cold against warm prompts, tokens per second, and where the host's time goes.

python bench/engine/throughput.py [--model DIR] [--prompt 4000] [--batches 1 32] [--tokens 64]
    [--trials 3]

Runs the engine by hand on the inline executor: fixed seeds, no tokenizer, no HTTP. Medians
of wall clock; the header names machine, versions and how busy the machine was before.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import millpond
from millpond.engine.loop import Engine, EngineSettings
from millpond.engine.types import EngineRequest
from millpond.executor.uni import UniExecutor
from millpond.plan.sampling import SamplingParams
from millpond.runtime.worker import Worker, load

BUNDLED = Path(millpond.__file__).parent / "bundled" / "millpond-tiny-glm"
SESSION = 8192


class Clock:
    """Adds up the time spent in some functions."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, owner: Any, name: str, label: str) -> None:
        """Count calls of `owner.name` under `label`; calls within a watched one count twice."""
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent = time.perf_counter() - began
                self.seconds[label] = self.seconds.get(label, 0.0) + spent

        setattr(owner, name, timed)


class Bench:
    """One engine over one loaded model, and requests with reproducible prompts."""

    def __init__(self, model_dir: Path, seats: int) -> None:
        pages = (seats + 4) * (SESSION // 64) // 2
        self.worker: Worker = load(
            model_dir,
            num_slots=2 * seats + 16,
            num_pages=pages,
            num_seats=seats,
            session_len=SESSION,
        )
        settings = EngineSettings(
            max_batch_size=seats,
            max_prefill_tokens=2048,
            session_len=SESSION,
            checkpoint_budget=12,
        )
        self.engine = Engine(settings, UniExecutor(self.worker))
        self.vocab = self.worker.capabilities.vocab_size
        self.random = random.Random(0)
        self.number = 0

    def prompt(self, length: int) -> tuple[int, ...]:
        """Tokens nobody asked for before."""
        return tuple(self.random.randrange(self.vocab) for _ in range(length))

    def run(self, prompts: list[tuple[int, ...]], tokens: int) -> tuple[float, int]:
        """Serve them together: (seconds, decode steps)."""
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        for prompt in prompts:
            self.number += 1
            self.engine.submit(
                EngineRequest(request_id=str(self.number), tokens=prompt, params=params)
            )
        began, steps = time.perf_counter(), 0
        while self.engine.step():
            steps += 1
        return time.perf_counter() - began, steps


def cold_and_warm(bench: Bench, length: int, trials: int) -> list[str]:
    """Time to the first token of a new prompt, and of the same prompt again."""
    cold, warm, cached = [], [], 0
    for _ in range(trials):
        prompt = bench.prompt(length)
        cold.append(bench.run([prompt], 1)[0])
        before = bench.engine.stats().prefix_tokens.get("hit", 0)
        warm.append(bench.run([prompt], 1)[0])
        cached = bench.engine.stats().prefix_tokens.get("hit", 0) - before
    times = statistics.median(cold), statistics.median(warm)
    return [
        f"first token, {length} tokens, cold | {1e3 * times[0]:.0f} ms"
        f" ({length / times[0]:.0f} tokens/s)",
        f"first token, {length} tokens, warm ({cached} cached) | {1e3 * times[1]:.1f} ms"
        f" ({times[0] / times[1]:.0f} times faster)",
    ]


def decoding(bench: Bench, batch: int, tokens: int, trials: int) -> list[str]:
    """Tokens per second of a batch that decodes, and the share of everything but the forward."""
    prompts = [bench.prompt(128) for _ in range(batch)]
    bench.run(prompts, 2)  # every prompt is a hit from here on
    clock = Clock()
    runner = bench.worker.runner
    clock.watch(runner.model, "forward", "forward")
    clock.watch(runner.model, "logits", "forward")
    clock.watch(runner.verifier, "draw", "sampling")
    clock.watch(runner.staging, "batch", "staging")
    clock.watch(bench.engine._executor, "launch", "execute")
    rates, totals, steps = [], 0.0, 0
    for _ in range(trials):
        seconds, took = bench.run(prompts, tokens)
        rates.append(batch * tokens / seconds)
        totals, steps = totals + seconds, steps + took
    spent = clock.seconds
    host = totals - spent["execute"]
    overhead = totals - spent["forward"] - spent["sampling"]
    return [
        f"decode, batch {batch} | {statistics.median(rates):.0f} tokens/s,"
        f" {1e3 * totals / steps:.1f} ms a step",
        f"of which host (schedule, commit, streams) | {1e6 * host / steps:.0f} us a step,"
        f" {100 * host / totals:.1f} %",
        f"of which all but forward and sampling | {1e6 * overhead / steps:.0f} us a step,"
        f" {100 * overhead / totals:.1f} % (staging {1e6 * spent['staging'] / steps:.0f} us)",
    ]


def main() -> int:
    """Print one small table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--trials", type=int, default=3)
    given = parser.parse_args()
    machine = _machine()
    bench = Bench(given.model, max(given.batches))
    threads = bench.worker.num_threads or torch.get_num_threads()
    print(f"| {given.model.name} | {machine}, {threads} threads |")
    print("|---|---|")
    bench.run([bench.prompt(256)], 4)  # first calls are slower
    lines = cold_and_warm(bench, given.prompt, given.trials)
    for batch in given.batches:
        lines += decoding(Bench(given.model, batch), batch, given.tokens, given.trials)
    for line in lines:
        print(f"| {line} |")
    print(
        "\nWhat this does not show: large models, GPUs, drafts, HTTP and tokenizers; a tiny model"
        " makes the host look slower than it is."
    )
    return 0


def _machine() -> str:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [s for s in info.read_text().splitlines() if s.startswith("model name")]
        cpu = f"{len(names)} x {names[0].split(':')[1].strip()}" if names else cpu
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return (
        f"{cpu}, load {load_average:.1f} before, Python {platform.python_version()},"
        f" torch {torch.__version__}"
    )


if __name__ == "__main__":
    sys.exit(main())
