"""The rate at which prompts are computed, from steps and a clock that a test controls."""

from __future__ import annotations

import pytest

from millpond.engine.rate import DRIFT, NOMINAL, PrefillRate
from tests.support.towers import Tower


def test_nothing_measured_is_nominal() -> None:
    rate = PrefillRate()
    assert rate.observe(0, 8, 0.01) == 1.0
    assert (rate.measured, rate.in_force) == (NOMINAL, NOMINAL)


def test_decoding_beside_a_prompt_is_taken_off() -> None:
    rate = PrefillRate()
    for _ in range(100):
        rate.observe(0, 10, 0.01)
        rate.observe(500, 20, 0.12)
    assert rate.measured == pytest.approx(5000)
    assert rate.seconds(100, 600) == pytest.approx(0.1, rel=DRIFT - 1)


def test_at_least_half_of_a_step_is_the_prompts() -> None:
    rate = PrefillRate()
    rate.observe(0, 1, 1.0)
    rate.observe(100, 50, 2.0)
    assert rate.measured == pytest.approx(100)


def test_a_slow_start_is_soon_forgotten() -> None:
    rate = PrefillRate()
    rate.observe(64, 0, 30.0)
    for _ in range(200):
        rate.observe(4096, 0, 0.5)
    assert rate.in_force == pytest.approx(8192, rel=DRIFT - 1)


def test_the_rate_in_force_stands_still_while_the_measured_one_wavers() -> None:
    rate = PrefillRate()
    dearer = rate.observe(1000, 0, 0.1)
    assert (rate.in_force, dearer) == (10_000, NOMINAL / 10_000)
    for seconds in (0.11, 0.09, 0.1, 0.105):
        assert rate.observe(1000, 0, seconds) == 1.0
    assert rate.in_force == 10_000


def test_an_engine_measures_by_its_clock() -> None:
    tower = Tower(max_prefill_tokens=128)
    engine, times = tower.engine, iter(range(1000))
    engine._flights._clock = lambda: next(times) / 4  # seconds, one look after the other
    tower.answers([tower.request(range(640))])
    assert engine._ledger.prefill_rate.measured == pytest.approx(512)
