"""Kind: nothing fails, and nothing goes on."""

from __future__ import annotations

import random

import pytest

from tests.faults.house import House, prompt


@pytest.mark.parametrize("seed", range(4))
def test_long_traffic_with_too_little_of_everything_always_goes_on(seed):
    """Conversations of many turns where everything is short; `run` loses patience at some point."""
    draw = random.Random(seed)
    house = House(slots=3, pages=16, seats=2, budget=64)
    talks = [prompt(draw.randrange(20, 120), n) for n in range(4)]
    for _ in range(6):
        asks = [house.ask(talk, draw.randrange(1, 40)) for talk in talks]
        house.run(*asks)
        assert all(ask.is_right for ask in asks)
        talks = [
            (*talk, *ask.tokens[0], *prompt(20, n))[-700:]
            for n, (talk, ask) in enumerate(zip(talks, asks, strict=True))
        ]
    house.assert_nothing_is_held()


def test_a_full_batch_without_a_spare_slot_goes_on():
    """As many slots as seats, prompts of several chunks, and every prompt wants checkpoints."""
    house = House(slots=4, seats=4, budget=64, checkpoint_interval=64)
    asks = [house.ask(prompt(300 + n, n), 20) for n in range(8)]
    house.run(*asks)
    assert all(ask.is_right for ask in asks)
    house.assert_nothing_is_held()


def test_pages_that_run_out_while_all_decode_end_in_preemption_not_in_a_stall():
    house = House(slots=8, pages=8, seats=4, budget=256, prefix_caching=False)
    asks = [house.ask(prompt(60 + n, n), 130) for n in range(4)]
    house.run(*asks)
    assert all(ask.is_right for ask in asks)
    assert house.engine.stats().preemptions
    house.assert_nothing_is_held()


@pytest.mark.parametrize("steps", range(9))
def test_an_abort_before_any_step_leaves_nothing_held(steps):
    """The client leaves after 0, 1, 2 .. steps: queued, in each chunk, decoding, at the end."""
    house = House(budget=128)
    leaving, staying = house.ask(prompt(400), 4), house.ask(prompt(300, 1), 4, n=2)
    for _ in range(steps):
        house.engine.step()
    leaving.stream.abort()
    leaving.stream.abort()
    house.run(leaving, staying)
    assert leaving.finish == ["abort"] or leaving.is_right
    assert staying.is_right
    house.assert_nothing_is_held()
