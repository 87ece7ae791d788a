"""A step that never ends: somebody notices, says what it was, and lets nobody wait for it."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from millpond.engine.loop import Engine
from millpond.engine.watchdog import GivenUp, Watchdog
from millpond.errors import Unavailable
from millpond.plan.step import Row, StepPlan
from millpond.state.lease import Seat, SlotId
from tests.support.towers import Tower, collect


class Stuck:
    """Passes plans on; from step `first` on a step, or its launch, ends when `release` is set."""

    def __init__(self, inner, first: int = 1, *, in_launch: bool = False) -> None:
        self.inner, self.first, self.in_launch = inner, first, in_launch
        self.capabilities = inner.capabilities
        self.release = threading.Event()
        self.stuck = threading.Event()

    def _wait(self, plan) -> None:
        if plan.step >= self.first:
            self.stuck.set()
            assert self.release.wait(60)

    def launch(self, plan):
        if self.in_launch:
            self._wait(plan)
        return _Late(self, plan, self.inner.launch(plan))

    def close(self) -> None:
        self.inner.close()


class _Late:
    def __init__(self, executor: Stuck, plan, launched) -> None:
        self.executor, self.plan, self.launched = executor, plan, launched

    def result(self):
        if not self.executor.in_launch:
            self.executor._wait(self.plan)
        return self.launched.result()


def time_passes(engine: Engine) -> None:
    """More of it than a step may take; then the watchdog looks."""
    engine._watchdog._clock = lambda: time.monotonic() + 2e6
    assert engine._watchdog.look()


@pytest.mark.parametrize("in_launch", [False, True])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_step_that_never_ends_ends_every_request_and_the_engine(caplog, in_launch, runs_ahead):
    tower = Tower(max_batch_size=1, watchdog_seconds=1e6, runs_ahead=runs_ahead)
    executor = Stuck(tower.executor, first=4, in_launch=in_launch)
    engine = Engine(tower.settings, executor)
    streams = [engine.submit(tower.request(range(70), max_tokens=50)) for _ in range(3)]
    engine.start()
    assert executor.stuck.wait(30)
    with caplog.at_level(logging.ERROR, "millpond.engine.watchdog"):
        time_passes(engine)
        for stream in streams:  # the one that runs, and those that wait
            ((_, reason),) = collect(stream).values()
            assert reason == "error"
    assert not engine.healthy
    assert "has not ended" in engine.failure
    assert "watchdog_timeout" in engine.failure
    with pytest.raises(Unavailable, match="has not ended"):
        engine.submit(tower.request(range(5)))
    engine.flush_cache()
    (record,) = [r for r in caplog.records if r.name == "millpond.engine.watchdog"]
    for words in ("step ", "known and", "of r0", "millpond-engine: ", "(test_watchdog.py:"):
        assert words in record.getMessage()
    assert "\n" not in record.getMessage()
    executor.release.set()
    engine.close()
    assert tower.executor.closed
    assert "has not ended" in engine.failure  # the reason stays the first one


@pytest.mark.parametrize("drain", [True, False])
def test_an_engine_is_closed_though_its_step_never_ends(monkeypatch, drain):
    monkeypatch.setattr("millpond.engine.intake.FAREWELL", 0.05)
    tower = Tower(watchdog_seconds=1e6)
    executor = Stuck(tower.executor)
    engine = Engine(tower.settings, executor)
    stream = engine.submit(tower.request(range(70)))
    engine.start()
    assert executor.stuck.wait(30)
    closing = threading.Thread(target=engine.close, args=(drain,))
    closing.start()
    time_passes(engine)
    closing.join(30)
    assert not closing.is_alive()
    assert [reason for _, reason in collect(stream).values()] == ["error"]
    assert not tower.executor.closed
    executor.release.set()
    engine._intake.thread.join(30)
    assert tower.executor.closed


def plan(step: int) -> StepPlan:
    row = Row(
        request="r", seat=Seat(0), start=0, tokens=(1,) * 7, state_in=None, state_out=SlotId(0)
    )
    return StepPlan(step=step, prefill=(row,))


class Flying:
    """A launched step that does `meanwhile`, and then ends."""

    def __init__(self, meanwhile) -> None:
        self.result = meanwhile
        self.draw = lambda masks: meanwhile()


class Device:
    """Launches whatever it is told."""

    def __init__(self) -> None:
        self.meanwhile = lambda: None

    def launch(self, plan):
        return Flying(lambda: self.meanwhile())


def watched(limit: float = 10.0):
    """(device, watchdog, what it gave up for, its clock as a list of one number)."""
    device, given_up, now = Device(), [], [0.0]
    return device, Watchdog(device, limit, given_up.append, lambda: now[0]), given_up, now


def test_a_step_counts_from_the_end_of_the_one_before_it():
    device, dog, given_up, now = watched()
    seen = []

    def meanwhile():
        now[0] += 9.0
        seen.append(dog.look())

    device.meanwhile = meanwhile
    flights = [dog.launch(plan(1))]
    for step in range(2, 6):
        flights.append(dog.launch(plan(step)))
        flights.pop(0).result()
    assert seen == [False] * 4
    now[0] += 100.0  # nobody waits for it: the host is late, not the device
    assert not dog.look()
    device.meanwhile = lambda: (now.__setitem__(0, now[0] + 100.0), dog.look())
    with pytest.raises(GivenUp):
        flights.pop().result()
    assert len(given_up) == 1
    assert given_up[0].startswith("step 5 has not ended after")
    assert dog.tripped
    with pytest.raises(GivenUp):
        dog.launch(plan(6))
    assert len(given_up) == 1


def test_a_step_whose_rest_is_launched_too_long_is_given_up():
    device, dog, given_up, now = watched()
    flight = dog.launch(plan(1))
    flight.draw(())
    assert given_up == []
    device.meanwhile = lambda: (now.__setitem__(0, now[0] + 100.0), dog.look())
    with pytest.raises(GivenUp):
        flight.draw(())
    assert len(given_up) == 1


def test_without_a_step_in_flight_nothing_is_given_up():
    _, dog, given_up, now = watched()
    dog.launch(plan(1)).result()
    now[0] = 1e6
    assert not dog.look()
    assert given_up == []


def test_a_limit_beyond_what_a_thread_can_wait_is_one_too():
    _, dog, _, _ = watched(1e11)
    looking = threading.Thread(target=dog._run)
    looking.start()
    looking.join(0.1)
    assert looking.is_alive()
    dog.stop()
    looking.join(30)
    assert not looking.is_alive()


def test_an_engine_without_a_watchdog_has_none_and_one_stepped_by_hand_is_left_alone():
    tower = Tower(watchdog_seconds=0.0)
    assert tower.engine._watchdog is None
    tower = Tower(watchdog_seconds=1e-9)
    asked = tower.request(range(100))
    assert tower.answers([asked]) == [tower.naive(asked)]
    assert tower.engine.healthy
