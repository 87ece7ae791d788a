"""Priorities decide who goes first, and nobody waits for ever."""

from __future__ import annotations

import random

import pytest

from tests.support.towers import Tower, collect


def prompt(number: int, length: int) -> list[int]:
    return random.Random(number).choices(range(50), k=length)


def admitted(tower: Tower) -> list[str]:
    """Requests in the order of their first row."""
    return list(dict.fromkeys(row.request for plan in tower.executor.plans for row in plan.prefill))


def steps_under_load(tower: Tower, limit: int, alone: int = 0, **how: int) -> int | None:
    """Steps until a request of low priority ends while ever more of high priority come."""
    stream = tower.engine.submit(tower.request(prompt(0, 100), **how))
    for _ in range(alone):
        tower.step()
    for step in range(limit):
        tower.engine.submit(tower.request(prompt(step + 1, 70), priority=1, max_tokens=2))
        tower.step()
        try:
            while (delta := stream.get(timeout=0)) is not None:
                if delta.finish_reason is not None:
                    return step
        except TimeoutError:
            pass
    return None


@pytest.mark.parametrize("seats", [1, 2])
@pytest.mark.parametrize("pages", [5, 60])
def test_a_request_is_overtaken_so_often_and_no_more(seats, pages):
    numbers = {"num_seats": seats, "max_batch_size": seats, "num_pages": pages}
    tower = Tower(max_overtakes=10, **numbers)
    assert steps_under_load(tower, 200) is not None
    assert admitted(tower).index("r0") <= 11
    endless = Tower(max_overtakes=10_000, **numbers)
    assert steps_under_load(endless, 200) is None, "the load is heavy enough to show it"


def test_one_that_was_pushed_out_goes_first_in_the_end():
    numbers = {"num_pages": 3, "num_slots": 6}
    tower = Tower(max_overtakes=5, **numbers)
    assert steps_under_load(tower, 300, alone=3, max_tokens=60) is not None
    assert tower.engine.stats().preemptions > 0
    endless = Tower(max_overtakes=10_000, **numbers)
    assert steps_under_load(endless, 300, alone=3, max_tokens=60) is None


def test_a_prompt_short_of_budget_goes_first_in_the_end():
    """There is room for all, but higher priority takes every token of the budget."""
    numbers = {"num_pages": 400, "num_slots": 40, "max_prefill_tokens": 64, "num_seats": 16}
    numbers |= {"max_batch_size": 16}
    tower = Tower(max_overtakes=10, **numbers)
    low = tower.engine.submit(tower.request(prompt(0, 300), max_tokens=1))
    tower.step()
    for step in range(60):
        tower.engine.submit(tower.request(prompt(step + 1, 64), priority=1, max_tokens=1))
        tower.step()
    assert collect(low)[0][1] == "length"


def test_higher_priority_is_not_kept_waiting_by_the_budget_of_lower():
    tower = Tower(max_prefill_tokens=64, num_pages=200)
    tower.engine.submit(tower.request(prompt(0, 2000)))
    tower.step()
    tower.step()
    high = tower.engine.submit(tower.request(prompt(1, 60), priority=1, max_tokens=1))
    tower.step()
    assert collect(high)[0][1] == "length"
    tower.run()


@pytest.mark.parametrize("short_of", ["seats", "pages"])
def test_an_arrival_of_higher_priority_pushes_out_lower_when_there_is_no_room(short_of):
    numbers = {"num_pages": 7, "num_seats": 4} if short_of == "pages" else {"num_seats": 2}
    tower = Tower(max_batch_size=numbers["num_seats"], **numbers)
    lows = [tower.request(prompt(n, 150), max_tokens=30) for n in range(2)]
    streams = [tower.engine.submit(low) for low in lows]
    for _ in range(5):
        tower.step()
    high = tower.request(prompt(9, 150), priority=1, max_tokens=3)
    streams.append(tower.engine.submit(high))
    for _ in range(5):
        tower.step()
    assert collect(streams[2]) == tower.naive(high)
    assert tower.engine.stats().preemptions == 1, "the younger of the two was enough"
    tower.run()
    assert [collect(s) for s in streams[:2]] == [tower.naive(low) for low in lows]
    tower.assert_nothing_is_held()


def test_nobody_is_pushed_out_for_one_that_would_not_fit_anyway():
    """Of equal priority, the first keeps its pages; pushing out the lower one would not help."""
    tower = Tower(num_pages=10)

    def submit(number: int, length: int, priority: int):
        asked = tower.request(prompt(number, length), priority=priority, max_tokens=15)
        return tower.engine.submit(asked)

    streams = [submit(1, 300, 1), submit(2, 60, 0)]
    tower.step()
    tower.step()
    streams.append(submit(3, 400, 1))
    for _ in range(10):
        tower.step()
    stats = tower.engine.stats()
    assert (stats.preemptions, stats.requests_running, stats.requests_waiting) == (0, 2, 1)
    tower.run()
    assert all(list(stream)[-1].finish_reason == "length" for stream in streams)


def test_one_that_went_first_keeps_its_place_when_it_runs():
    tower = Tower(max_overtakes=0, num_seats=1, max_batch_size=1)
    streams = [tower.engine.submit(tower.request(prompt(0, 30), max_tokens=20))]
    tower.step()
    streams += [
        tower.engine.submit(tower.request(prompt(n, 30), priority=1, max_tokens=3)) for n in (1, 2)
    ]
    tower.run()
    assert tower.engine.stats().preemptions == 0
    assert admitted(tower) == ["r0", "r1", "r2"]
    assert all(list(stream)[-1].finish_reason == "length" for stream in streams)


def test_nobody_is_remembered_who_is_over_however_patient_all_are():
    tower = Tower(max_overtakes=10**9)
    patient = tower.engine._scheduler.turns
    for number in range(200):
        tower.answers([tower.request(prompt(number, 5), max_tokens=1)])
    assert len(patient._due) <= 64
