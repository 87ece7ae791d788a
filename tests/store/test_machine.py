"""Transfers under everything that can happen to them; and that the machine would see them break."""

from __future__ import annotations

import logging
import random

import pytest
from hypothesis import settings

from millpond.errors import MillpondError
from tests.engine.machine import explore
from tests.store.machine import FAULTS, Fault, StoredHost

PER_ROUND = 20
SEEDS = (0, 2, 8, 9, 10, 23, *range(3, 8), *range(11, 20))
"""Of the search for planted faults; the first six find each today."""


@pytest.mark.timeout(3600)
def test_no_transfer_disturbs_a_text_or_leaks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    profile = settings.default
    first = 1000 if profile.derandomize else random.randrange(1 << 40)
    explore(StoredHost, range(first, first + max(1, profile.max_examples // PER_ROUND)))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_machine_finds(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    logging.disable(logging.CRITICAL)
    try:
        fault(monkeypatch)
        with pytest.raises((AssertionError, MillpondError, KeyError)):
            explore(StoredHost, SEEDS)
    finally:
        logging.disable(logging.NOTSET)
