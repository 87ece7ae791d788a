"""Two ranks that run the same plans: one step by step, the other by repeating recordings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec
import torch

from millpond.plan.sampling import SamplingParams
from millpond.plan.step import StepPlan, StepResult
from millpond.runtime.graphs import CallAgain
from millpond.runtime.runner import ModelRunner
from tests.exactness.drafting import DraftDriver
from tests.exactness.driver import Run
from tests.exactness.families import Kind, executor
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


def kind_of(which: str | Kind) -> Kind:
    return which if isinstance(which, Kind) else Kind(which)


@cache
def texts(family: str | Kind, special: SamplingParams | None = None) -> list[tuple[int, ...]]:
    """All tokens of every sequence, as plain steps without drafts make them.

    `special`: of sequence 1 alone, if it draws so.
    """
    sizes = {"num_slots": SEATS, "num_pages": 4 * SEATS, "num_seats": SEATS}
    driver = DraftDriver(executor(family, Truth(), "alone", **sizes))
    wanted = dict(enumerate(DRAWS)) if special is None else {1: special}
    runs = [driver.start(prompt(index), params) for index, params in wanted.items()]
    driver.step((run, len(run.prompt), ()) for run in runs)
    driver.decode(runs, 56 if special is None else 20)
    return [tuple(run.tokens) for run in runs]


class Twins:
    """One sequence of plans on two ranks: one runs every step, the other repeats recordings."""

    def __init__(self, family: str | Kind, num_drafts: int) -> None:
        sizes = {"num_slots": 60, "num_pages": 40, "num_seats": SEATS, "num_drafts": num_drafts}
        self.family, self.num_drafts = family, num_drafts
        self.plain, self.recorded = (
            DraftDriver(executor(family, Truth(), "steady", **sizes)) for _ in range(2)
        )
        self.device = kind_of(family).device
        self.runner.capture(capturer=None if self.device == "cuda" else CallAgain())
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
                self.plant(driver, run, right)
            driver.verify(
                (run, self.num_drafts, len(run.tokens) if export else None) for run in runs
            )

        self.both(act)

    def plant(self, driver: DraftDriver, run: Run, right: int) -> None:
        """Overwrite waiting drafts by what is going to be drawn."""
        if not right:
            return
        whole = next(t for t in texts(self.family) if t[: len(run.tokens)] == tuple(run.tokens))
        coming = torch.tensor(whole[len(run.tokens) :][:right], device=self.device)
        driver.executor.worker.runner.staging.counters.table[5 : 5 + right, run.seat] = coming


class Noting:
    """An executor that keeps what it answered; `extra` is added to every plan."""

    def __init__(self, inner: Any, results: list[StepResult]) -> None:
        self.inner = inner
        self.results = results
        self.extra: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, plan: StepPlan) -> Any:
        """Run a plan, and ask for its result."""
        launched = self.inner.launch(msgspec.structs.replace(plan, **self.extra))
        self.results.append(launched.result())
        return launched


def memory(driver: DraftDriver) -> list[torch.Tensor]:
    """All a rank remembers between steps."""
    runner = driver.executor.worker.runner
    arenas, staging = runner.arenas, runner.staging
    counters = staging.counters.of(torch.arange(SEATS, device=staging.device))
    return [
        *(a.storage for a in (arenas.slots, arenas.pages, arenas.seats)),
        *(getattr(counters, n) for n in ("base", "pending", "first", "num_drafts", "parity")),
        counters.drafts,
        staging.page_table,
    ]
