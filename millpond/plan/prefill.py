"""How a prompt is cut into rows: on the page grid, under a token budget. Knows positions only."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.plan.checkpoints import Anchor, CheckpointMode
from millpond.plan.step import PAGE_SIZE


def row_end(start: int, prompt_len: int, budget: int, *, oldest: bool) -> int:
    """Where a row that starts at `start` ends; `start` itself when the budget is too small.

    Every row starts on the grid, so only a prompt's last row may end off it. The oldest prefill of
    a step gets one grid unit whatever the budget, so that a small budget cannot stall it.
    """
    if oldest:
        budget = max(budget, PAGE_SIZE)
    if prompt_len - start <= budget:
        return prompt_len
    return start + max(budget, 0) // PAGE_SIZE * PAGE_SIZE


def split_at(anchors: Sequence[Anchor], end: int, mode: CheckpointMode) -> int:
    """The end of a row that reaches `anchors`: in mode `split` it is cut at the first of them."""
    return anchors[0].end if anchors and mode == "split" else end
