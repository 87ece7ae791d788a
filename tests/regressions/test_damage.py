"""A damaged page costs one request, wherever on the path it lies."""

from __future__ import annotations

import pytest

from millpond.engine.loop import Engine
from millpond.engine.types import EngineRequest
from tests.exactness.engines import Ask, Text, alone, make_engine
from tests.exactness.prompts import BASE, GREEDY
from tests.support.recording import Truth

PROMPT = BASE[:320]


def ask(engine: Engine, name: str) -> tuple[str | None, Text]:
    stream = engine.submit(EngineRequest(request_id=name, tokens=PROMPT, params=GREEDY))
    while engine.step():
        pass
    deltas = list(stream)
    return deltas[-1].finish_reason, tuple(t.token for d in deltas for t in d.tokens)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_damaged_page_below_a_ladder_of_checkpoints_costs_one_request(depth: int) -> None:
    engine, executor = make_engine("glm", Truth(), "ladder", settings={"checkpoint_interval": 64})
    right = ("length", alone("glm", Ask(PROMPT, GREEDY), Truth())[0])
    assert ask(engine, "cold") == right
    pages = {node.depth: node.page for node in engine._ledger.index.nodes()}
    executor.arenas.pages.fill_nan([pages[depth + 1].id])
    assert ask(engine, "damaged") == ("error", ())
    assert [ask(engine, f"after {i}") for i in range(2)] == [right, right]
