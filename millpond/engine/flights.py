"""The steps in flight, two at most, in the order of their launch. Knows plans, and no ledger."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

from millpond.engine.planned import Scheduled
from millpond.errors import StepFailed
from millpond.plan.step import Launched, SeatMask, StepPlan, StepResult

logger = logging.getLogger(__name__)


class Launcher(Protocol):
    """Whatever launches plans: an executor, or a watchdog before it."""

    def launch(self, plan: StepPlan) -> Launched:
        """Launch a plan, as `Executor.launch`."""


class Flight(NamedTuple):
    """A step that was launched, and when, in seconds of the engine's clock."""

    scheduled: Scheduled
    launched: Launched
    began: float


class Landed(NamedTuple):
    """A step that has ended, after so many `seconds`.

    Without a `result` it failed: `why`, and by which `error` where the executor cannot go on. Then
    `after` is the step that was in flight behind it, if one was: that has ended too.
    """

    scheduled: Scheduled
    seconds: float
    result: StepResult | None
    why: str = ""
    error: Exception | None = None
    after: Scheduled | None = None


class Flights:
    """Launches steps and waits for them, one after the other. `clock` is in seconds."""

    def __init__(self, executor: Launcher, clock: Callable[[], float]) -> None:
        self._executor = executor
        self._clock = clock
        self._flights: list[Flight] = []
        self._landed = 0.0

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def scheduled(self) -> list[Scheduled]:
        """The steps in flight."""
        return [flight.scheduled for flight in self._flights]

    def launch(self, scheduled: Scheduled) -> None:
        """Hand a plan to the device."""
        began = self._clock()
        self._flights.append(Flight(scheduled, self._executor.launch(scheduled.plan), began))

    def draw(self, masks: tuple[SeatMask, ...]) -> None:
        """Tell the older step what its seats may draw."""
        self._flights[0].launched.draw(masks)

    def land(self) -> Landed:
        """Wait for the older step."""
        scheduled, launched, began = self._flights[0]
        result, why, fatal = None, "", None
        try:
            result = launched.result()
        except StepFailed as error:
            logger.warning("step %d failed: %s", scheduled.plan.step, error)
            why = str(error)
        except Exception as error:
            logger.exception("the executor failed; no request is served any more")
            why, fatal = str(error), error
        del self._flights[0]
        # One that was launched early began when the one before it ended.
        began, self._landed = max(began, self._landed), self._clock()
        after = None if result is not None else self._wreck()
        return Landed(scheduled, self._landed - began, result, why, fatal, after)

    def abandon(self) -> None:
        """Wait for nothing any more."""
        self._flights.clear()

    def _wreck(self) -> Scheduled | None:
        """The step after a failed one, once the device is done with it, whatever it came to."""
        if not self._flights:
            return None
        scheduled, launched, _ = self._flights.pop()
        try:
            launched.result()
        except Exception as error:  # noqa: BLE001 -- what it went on from was lost already
            logger.warning("step %d failed with the one before: %s", scheduled.plan.step, error)
        return scheduled
