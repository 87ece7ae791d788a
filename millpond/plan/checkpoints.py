"""Where the checkpoints of a prompt go; knows positions only, no pool and no request."""

from __future__ import annotations

from math import lcm
from typing import Literal, NamedTuple

from millpond.plan.step import PAGE_SIZE
from millpond.state.checkpoint import AnchorKind

CheckpointMode = Literal["interior", "split", "off"]


class Anchor(NamedTuple):
    """A position worth a checkpoint: the state after `end` tokens, and why."""

    end: int
    kind: AnchorKind


def anchor_step(alignment: int, granularity: int) -> int:
    """Anchors are the multiples of this, in every mode.

    The one predicate of what can be exported: on the page grid, on the alignment of saves, and
    where the bound kernel can write a state in the middle of a row.
    """
    return lcm(PAGE_SIZE, alignment, granularity)


def ladder_interval(prompt_len: int, interval: int, budget: int) -> int:
    """`interval`, widened so that one prompt's ladder leaves room in a budget of `budget` slots.

    One slot of the budget is for the prompt's end; a ladder that fills all the others, and more,
    would evict itself from below. 0 means no ladder.
    """
    rungs = budget - 1
    if interval <= 0 or rungs < 1:
        return 0
    wanted = prompt_len // interval
    return interval * max(1, -(-wanted // rungs))


def plan_anchors(
    start: int,
    end: int,
    prompt_len: int,
    alignment: int,
    interval: int,
    mode: CheckpointMode,
    granularity: int,
) -> tuple[Anchor, ...]:
    """The anchors in `start < anchor <= end` of a prompt, shallowest first.

    Prompt end: the last anchor that leaves a token for the logits, and `prompt_len` itself when it
    is one. Ladder: every `interval` tokens (0: none), rounded up to an anchor. The set depends on
    the prompt alone, so cutting `start .. end` elsewhere, or in mode `split`, changes nothing.
    """
    if mode == "off":
        return ()
    step = anchor_step(alignment, granularity)
    found: dict[int, AnchorKind] = {}
    if interval > 0:
        rung = -(-interval // step) * step
        last = min(end, prompt_len)
        found = dict.fromkeys(range(start // rung * rung + rung, last + 1, rung), AnchorKind.LADDER)
    for last in ((prompt_len - 1) // step * step, prompt_len // step * step):
        if start < last <= end:
            found[last] = AnchorKind.PROMPT_END
    return tuple(Anchor(at, found[at]) for at in sorted(found))
