"""Through the whole engine, drafts change no text, no state and no page, whatever is accepted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from millpond.plan.sampling import SamplingParams
from millpond.plan.step import VerifyRow
from tests.exactness.engines import Ask, Forced, House, Served, Text, serve
from tests.exactness.families import FAMILIES, Kind
from tests.exactness.prompts import BASE, OTHER, PROMPTS
from tests.exactness.test_mtp import PENALISED
from tests.exactness.test_schedules import EXAMPLES, TRUTHS, houses
from tests.support.recording import Truth

KS = (1, 3, 5)
LONG = 14
"""Tokens of an answer: several steps with drafts, and a page crossed where a prompt ends near."""

GREEDY = SamplingParams(max_tokens=LONG, temperature=0.0, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(max_tokens=LONG, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True)
SEVERAL = SamplingParams(max_tokens=8, temperature=1.2, top_k=30, seed=3, n=2, ignore_eos=True)
WEIGHED = replace(PENALISED, max_tokens=LONG)
"""Penalties, bias, a least length, stop tokens, log probabilities."""

NO_CACHE = {"prefix_caching": False, "checkpoint_mode": "off", "max_prefill_tokens": 1024}
ALONG = {"decode_checkpoint_interval": 64, "checkpoint_interval": 64}
ASKS = (
    Ask(PROMPTS[4], GREEDY),
    Ask(PROMPTS[2], SEEDED),
    Ask(OTHER[:118], WEIGHED),
    Ask(BASE[:126], SEVERAL),
)
"""Prompts of 127, 64, 118 and 126 tokens; together they cross two pages."""


@cache
def alone(family: str | Kind, prompt: Text, params: SamplingParams) -> Served:
    """One request by itself, without drafts and without a cache."""
    asks = [Ask(prompt, params)]
    return serve(family, House(settings=NO_CACHE), asks, TRUTHS[family], "alone, without drafts")


def forced(family: str | Kind, asks: Sequence[Ask], count: int, right: Callable[[], int]) -> Forced:
    """A proposer of which so many drafts are accepted."""
    texts = {
        (ask.tokens, ask.params, index): text
        for ask in asks
        for index, text in enumerate(alone(family, ask.tokens, ask.params).texts[0])
    }
    return Forced(count, right, texts)


def check(
    family: str | Kind, house: House, asks: Sequence[Ask], right: Callable[[], int] | None = None
) -> Served:
    """Serve with drafts (the model's own, or forced), and compare with each request alone."""
    truth, k = TRUTHS[family], house.num_drafts
    proposer = None if right is None or not k else forced(family, asks, k, right)
    served = serve(family, house, asks, truth, f"K = {k} {house}", proposer)
    for ask, told in zip(asks, served.told, strict=True):
        cold = alone(family, ask.tokens, ask.params).told[0]
        if ask.ends_early:
            assert all(c[: len(t)] == t for t, c in zip(told, cold, strict=True))
        else:
            assert told == cold
    assert truth.differences == []
    assert served.executor.bytes_beyond == []
    return served


def verify_rows(served: Served) -> list[VerifyRow]:
    return [row for plan in served.executor.plans for row in plan.verify]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("k", "right"), [(k, r) for k in KS for r in sorted({0, 1, k})])
def test_forced_acceptance_changes_nothing_that_is_told(family: str, k: int, right: int) -> None:
    house = House(num_drafts=k, settings={**ALONG, "max_prefill_tokens": 512})
    served = check(family, house, ASKS, lambda: right)
    stats = served.stats
    told = stats.accepted_per_position
    assert all(told[:right])
    assert not any(told[right:])
    assert right == 0 or told[0] == stats.drafts
    assert (stats.accepted_tokens > 0) == (right > 0)
    assert not any(plan.decode for plan in served.executor.plans)
    drafted = sum(d for d, _ in served.drafts)
    assert drafted == stats.draft_tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", KS)
def test_the_models_own_drafts_change_nothing_cold_or_warm(family: str, k: int) -> None:
    later = [Ask(ask.tokens, ask.params, arrives=4 + 3 * i) for i, ask in enumerate(ASKS)]
    house = House(num_drafts=k, settings=ALONG)
    served = check(family, house, [*ASKS, *later])
    assert served.cached == [0, 0, 0, 64, 64, 0, 64, 64]
    assert served.drafts[4:] == served.drafts[:4], "drafts are as good after a hit"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", KS)
def test_every_remainder_after_a_hit_gives_the_text_of_a_cold_run(family: str, k: int) -> None:
    params = replace(SEEDED, max_tokens=6)
    remainders = range(1, 2 * k + 3)
    asks = [Ask(BASE[: 64 + r], params, arrives=3 * r) for r in remainders]
    dice = random.Random(k)
    served = check(
        family,
        House(num_drafts=k, num_seats=4, settings=ALONG),
        [Ask(BASE[:65], params), *asks],
        lambda: dice.randint(0, k),
    )
    assert served.cached == [0, *(64 for _ in remainders)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("k", "length"), [(3, 61), (5, 119)])
