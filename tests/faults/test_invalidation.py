"""Kind: something computed under other conditions, or found to be bad, can still be found."""

from __future__ import annotations

import msgspec
import pytest

from millpond.plan.step import StepPlan, StepResult
from tests.faults.house import House, prompt

LONG = prompt(700)


def test_a_warm_prompt_misses_after_a_flush():
    house = House()
    house.served(LONG)
    assert house.served(LONG).cached == 640
    house.engine.flush_cache()
    again = house.served(LONG)
    assert again.cached == 0
    assert again.is_right
    assert house.served(LONG).cached == 640


@pytest.mark.parametrize("in_flight", [False, True], ids=["between steps", "in a step"])
def test_a_prompt_that_is_running_during_a_flush_publishes_nothing_old(in_flight):
    """Flushed at the second of three chunks: what it could publish from then on is old."""
    house = House(slots=20, checkpoint_interval=64)
    running = house.ask(LONG)
    if in_flight:

        def flush(plan: StepPlan) -> None:
            if any(row.start == 256 for row in plan.prefill):
                house.engine.flush_cache()

        house.executor.before = flush
    else:
        house.engine.step()
        house.engine.flush_cache()
    house.run(running)
    house.executor.before = lambda plan: None
    assert running.is_right
    assert house.engine.stats().slots_checkpoint == 0
    again = house.served(LONG)
    assert again.cached == 0
    assert again.is_right
    house.assert_nothing_is_held()


def test_prompts_of_another_salt_share_nothing():
    house = House()
    house.served(LONG, salt="one")
    for salt in ("two", ""):
        other = house.served(LONG, salt=salt)
        assert other.cached == 0
        assert other.is_right
    assert house.served(LONG, salt="one").cached == 640


def test_a_prefix_that_gave_nonfinite_logits_is_not_served_again():
    """One prefix goes bad among good ones and is asked for again: it must heal at once."""
    house = House(slots=20)
    bad, good = LONG, prompt(500, 3)
    house.served(bad)
    house.served(good)
    (poisoned,) = [c for c in house.ledger.index.checkpoints() if c.end == 640]
    house.arenas.slots.fill_nan([poisoned.lease.slot])
    hurt = house.served(bad)
    assert hurt.cached == 640
    assert hurt.finish == ["error"]
    assert hurt.error
    assert house.engine.stats().nonfinite == 1
    for attempt in range(3):
        probe = house.served(bad)
        assert probe.is_right, attempt
    assert house.served(good).cached == 448
    house.assert_nothing_is_held()


def test_a_prompt_whose_own_logits_are_nonfinite_publishes_nothing():
    """Whatever its layers reported as written may be bad too."""
    house = House(budget=1_024)

    def spoil(plan: StepPlan, result: StepResult) -> StepResult:
        emitted = tuple(msgspec.structs.replace(e, finite=False) for e in result.emitted)
        return msgspec.structs.replace(result, emitted=emitted)

    house.executor.after = spoil
    hurt = house.served(LONG)
    assert hurt.finish == ["error"]
    house.executor.after = lambda plan, result: result
    again = house.served(LONG)
    assert again.cached == 0
    assert again.is_right
