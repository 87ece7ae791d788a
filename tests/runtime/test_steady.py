"""Recorded steps of live rows: byte for byte what steps run one by one leave and report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from millpond.plan.sampling import SamplingParams
from millpond.plan.step import StepPlan, StepResult
from millpond.runtime.graphs import CallAgain
from millpond.runtime.runner import ModelRunner
from tests.exactness.drafting import DraftDriver
from tests.exactness.driver import Run
from tests.exactness.families import FAMILIES, executor
from tests.exactness.prompts import BASE, OTHER
from tests.support.recording import Truth

SEATS = 5
DRAWS = tuple(
    SamplingParams(max_tokens=80, ignore_eos=True, **given)
    for given in (
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 11},
        {"temperature": 1.1, "top_k": 9, "top_p": 0.8, "min_p": 0.01, "seed": 7},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "seed": 2**63 + 5},
    )
)
"""How the seats draw: by noise and filters alone, all in one batch."""

Pair = tuple[Run, Run]


def prompt(index: int) -> tuple[int, ...]:
    """Some that end right before a page does, and some far from it."""
    return (BASE, OTHER)[index % 2][index : index + (59, 118, 62, 30, 124)[index]]


@cache
def text(family: str, index: int, params: SamplingParams | None = None) -> tuple[int, ...]:
    """All tokens of the sequence, as plain steps without drafts make them."""
    driver = DraftDriver(executor(family, Truth(), "alone", num_slots=4, num_pages=6, num_seats=1))
    run = driver.start(prompt(index), params or DRAWS[index])
    driver.step([(run, len(run.prompt), ())])
    driver.decode([run], 60)
    return tuple(run.tokens)


class Twins:
    """One sequence of plans on two ranks: one runs every step, the other repeats recordings."""

    def __init__(self, family: str, num_drafts: int) -> None:
        sizes = {"num_slots": 60, "num_pages": 40, "num_seats": SEATS, "num_drafts": num_drafts}
        self.family, self.num_drafts = family, num_drafts
        self.plain, self.recorded = (
            DraftDriver(executor(family, Truth(), "steady", **sizes)) for _ in range(2)
        )
        self.runner.capture(capturer=CallAgain())
        self.results: list[StepResult] = []
        for driver in (self.plain, self.recorded):
            driver.executor = Noting(driver.executor, self.results)  # type: ignore[assignment]

    @property
    def runner(self) -> ModelRunner:
        """The one that repeats recordings."""
        return self.recorded.executor.worker.runner

    def both(self, act: Callable[[DraftDriver, int], Any]) -> tuple[Any, Any]:
        """Do the same with both; what is in memory afterwards, and was reported, is equal."""
        found, told = [], []
        for number, driver in enumerate((self.plain, self.recorded)):
            del self.results[:]
            found.append(act(driver, number))
            told.append(list(self.results))
        assert told[0] == told[1]
        for mine, other in zip(memory(self.plain), memory(self.recorded), strict=True):
            assert torch.equal(mine, other)
        return found[0], found[1]

    def begin(self, index: int, params: SamplingParams | None = None) -> Pair:
        """A sequence that has drawn its first token."""
        wanted = params or DRAWS[index]
        pair = self.both(lambda driver, _: driver.start(prompt(index), wanted))
        self.both(lambda driver, n: driver.step([(pair[n], len(pair[n].prompt), ())]))
        return pair

    def verify(self, pairs: Sequence[Pair], *, right: int = 0, export: bool = False) -> None:
        """One step of these; the first `right` of the drafts that wait are made right before."""

        def act(driver: DraftDriver, number: int) -> None:
            runs = [pair[number] for pair in pairs]
            for run in runs:
                self._plant(driver, run, right)
            driver.verify(
                (run, self.num_drafts, len(run.tokens) if export else None) for run in runs
            )

        self.both(act)

    def _plant(self, driver: DraftDriver, run: Run, right: int) -> None:
        """Overwrite waiting drafts by what is going to be drawn."""
        whole = next(t for t in self.texts if t[: len(run.tokens)] == tuple(run.tokens))
        coming = torch.tensor(whole[len(run.tokens) :][:right], dtype=torch.int64)
        driver.executor.worker.runner.staging.counters._table[5 : 5 + right, run.seat] = coming

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """Of all sequences that draw as `DRAWS` says."""
        return [text(self.family, index) for index in range(SEATS)]


class Noting:
    """An executor that keeps what it answered."""

    def __init__(self, inner: Any, results: list[StepResult]) -> None:
        self.inner = inner
        self.results = results

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, plan: StepPlan) -> Any:
        """Run a plan, and ask for its result."""
        launched = self.inner.launch(plan)
        self.results.append(launched.result())
        return launched


def memory(driver: DraftDriver) -> list[torch.Tensor]:
    """All a rank remembers between steps."""
    runner = driver.executor.worker.runner
    arenas, staging = runner.arenas, runner.staging
    counters = staging.counters.of(torch.arange(SEATS))
    return [
        *(a.storage for a in (arenas.slots, arenas.pages, arenas.seats)),
        *(getattr(counters, n) for n in ("base", "pending", "first", "num_drafts", "parity")),
        counters.drafts,
        staging.page_table,
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_recorded_steps_leave_and_report_what_single_ones_do(family: str, num_drafts: int) -> None:
    twins = Twins(family, num_drafts)
    pairs = [twins.begin(index) for index in range(SEATS)]
    assert twins.runner.num_replays == 0
    # Other rows every time, of every number; pages are added on the way, and exports passed.
    batches = ([0], [1, 2], [0, 1, 2], [4, 3, 2, 1], [0, 1, 2, 3, 4], [3], [4, 0], [2, 3, 4])
    for step, some in enumerate(batches):
        rows = [pairs[i] for i in some]
        twins.verify(rows, right=step % (num_drafts + 1), export=step % 3 == 0)
    for step in range(4):
        twins.verify(pairs, right=min(step, num_drafts))
    assert twins.runner.num_replays == 2 * (len(batches) + 4)
    assert {len(run.pages) for run, _ in pairs} >= {2, 3}
    assert any(accepted for _, accepted in twins.recorded.counts) == (num_drafts > 0)
    for index, (run, _) in enumerate(pairs):
        assert tuple(run.tokens) == text(family, index)[: len(run.tokens)]
