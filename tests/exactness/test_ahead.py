"""Two steps in flight change no text, no state and no page: whoever ends, and whatever is saved."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from millpond.plan.sampling import SamplingParams
from tests.exactness.engines import Ask, House, Served
from tests.exactness.families import FAMILIES
from tests.exactness.prompts import BASE, OTHER, PROMPTS
from tests.exactness.test_speculation import ALONG, NO_CACHE, WEIGHED, alone, check

KS = (0, 1, 3)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True)
SEVERAL = SamplingParams(max_tokens=12, temperature=1.2, top_k=30, seed=3, n=2, ignore_eos=True)
ASKS = (Ask(PROMPTS[4], GREEDY), Ask(PROMPTS[2], SEEDED), Ask(BASE[:126], SEVERAL))
"""Prompts of 127, 64 and 126 tokens: answers cross pages, and anchors where they are kept."""


def ahead(family: str, k: int, asks: list[Ask], settings: dict[str, Any], **house: Any) -> Served:
    """Serve with two steps in flight; drafts are right at random."""
    dice = random.Random(k)
    settings = {"max_prefill_tokens": 512, **settings}
    made = House(num_drafts=k, runs_ahead=True, settings=settings, **house)
    served = check(family, made, asks, lambda: dice.randint(0, k))
    assert served.stats.steps_ahead > 0
    return served


# Half of all ways: any three choices are met in every combination.
WAYS = [
    pytest.param(family, k, late, settings, id=f"{name}-{late}-{k}-{family}")
    for i, family in enumerate(FAMILIES)
    for k in KS
    for late in (False, True)
    for j, (name, settings) in enumerate((("caching", ALONG), ("no-caching", NO_CACHE)))
    if (i + k + late + j) % 2 == 0
]


@pytest.mark.parametrize(("family", "k", "late", "settings"), WAYS)
def test_texts_are_those_of_one_step_at_a_time(
    family: str, k: int, late: bool, settings: dict[str, Any]
) -> None:
    later = [Ask(ask.tokens, ask.params, arrives=30) for ask in ASKS]
    served = ahead(family, k, [*ASKS, *later], settings, late=late)
    assert served.stats.steps_ahead > served.stats.steps // 2
    assert not any(plan.decode for plan in served.executor.plans)
    hits = [0, 0, 64, 64, 0, 64]
    assert served.cached[3:] == (hits[3:] if settings is ALONG else [0, 0, 0])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", KS)
def test_what_a_step_does_for_those_who_have_stopped_is_thrown_away(family: str, k: int) -> None:
    asks = []
    for ask, at in zip(ASKS, (3, 9, 5), strict=True):
        stop = alone(family, ask.tokens, ask.params).texts[0][0][at]
        asks.append(Ask(ask.tokens, replace(ask.params, stop_token_ids=(stop,))))
    asks += [Ask(ask.tokens, ask.params, arrives=12) for ask in asks]
    served = ahead(family, k, asks, ALONG)
    assert served.stats.rows_wasted > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", KS)
def test_aborts_and_failures_with_two_steps_in_flight(family: str, k: int) -> None:
    asks = [
        Ask(PROMPTS[4], GREEDY, aborted=4),
        Ask(PROMPTS[2], SEEDED, cut=6),
        Ask(BASE[:126], SEVERAL),
        Ask(PROMPTS[4], GREEDY, arrives=5),
        Ask(PROMPTS[2], SEEDED, arrives=8),
    ]
    for late in (False, True):
        served = ahead(family, k, asks, ALONG, fail_at=14, late=late)
        assert served.stats.rows_wasted > 0
        assert served.stats.steps_failed == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", KS)
def test_penalties_and_what_must_not_be_drawn_yet_are_counted_on_the_device(
    family: str, k: int
) -> None:
    asks = [Ask(OTHER[:118], WEIGHED), Ask(PROMPTS[4], replace(GREEDY, max_tokens=40))]
    served = ahead(family, k, asks, ALONG)
    assert served.stats.steps_ahead == served.stats.steps - 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("mode", ["interior", "split"])
def test_rows_of_prompts_follow_each_other_in_flight(family: str, k: int, mode: str) -> None:
    """In pieces, beside live rows, saved inside and at their ends, and found by whoever comes."""
    short = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    several = SamplingParams(max_tokens=4, temperature=1.2, top_k=30, seed=3, n=2, ignore_eos=True)
    asks = [
        Ask(BASE, short),
        Ask(OTHER, short, arrives=2),
        Ask((*BASE[:200], *OTHER[:61]), several, arrives=3),
        Ask(BASE, short, arrives=4, aborted=6),
        Ask(BASE, several, arrives=12),
    ]
    pieces = {**ALONG, "max_prefill_tokens": 128, "checkpoint_mode": mode}
    served = ahead(family, k, asks, pieces, late=True)
    assert served.stats.steps_ahead > served.stats.steps - 5
    assert any(plan.prefill and plan.verify for plan in served.executor.plans)
    assert served.cached[4] > 0
