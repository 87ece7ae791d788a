"""Kind: a request starts with part of what it needs, and fails or leaks for want of the rest."""

from __future__ import annotations

import pytest

from millpond.errors import Rejected
from tests.faults.house import House, prompt


@pytest.mark.parametrize("lacking", ["slots", "pages", "seats"])
def test_one_slot_less_than_needed_queues_and_finishes_everything(lacking):
    """Three requests of four pages each; of one resource there is enough for two and a bit."""
    have = {"slots": 3, "pages": 12, "seats": 3}
    have[lacking] -= 1
    house = House(**have, budget=1_024, prefix_caching=False)
    asks = [house.ask(prompt(200 + n, n), 30) for n in range(3)]
    house.run(*asks)
    assert all(ask.is_right for ask in asks)
    assert house.engine.stats().steps_failed == 0
    house.assert_nothing_is_held()


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["interior", "split"])
def test_a_checkpoint_without_a_slot_is_skipped_and_counted(slots, mode):
    """Everybody runs; with slots to spare checkpoints are made, without they are given up."""
    house = House(slots=slots, seats=min(slots, 2), checkpoint_mode=mode, checkpoint_interval=64)
    asks = [house.ask(prompt(500, n), 5) for n in range(4)]
    house.run(*asks)
    assert all(ask.is_right for ask in asks)
    stats = house.engine.stats()
    made = sum(stats.checkpoints_published.values())
    assert made + sum(stats.checkpoints_skipped.values())
    if slots == 1 and mode == "interior":  # in split mode the row's own slot is the checkpoint
        assert stats.checkpoints_skipped
    house.assert_nothing_is_held()


def test_a_prompt_that_could_never_fit_is_refused_and_nothing_is_taken():
    house = House(pages=4)
    with pytest.raises(Rejected, match="256"):
        house.ask(prompt(257))
    house.assert_nothing_is_held()
    assert house.served(prompt(250)).is_right


def test_samples_that_find_no_slot_of_their_own_give_way_and_come_back():
    """A fan-out is admitted with one slot; when its samples part, there is one too few."""
    house = House(slots=3, seats=4, prefix_caching=False)
    runner, wide = house.ask(prompt(90, 1), 40), house.ask(prompt(100), 12, n=3)
    house.run(runner, wide)
    assert house.engine.stats().preemptions
    assert runner.is_right
    assert wide.is_right
    house.assert_nothing_is_held()


def test_a_fan_out_that_does_not_fit_at_once_waits_or_is_refused_whole():
    house = House(slots=4, seats=4)
    with pytest.raises(Rejected):
        house.ask(prompt(100), n=5)
    runner, wide = house.ask(prompt(90, 1), 10), house.ask(prompt(100), 6, n=4)
    house.run(runner, wide)
    assert runner.is_right
    assert wide.is_right
    house.assert_nothing_is_held()
