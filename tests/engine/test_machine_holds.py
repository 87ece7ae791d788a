"""Crowds that share beginnings, under everything; and that the machine would see it break."""

from __future__ import annotations

import logging

import pytest

from millpond.errors import MillpondError
from tests.engine.machine import explore
from tests.engine.machine_holds import FAULTS, Crowds, Fault


def test_crowds_finish_and_disturb_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    explore(Crowds, range(5))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_machine_finds(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    logging.disable(logging.CRITICAL)
    try:
        fault(monkeypatch)
        with pytest.raises((AssertionError, MillpondError, KeyError)):
            explore(Crowds, range(14))
    finally:
        logging.disable(logging.NOTSET)
