"""How prompts are cut: the grid, the budget, and the number of forwards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.plan.checkpoints import plan_anchors
from millpond.plan.prefill import row_end, split_at


def rows(prompt: int, budget: int, alignment: int, mode: str, interval: int = 4096, start: int = 0):
    """(start, end, anchors) of every forward of a prompt that has the budget for itself."""
    found = []
    while start < prompt:
        end = row_end(start, prompt, budget, oldest=True)
        anchors = plan_anchors(start, end, prompt, alignment, interval, mode, 64)
        end = split_at(anchors, end, mode)
        found.append((start, end, [a.end for a in anchors if a.end <= end]))
        start = end
    return found


@given(st.integers(1, 9000), st.integers(0, 5000), st.integers(0, 60), st.booleans())
def test_rows_lie_on_the_grid_and_within_the_budget(prompt, budget, pages, oldest):
    start = min(64 * pages, prompt // 64 * 64)
    end = row_end(start, prompt, budget, oldest=oldest)
    assert start <= end <= prompt
    assert end % 64 == 0 or end == prompt
    assert end - start <= max(budget, 64 if oldest else 0)
    if oldest and start < prompt:
        assert end > start, "a small budget must not stall the oldest prefill"


@given(
    st.integers(1, 9000),
    st.integers(1, 5000),
    st.integers(1, 16),
    st.sampled_from(["interior", "split", "off"]),
)
def test_every_row_of_a_prompt_starts_on_the_grid_whatever_is_cut(prompt, budget, pages, mode):
    found = rows(prompt, budget, 64 * pages, mode, interval=512)
    assert all(start % 64 == 0 for start, _, _ in found)
    assert [start for start, _, _ in found[1:]] == [end for _, end, _ in found[:-1]]
    assert found[-1][1] == prompt


@given(st.integers(1, 9000), st.integers(1, 5000), st.integers(1, 16))
def test_interior_and_split_reach_the_same_anchors(prompt, budget, pages):
    interior, split = (
        [at for _, _, anchors in rows(prompt, budget, 64 * pages, mode, 512) for at in anchors]
        for mode in ("interior", "split")
    )
    assert interior == split


@given(st.integers(1, 9000), st.integers(1, 5000), st.integers(1, 16))
def test_interior_checkpoints_cost_no_forward(prompt, budget, pages):
    interior = rows(prompt, budget, 64 * pages, "interior", 512)
    assert len(interior) == len(rows(prompt, budget, 64 * pages, "off"))


@pytest.mark.parametrize(
    "prompt, mode, forwards",
    [(32_320, "interior", 8), (32_320, "split", 9), (32_770, "interior", 9), (32_770, "split", 9)],
)
def test_the_unaligned_tail_joins_the_last_forward(prompt, mode, forwards):
    found = rows(prompt, 4096, 512, mode)
    assert len(found) == forwards
    if (prompt, mode) == (32_320, "interior"):
        assert found[-1] == (28_672, 32_320, [32_256])
        assert found[-1][1] - found[-1][0] == 3_648
