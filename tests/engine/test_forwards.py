"""How many forwards a prompt takes, and what comes out of them, through the whole engine."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.towers import Tower


def long_tower(mode: str) -> Tower:
    return Tower(
        num_slots=20,
        num_pages=1100,
        max_prefill_tokens=4096,
        prefill_save_alignment=512,
        checkpoint_mode=mode,
        checkpoint_budget=16,
        debug_audit=False,
    )


@pytest.mark.parametrize(
    "prompt, mode, forwards",
    [(32_320, "interior", 8), (32_320, "split", 9), (32_770, "interior", 9), (32_770, "split", 9)],
)
def test_a_prompt_takes_no_forward_for_its_checkpoints(prompt, mode, forwards):
    tower = long_tower(mode)
    request = tower.request(range(prompt), max_tokens=1)
    assert tower.answers([request]) == [tower.naive(request)]
    assert len(tower.executor.plans) == forwards
    if (prompt, mode) == (32_320, "interior"):
        assert [export.end for export in tower.executor.plans[-1].prefill[0].exports] == [32_256]


@given(
    length=st.integers(1, 1500),
    budget=st.sampled_from([64, 100, 500, 2000]),
    alignment=st.sampled_from([64, 128, 512]),
    interval=st.sampled_from([0, 64, 256]),
    granularity=st.sampled_from([64, 128]),
)
@settings(max_examples=40)
def test_interior_and_split_make_the_same_checkpoints(
    length, budget, alignment, interval, granularity
):
    found = []
    for mode in ("interior", "split"):
        tower = Tower(
            num_slots=40,
            checkpoint_budget=30,
            checkpoint_mode=mode,
            max_prefill_tokens=budget,
            prefill_save_alignment=alignment,
            checkpoint_interval=interval,
            export_granularity=granularity,
        )
        prompt = random.Random(length).choices(range(50), k=length)
        tower.answers([tower.request(prompt, max_tokens=2)])
        index = tower.engine._ledger.index
        found.append(
            sorted(
                (c.end, c.kind.value, tower.executor.slots[c.lease.slot])
                for c in index.checkpoints()
            )
        )
    assert found[0] == found[1]


def test_prompts_and_decoding_rows_share_a_step():
    tower = Tower()
    first = tower.request(range(10), max_tokens=30)
    streams = [tower.engine.submit(first)]
    tower.step()
    tower.step()
    streams.append(tower.engine.submit(tower.request(range(20, 700), max_tokens=3)))
    tower.run()
    mixed = [plan for plan in tower.executor.plans if plan.prefill and plan.decode]
    assert len(mixed) == 3


def test_the_budget_is_shared_by_prompts_in_order():
    tower = Tower(max_prefill_tokens=300)
    for first, length in enumerate((200, 200, 100)):
        tower.engine.submit(tower.request(range(first, first + length), max_tokens=1))
    tower.run()
    rows = [[(r.request, r.start, r.end) for r in plan.prefill] for plan in tower.executor.plans]
    assert rows == [
        [("r0", 0, 200), ("r1", 0, 64)],
        [("r1", 64, 200), ("r2", 0, 100)],
    ]
