"""The ownership machine, under the profile in force."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from millpond.state import audit, chain
from tests.state.world import World

TestWorld = World.TestCase
TestWorld.settings = settings(stateful_step_count=50)


def test_keys_that_collide_never_confuse_two_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    def weak(above: bytes, page: bytes) -> bytes:
        return bytes([(sum(above) + sum(page)) % 2])

    monkeypatch.setattr(chain, "page_digest", weak)
    monkeypatch.setattr(audit, "page_digest", weak)
    run_state_machine_as_test(World, settings=settings(stateful_step_count=50, database=None))
