"""One tiny random model of each family, in transformers and in millpond, made once a session."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millpond.ops.bind import Bound, bind
from tests.support.oracle import CPU, KINDS, Tiny, make, random_ids


@pytest.fixture(scope="session")
def ops() -> Bound:
    return bind(CPU)


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory, ops: Bound) -> Callable[[str], Tiny]:
    """Tiny models by kind, each made when first asked for."""
    made: dict[str, Tiny] = {}

    def made_once(kind: str) -> Tiny:
        if kind not in made:
            made[kind] = make(kind, tmp_path_factory.mktemp(kind), ops)
        return made[kind]

    return made_once


@pytest.fixture(params=KINDS)
def tiny(request: pytest.FixtureRequest, make_tiny: Callable[[str], Tiny]) -> Tiny:
    return make_tiny(request.param)


@pytest.fixture
def prompt() -> list[int]:
    """200 tokens: three whole pages and a bit."""
    return random_ids(200, 0)
