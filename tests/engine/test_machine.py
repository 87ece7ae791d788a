"""The whole host tower under everything that can happen to it."""

from __future__ import annotations

import logging
import random

import pytest
from hypothesis import settings

from tests.engine.machine import HostTower, LongAnswers, explore

PER_ROUND = 10
"""Examples of the Hypothesis profile for one round: its nine histories are long ones."""


@pytest.mark.timeout(3600)
def test_nothing_that_can_happen_disturbs_a_text_or_leaks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    profile = settings.default
    rounds = max(1, profile.max_examples // PER_ROUND)
    first = 1000 if profile.derandomize else random.randrange(1 << 40)
    explore(HostTower, range(first, first + rounds))
    explore(LongAnswers, range(first, first + rounds // 3 + 1))
