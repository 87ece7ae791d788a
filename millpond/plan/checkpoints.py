"""Where the checkpoints of a prompt go; knows positions only, no pool and no request."""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm
from typing import Literal, NamedTuple

from millpond.plan.step import PAGE_SIZE
from millpond.state.checkpoint import AnchorKind

CheckpointMode = Literal["interior", "split", "off"]


VALUE_ORDER = (
    AnchorKind.PROMPT_END,
    AnchorKind.BRANCH_SEEN,
    AnchorKind.BRANCH_COMING,
    AnchorKind.LADDER,
    AnchorKind.DECODE,
)
"""Kinds of anchors, the most valuable first: who gets a slot when there are too few."""


class Anchor(NamedTuple):
    """A position worth a checkpoint: the state after `end` tokens, and why."""

    end: int
    kind: AnchorKind


class Evidence(NamedTuple):
    """Where a prompt is known to part from others, in tokens: reasons for anchors inside it.

    `seen`: how far prompts of the past go with this one, 0 when a state is there already.
    `coming`: how far prompts that are in the engine now go with it.
    """

    seen: int = 0
    coming: tuple[int, ...] = ()


NO_EVIDENCE = Evidence()


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
    evidence: Evidence = NO_EVIDENCE,
) -> tuple[Anchor, ...]:
    """The anchors in `start < anchor <= end` of a prompt, shallowest first.

    Prompt end: the last anchor that leaves a token for the logits, and `prompt_len` itself when it
    is one. Branches: the last anchor at or before each place of `evidence`. Ladder: every
    `interval` tokens (0: none), rounded up to an anchor. A place that qualifies twice has the more
    valuable kind. The set depends on the prompt and the evidence alone, so cutting `start .. end`
    elsewhere, or in mode `split`, changes nothing.
    """
    if mode == "off":
        return ()
    step = anchor_step(alignment, granularity)
    found: dict[int, AnchorKind] = {}
    if interval > 0:
        rung = -(-interval // step) * step
        last = min(end, prompt_len)
        found = dict.fromkeys(range(start // rung * rung + rung, last + 1, rung), AnchorKind.LADDER)

    def add(kind: AnchorKind, places: Iterable[int]) -> None:
        anchors = (min(place, prompt_len) // step * step for place in places)
        found.update((at, kind) for at in anchors if start < at <= end)

    add(AnchorKind.BRANCH_COMING, evidence.coming)
    add(AnchorKind.BRANCH_SEEN, (evidence.seen,))
    add(AnchorKind.PROMPT_END, (prompt_len - 1, prompt_len))
    return tuple(Anchor(at, found[at]) for at in sorted(found))
