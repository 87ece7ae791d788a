"""How many drafts are accepted: by number of drafts and by task, in cold runs and right after hits.

python bench/engine/acceptance.py [--model DIR] [--drafts 1 3 5] [--tasks copy chat ...]
    [--count 4] [--tokens 48] [--temperature 0] [--seed 0]

Held-out dialogues of the generator go through the whole engine, stepped by hand on the inline
executor: every prompt twice, so that the second answer starts from a checkpoint. Acceptance is
accepted / verified draft tokens; tokens a step is what a row with drafts draws on average.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import millpond
from millpond.engine.loop import Engine, EngineSettings, RequestStream
from millpond.engine.types import EngineRequest
from millpond.evaluate.cases import Case, Dialect
from millpond.executor.uni import UniExecutor
from millpond.plan.sampling import SamplingParams
from millpond.runtime.worker import load
from millpond.tasks import task_names

BUNDLED = Path(millpond.__file__).parent / "bundled" / "millpond-tiny-glm"
SESSION = 4096
SEATS = 8


@dataclass
class Tally:
    """What became of drafts: rows that verified any, tokens verified, accepted, by position."""

    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: Counter[int] = field(default_factory=Counter)

    def add(self, drafted: int, accepted: int) -> None:
        """One row."""
        self.rows += 1
        self.drafted += drafted
        self.accepted += accepted
        self.by_position.update(range(accepted))

    def merge(self, other: Tally) -> None:
        """Those of another task as well."""
        self.rows += other.rows
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.by_position.update(other.by_position)

    @property
    def acceptance(self) -> float:
        """Accepted of verified."""
        return self.accepted / max(1, self.drafted)

    @property
    def tokens_a_step(self) -> float:
        """Tokens a row with drafts draws."""
        return 1 + self.accepted / max(1, self.rows)


class Bench:
    """One engine with a number of drafts, and how its requests are drawn."""

    def __init__(
        self, model_dir: Path, num_drafts: int, params: SamplingParams, ends: tuple[int, ...]
    ) -> None:
        worker = load(
            model_dir,
            num_slots=2 * SEATS + 24,
            num_pages=SEATS * SESSION // 64,
            num_seats=SEATS,
            session_len=SESSION,
            num_draft_tokens=num_drafts,
        )
        settings = EngineSettings(
            max_batch_size=SEATS,
            max_prefill_tokens=1024,
            session_len=SESSION,
            checkpoint_budget=20,
            eos_token_ids=ends,
        )
        self.engine = Engine(settings, UniExecutor(worker))
        self.params = params
        self.number = 0

    def ask(self, cases: list[Case]) -> tuple[Tally, int]:
        """Answer them together: what became of the drafts, and how many prompts were hits."""
        streams: list[RequestStream] = []
        for case in cases:
            self.number += 1
            request = EngineRequest(
                request_id=str(self.number), tokens=case.prompt, params=self.params
            )
            streams.append(self.engine.submit(request))
        while self.engine.step():
            pass
        tally, hits = Tally(), 0
        for stream in streams:
            for delta in stream:
                if delta.drafted:
                    tally.add(delta.drafted, delta.accepted)
                if delta.outcome is not None:
                    hits += delta.outcome.reason == "hit"
        return tally, hits


def main() -> int:
    """Print one table for every number of drafts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--tasks", nargs="+", choices=task_names(), default=task_names())
    parser.add_argument("--count", type=int, default=4, help="dialogues of each task")
    parser.add_argument("--tokens", type=int, default=48, help="longest answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first dialogue")
    given = parser.parse_args()
    params = SamplingParams(max_tokens=given.tokens, temperature=given.temperature, seed=1)
    dialect = Dialect(given.model)
    cases = {
        task: [dialect.case(task, given.seed + i) for i in range(given.count)]
        for task in given.tasks
    }
    print(f"{given.model.name}, temperature {given.temperature}, {given.count} dialogues a task")
    for num_drafts in given.drafts:
        bench = Bench(given.model, num_drafts, params, tuple(dialect.ends))
        print(f"\n| {num_drafts} drafts | acceptance | after a hit | tokens a step | by position |")
        print("|---|---|---|---|---|")
        whole, whole_warm = Tally(), Tally()
        for task, asked in cases.items():
            cold, _ = bench.ask(asked)
            warm, hits = bench.ask(asked)
            whole.merge(cold)
            whole_warm.merge(warm)
            _print(task, cold, warm, f"{hits} of {len(asked)} hit")
        _print("all", whole, whole_warm, "")
    return 0


def _print(name: str, cold: Tally, warm: Tally, hits: str) -> None:
    positions = [cold.by_position[at] / max(1, cold.rows) for at in sorted(cold.by_position)]
    print(
        f"| {name} | {cold.acceptance:.2f} | {warm.acceptance:.2f} {f'({hits})' if hits else ''}"
        f" | {cold.tokens_a_step:.2f} | {' '.join(f'{p:.2f}' for p in positions)} |"
    )


if __name__ == "__main__":
    sys.exit(main())
