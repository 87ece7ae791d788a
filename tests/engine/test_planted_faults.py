"""The machine finds what it is for: every planted fault, in a bounded, repeatable search."""

from __future__ import annotations

import logging

import pytest

from millpond.errors import MillpondError
from millpond.state import audit
from tests.engine.machine import HostTower, LongAnswers, explore
from tests.engine.planted import FAULTS, IN_ANSWERS, Fault

BY_NAME = {fault.__name__: fault for faults in FAULTS.values() for fault in faults}
SEEDS = (6, 8, 4, 0, 1, 2, 3, 5, 7, *range(9, 14))
"""The first three find most of them today."""

ELSEWHERE = {"asleep_means_all_free"}
"""Invariants of features that this tower does not have yet."""


@pytest.mark.parametrize("fault", BY_NAME.values(), ids=BY_NAME.keys())
def test_the_machine_finds(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    logging.disable(logging.CRITICAL)
    try:
        fault(monkeypatch)
        with pytest.raises((AssertionError, MillpondError)):
            explore(LongAnswers if fault in IN_ANSWERS else HostTower, SEEDS)
    finally:
        logging.disable(logging.NOTSET)


def test_every_invariant_of_the_ledger_has_a_planted_fault():
    assert {check.__name__ for check in audit.ALL} - ELSEWHERE <= set(FAULTS)
