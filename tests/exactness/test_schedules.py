"""Whatever the schedule: the same states and pages byte for byte, and the same text."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.exactness.engines import Ask, House, Served, Text, alone, serve
from tests.exactness.families import FAMILIES, Kind
from tests.exactness.prompts import BASE, GREEDY, OTHER, PROMPTS, SEEDED, TWO
from tests.support.recording import Truth

EXAMPLES = max(16, settings().max_examples // 16)
"""An example is a whole engine run, a second or so: fewer of them than of cheap properties."""

TRUTHS: defaultdict[str | Kind, Truth] = defaultdict(Truth)
"""Shared by all runs of a family: each is compared with every other, and with the cold ones."""


@cache
def expected(family: str | Kind, ask: Ask) -> list[Text]:
    return alone(family, ask, TRUTHS[family])


def check(family: str | Kind, house: House, asks: list[Ask], where: str = "engine") -> Served:
    """Serve and compare with each request alone: text, states, pages, bytes written."""
    truth = TRUTHS[family]
    cold = [expected(family, Ask(ask.tokens, ask.params)) for ask in asks]
    served = serve(family, house, asks, truth, f"{where} {house}")
    for ask, texts, reference in zip(asks, served.texts, cold, strict=True):
        if ask.aborted is None:
            assert texts == reference
        else:
            assert all(r[: len(t)] == t for t, r in zip(texts, reference, strict=True))
    assert truth.differences == []
    assert served.executor.bytes_beyond == []
    return served


@st.composite
def houses(draw: st.DrawFn) -> House:
    caching = draw(st.booleans())
    mode = draw(st.sampled_from(("interior", "split", "off"))) if caching else "off"
    alignment = draw(st.sampled_from((64, 128)))
    chosen: dict[str, Any] = {
        "prefix_caching": caching,
        "checkpoint_mode": mode,
        "prefill_save_alignment": alignment,
        "checkpoint_interval": alignment * draw(st.integers(1, 3)),
        "max_prefill_tokens": draw(st.sampled_from((64, 100, 128, 192, 256, 512))),
        "checkpoint_budget": draw(st.integers(0, 8)),
    }
    return House(
        num_slots=draw(st.integers(4, 16)),
        num_pages=draw(st.integers(14, 40)),
        num_seats=draw(st.integers(2, 5)),
        fail_at=draw(st.none() | st.integers(1, 12)),
        settings=chosen,
    )


ASKS = st.builds(
    Ask,
    tokens=st.sampled_from(PROMPTS),
    params=st.sampled_from((GREEDY, SEEDED, TWO)),
    arrives=st.integers(0, 12),
    priority=st.integers(0, 1),
    aborted=st.none() | st.none() | st.integers(0, 15),
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=EXAMPLES)
@given(house=houses(), asks=st.lists(ASKS, min_size=2, max_size=5))
def test_any_schedule_leaves_the_bytes_and_the_text_of_each_request_alone(
    family: str, house: House, asks: list[Ask]
) -> None:
    check(family, house, asks)


@pytest.mark.parametrize("family", FAMILIES)
def test_interior_split_and_no_checkpoints_give_the_same_states_and_text(family: str) -> None:
    asks = [Ask(PROMPTS[0], GREEDY), Ask(PROMPTS[0], SEEDED, 4), Ask(PROMPTS[1], TWO, 6)]
    cached = {}
    for mode in ("interior", "split", "off"):
        house = House(settings={"checkpoint_mode": mode, "checkpoint_interval": 64})
        served = check(family, house, asks, mode)
        cached[mode] = served.cached
        exported = served.executor.num_exports
        assert exported > 0 if mode == "interior" else exported == 0
    assert cached == {"interior": [0, 192, 128], "split": [0, 192, 128], "off": [0, 0, 0]}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_pool_preempts_and_changes_nothing(family: str) -> None:
    # Four prompts of two pages that all need a third while they decode; nine pages in all.
    asks = [Ask(prompt[i : i + 126], SEEDED) for i in (0, 7) for prompt in (BASE, OTHER)]
    house = House(num_slots=5, num_pages=9, num_seats=4, settings={"max_prefill_tokens": 512})
    assert check(family, house, asks).stats.preemptions > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_checkpoint_keeps_its_bytes_while_others_run_from_it(family: str) -> None:
    asks = [Ask(PROMPTS[0], TWO, arrives=n) for n in range(5)]
    served = check(family, House(settings={"checkpoint_interval": 64}), asks)
    checkpoints = list(served.engine._ledger.index.checkpoints())
    assert checkpoints
    slots = served.executor.arenas.slots
    before = TRUTHS[family].num_compared
    for checkpoint in checkpoints:
        tokens = PROMPTS[0][: checkpoint.end]
        key = ("state", len(tokens), tokens)
        assert key in TRUTHS[family].digests
        TRUTHS[family].note(key, slots.storage[checkpoint.lease.slot], "at the end")
    assert TRUTHS[family].num_compared == before + len(checkpoints)
    assert TRUTHS[family].differences == []
