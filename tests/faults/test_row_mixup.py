"""Kind: a row of the batch uses what belongs to another row, often after the batch changed."""

from __future__ import annotations

import random

import pytest

from tests.faults.house import House, answer, prompt
from tests.support.twins import DRAWS, Twins, texts
from tests.support.twins import prompt as known_prompt


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_leave_in_any_order_leave_the_others_undisturbed(seed):
    """Five seats, twenty requests of any length; some are cancelled in the middle."""
    draw = random.Random(seed)
    house = House(slots=16, seats=5, budget=192)
    asks = [house.ask(prompt(draw.randrange(1, 200), n), draw.randrange(1, 30)) for n in range(20)]
    cancelled = set()
    while house.engine.step():
        if draw.random() < 0.1:
            victim = draw.choice(asks)
            victim.stream.abort()
            cancelled.add(victim.name)
    for ask in asks:
        ask.read()
        if ask.name in cancelled and ask.finish == ["abort"]:
            wanted = answer(ask.spec.tokens, len(ask.tokens[0]))
            assert ask.tokens[0] == wanted
        else:
            assert ask.is_right
    house.assert_nothing_is_held()


def test_the_first_row_leaves_while_the_others_are_in_the_middle():
    house = House(slots=8, seats=4)
    asks = [house.ask(prompt(30 + n, n), 4 if n == 0 else 20) for n in range(4)]
    house.run(*asks)
    assert all(ask.is_right for ask in asks)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 255, 256, 257])
def test_a_row_that_turns_from_prefill_to_decode_keeps_its_own_state(length):
    """Others decode, and others read their prompts, in the step in which it turns."""
    house = House(slots=16, seats=4, budget=256)
    others = [house.ask(prompt(50, 1), 30), house.ask(prompt(700, 2), 5)]
    for _ in range(2):
        house.engine.step()
    turning = house.ask(prompt(length, 3), 10)
    house.run(turning, *others)
    assert turning.is_right
    assert all(ask.is_right for ask in others)


def test_rows_that_decode_beside_a_long_prompt_give_the_text_they_give_alone():
    house = House(slots=16, seats=4, budget=128)
    short = [house.ask(prompt(20 + n, n), 40) for n in range(3)]
    for _ in range(3):
        house.engine.step()
    long = house.ask(prompt(1_500, 9), 3)
    house.run(long, *short)
    mixed = [p for p in house.executor.plans if p.prefill and p.decode]
    assert mixed
    assert long.is_right
    assert all(ask.is_right for ask in short)


def test_a_seat_that_is_taken_again_brings_nothing_from_before():
    """One seat: a request that biases and penalises tokens is followed by one that does neither."""
    house = House(slots=4, seats=1)
    wanted = answer(prompt(40, 2), 6)
    biased = house.ask(
        prompt(40, 1),
        6,
        logit_bias=tuple((token, -100.0) for token in set(wanted)),
        presence_penalty=2.0,
        repetition_penalty=10.0,
    )
    plain = house.ask(prompt(40, 2), 6)
    house.run(biased, plain)
    assert biased.finish == ["length"]
    assert plain.is_right


def test_samples_of_one_prompt_each_continue_it():
    for length in (5, 64, 100, 128, 200):
        house = House(slots=10, seats=4)
        ask = house.served(prompt(length), 12, n=4)
        assert ask.is_right, length
        house.assert_nothing_is_held()


def test_a_recorded_step_reads_its_own_ids_whatever_ran_before():
    """Steps with prompts in them stage nothing for recordings: the next one must not rely on it."""
    twins = Twins("qwen", 2)
    pairs = [twins.begin(i) for i in (0, 1, 3)]
    twins.verify(pairs, right=2)
    fresh = twins.both(lambda driver, _: driver.start(known_prompt(2), DRAWS[2]))

    def mixed(driver, number):
        run = fresh[number]
        rows = [pairs[i][number] for i in (2, 0)]
        driver.verify(((r, 2, None) for r in rows), [(run, len(run.prompt), ())])

    twins.both(mixed)
    for some in ((1, 2), (2, 1), (0,)):
        twins.verify([pairs[i] for i in some], right=1)
    twins.verify([fresh, pairs[1]], right=2)
    for index, (_, run) in zip((0, 1, 3, 2), (*pairs, fresh), strict=True):
        assert tuple(run.tokens) == texts("qwen")[index][: len(run.tokens)]
