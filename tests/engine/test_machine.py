"""The whole host tower under everything that can happen to it."""

from __future__ import annotations

import logging

import pytest
from hypothesis import settings

from tests.engine.machine import HostTower, explore

PER_ROUND = 40
"""Examples of the Hypothesis profile for one round: its nine histories are long ones."""


@pytest.mark.timeout(3600)
def test_nothing_that_can_happen_disturbs_a_text_or_leaks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    rounds = max(1, settings.default.max_examples // PER_ROUND)
    explore(HostTower, range(1000, 1000 + rounds))