def test_an_anchor_among_accepted_drafts_leads_to_the_same_next_turn(
    family: str, k: int, length: int
) -> None:
    """From a state made while answering: byte for byte as without drafts, pages included."""
    prompt, params = BASE[:length], replace(GREEDY, max_tokens=24)
    anchor = length // 64 * 64 + 64
    text = alone(family, prompt, params).texts[0][0]
    turn = Ask((*prompt, *text, *OTHER[:9]), GREEDY, arrives=26)
    truth, told, exports = Truth(), [], 0
    for num_drafts in (0, k):
        house = House(num_drafts=num_drafts, settings={**ALONG, "debug_audit": True})
        asks = [Ask(prompt, params), turn]
        proposer = None
        if num_drafts:
            proposer = Forced(
                k, lambda: k, {(prompt, params, 0): text, (turn.tokens, GREEDY, 0): told[0]}
            )
        served = serve(family, house, asks, truth, f"K = {num_drafts}", proposer)
        assert served.texts[0] == [text]
        assert served.cached == [0, anchor]
        assert served.stats.checkpoints_published["decode"] >= 1
        exports += sum(row.export is not None for row in verify_rows(served))
        told.append(served.texts[1][0])
    assert told[0] == told[1]
    assert truth.differences == []
    assert exports == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", [1, 5])
def test_an_abort_between_verify_and_commit_disturbs_nobody(family: str, k: int) -> None:
    dice = random.Random(k)
    asks = [
        Ask(PROMPTS[4], GREEDY, cut=2),
        Ask(PROMPTS[2], SEEDED),
        Ask(OTHER[:118], WEIGHED, cut=1),
        Ask(BASE[:126], SEVERAL, arrives=3),
        Ask(PROMPTS[4], GREEDY, arrives=3),
    ]
    served = check(
        family,
        House(num_drafts=k, num_seats=5, settings=ALONG),
        asks,
        lambda: dice.randint(0, k),
    )
    assert [len(t) < LONG for t in (served.texts[0][0], served.texts[2][0])] == [True, True]
    assert served.stats.finished["abort"] == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_without_drafts_between_those_with_drafts_fold_what_is_pending(family: str) -> None:
    """Pages for two requests and a half: at times there is no room for a draft."""
    asks = [Ask(prompt[i : i + 124], SEEDED) for i in (0, 7) for prompt in (BASE, OTHER)]
    house = House(
        num_drafts=5,
        num_slots=6,
        num_pages=9,
        num_seats=4,
        settings={"max_prefill_tokens": 512, **ALONG},
    )
    served = check(family, house, asks, lambda: 2)
    rows = verify_rows(served)
    assert any(row.num_drafts == 0 and row.pending > 0 for row in rows)
    assert any(row.num_drafts == 5 for row in rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_pushed_out_with_drafts_pending_are_recomputed(family: str) -> None:
    old = Ask(BASE[:110], replace(SEEDED, max_tokens=30))
    asks = [old, Ask(OTHER[:190], replace(GREEDY, max_tokens=40), arrives=2)]
    house = House(num_drafts=3, num_slots=5, num_pages=6, num_seats=2)
    served = check(family, house, asks, lambda: 2)
    assert served.stats.preemptions > 0
    assert any(len(row.tokens) > 1 for plan in served.executor.plans for row in plan.decode)


SOME = st.builds(
    Ask,
    tokens=st.sampled_from((*PROMPTS, *(ask.tokens for ask in ASKS))),
    params=st.sampled_from((GREEDY, SEEDED, SEVERAL, WEIGHED)),
    arrives=st.integers(0, 12),
    priority=st.integers(0, 1),
    aborted=st.none() | st.none() | st.integers(0, 15),
    cut=st.none() | st.none() | st.integers(0, 15),
)


def schedule_and_mix(family: str | Kind, data: st.DataObject) -> None:
    """Some requests to an engine drawn at random, each compared with itself alone."""
    house = data.draw(houses(), label="house")
    k = data.draw(st.sampled_from((0, 1, 3, 5, 7)), label="K")
    caching = house.settings["prefix_caching"]
    along = data.draw(st.sampled_from((0, 64)), label="along")
    given = {**house.settings, "decode_checkpoint_interval": along if caching else 0}
    house = House(
        num_slots=house.num_slots,
        num_pages=house.num_pages,
        num_seats=house.num_seats,
        num_drafts=k,
        fail_at=house.fail_at,
        settings=given,
    )
    how = data.draw(st.sampled_from((None, 0, 1, k, "dice")), label="accepted")
    dice = random.Random(data.draw(st.integers(0, 999), label="dice"))
    right = {None: None, "dice": lambda: dice.randint(0, k)}.get(how, lambda: how)
    check(family, house, data.draw(st.lists(SOME, min_size=2, max_size=4), label="asks"), right)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=max(8, EXAMPLES // 2))
@given(data=st.data())
def test_any_schedule_any_acceptance_any_number_of_drafts(family: str, data: st.DataObject) -> None:
    schedule_and_mix(family, data)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", range(1, 8))
def test_every_acceptance_after_every_remainder(family: str, k: int) -> None:
    for right in range(k + 1):
        asks = [Ask(BASE[: 64 + r], SEEDED, arrives=2 * r) for r in range(1, 2 * k + 3)]
        warm = Ask(BASE[:65], SEEDED)
        house = House(num_drafts=k, num_seats=6, settings=ALONG)
        served = check(family, house, [warm, *asks], lambda: right)  # noqa: B023 -- used at once
        assert served.cached == [0, *(64 for _ in asks)]
