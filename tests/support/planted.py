"""Plants a fault into a running engine: memory is damaged right before a step goes on from it.

It wraps the runner's one call, so the engine above it believes in what it handed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import pytest

from millpond.plan.step import Ended, Launched, Row, StepPlan, VerifyRow
from millpond.runtime.runner import ModelRunner
from tests.support.faults import Fault
from tests.support.handoff import Bench, Handoff

When = Literal["resume", "decode"]
"""Where a request goes on from a checkpoint, or where it draws its second token."""


class Planted:
    """One fault in every engine of this process, the bench's own worker left out.

    `other` is the text whose state and pages are mistaken for a request's own. `struck` counts the
    hand-offs that were damaged.
    """

    def __init__(self, bench: Bench, fault: Fault, when: When, other: Sequence[int]) -> None:
        self.bench, self.fault, self.when = bench, fault, when
        self.other = Handoff.at(bench, other, len(other), len(other))
        self.struck = 0
        self._tokens: dict[int, list[int]] = {}  # by seat: all that is known of its text
        self._new: dict[int, set[When]] = {}  # by seat: the hand-offs that are still to come

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """From here on, until `patch` is undone."""
        launch, own = ModelRunner.launch, self.bench.worker.runner

        def damaged(runner: ModelRunner, plan: StepPlan) -> Launched:
            if runner is own:
                return launch(runner, plan)
            self._before(runner, plan)
            result = launch(runner, plan).result()  # the next step may be damaged by what it says
            for emitted in result.emitted:
                self._tokens[emitted.seat].append(emitted.token)
            return Ended(result)

        patch.setattr(ModelRunner, "launch", damaged)

    def _before(self, runner: ModelRunner, plan: StepPlan) -> None:
        for seated in plan.seat_loads:
            self._tokens[seated.seat] = list(seated.tokens)
            self._new[seated.seat] = {"resume", "decode"}
        for when, row in _rows(plan):
            awaited = self._new[row.seat]
            if when in awaited:
                awaited.discard(when)
                if when == self.when and row.state_in is not None:
                    self._strike(runner, plan, row)

    def _strike(self, runner: ModelRunner, plan: StepPlan, row: Row | VerifyRow) -> None:
        tokens = self._tokens[row.seat][: row.start]
        case = Handoff.at(self.bench, tokens, len(tokens), len(tokens))
        left = self.fault(case, self.other)
        runner.arenas.slots.storage[row.state_in] = left.slot
        for index, page in enumerate(self._pages(runner, plan, row)[: len(left.pages)]):
            runner.arenas.pages.storage[page] = left.pages[index]
        self.struck += 1

    def _pages(self, runner: ModelRunner, plan: StepPlan, row: Row | VerifyRow) -> list[int]:
        """The seat's pages, those it is given in this plan included."""
        table: list[int] = runner.staging.page_table[row.seat].tolist()
        if any(seated.seat == row.seat for seated in plan.seat_loads):
            table = []
        for update in plan.page_updates:
            if update.seat == row.seat:
                table[update.first :] = update.pages
        return [page for page in table if page >= 0]


def _rows(plan: StepPlan) -> Iterator[tuple[When, Row | VerifyRow]]:
    for row in plan.prefill:
        yield "resume", row
    for row in plan.decode + plan.verify:
        yield "decode", row
