"""A checkpoint whose bytes are damaged in memory costs one request, not its successors."""

from __future__ import annotations

import pytest

from millpond.engine.loop import Engine
from millpond.engine.types import Delta, EngineRequest
from tests.exactness.engines import Ask, alone, make_engine
from tests.exactness.families import FAMILIES
from tests.exactness.prompts import GREEDY, PROMPTS
from tests.support.recording import RecordingExecutor, Truth

PROMPT = PROMPTS[0]


def ask(engine: Engine, name: str) -> list[Delta]:
    stream = engine.submit(EngineRequest(request_id=name, tokens=PROMPT, params=GREEDY))
    while engine.step():
        pass
    return list(stream)


def damage(engine: Engine, executor: RecordingExecutor, what: str) -> None:
    """Serve the prompt once, then make the checkpoint's slot or one of its pages unreadable."""
    ask(engine, "cold")
    (checkpoint,) = engine._ledger.index.checkpoints()
    if what == "slot":
        executor.arenas.slots.fill_nan([checkpoint.lease.slot])
    else:
        page = engine._ledger.index.node_of(checkpoint).page
        executor.arenas.pages.fill_nan([page.id])


def served(engine: Engine, name: str) -> tuple[int, tuple[int, ...]]:
    """How many tokens were cached, and the text."""
    deltas = ask(engine, name)
    assert deltas[0].outcome is not None
    return deltas[0].outcome.cached_tokens, tuple(t.token for d in deltas for t in d.tokens)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("what", ["slot", "page"])
def test_what_is_not_finite_ends_one_request_and_the_next_is_cold(family: str, what: str) -> None:
    engine, executor = make_engine(family, Truth(), "damage")
    damage(engine, executor, what)
    damaged = ask(engine, "damaged")
    assert damaged[-1].finish_reason == "error"
    assert "not finite" in (damaged[-1].error or "")
    assert [t for d in damaged for t in d.tokens] == []
    assert served(engine, "after") == (0, alone(family, Ask(PROMPT, GREEDY), Truth())[0])
    stats = engine.stats()
    assert (stats.nonfinite, stats.finished["error"], stats.slots_running) == (1, 1, 0)


@pytest.mark.parametrize("what", ["slot", "page"])
def test_a_hit_after_the_damage_reads_nothing_of_it(what: str) -> None:
    engine, executor = make_engine("glm", Truth(), "damage")
    damage(engine, executor, what)
    ask(engine, "damaged")
    first = served(engine, "after")
    assert served(engine, "again") == (192, first[1])
