"""An engine over the symbolic device that runs ahead, and what is in flight in it."""

from __future__ import annotations

from typing import Any

from millpond.plan.step import StepPlan
from tests.support.towers import Tower

KS = (0, 1, 3)


def tower(num_drafts: int, *, late: bool = True, right: int = 1, **numbers: Any) -> Tower:
    """A tower whose plans run as late as possible, or at once."""
    made = Tower(num_draft_tokens=num_drafts, runs_ahead=True, **numbers)
    made.executor.is_late = lambda plan: late
    made.executor.right = lambda: right
    return made


def in_flight(made: Tower) -> list[StepPlan]:
    return [flight.plan for flight in made.executor.flights]


def until_live(made: Tower, steps: int = 3) -> None:
    """Past the prompts, with a step in flight between two calls."""
    for _ in range(steps):
        made.step()
    assert len(in_flight(made)) == 1
