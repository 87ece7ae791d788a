"""Rows cut, mixed and resumed at random, beyond what the scheduler would do: the same bytes."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.plan.sampling import SamplingParams
from tests.exactness.driver import Driver, Run, Saved
from tests.exactness.families import FAMILIES, Kind, executor
from tests.exactness.prompts import GREEDY, PROMPTS, SEEDED
from tests.exactness.test_schedules import EXAMPLES
from tests.support.recording import Truth

TRUTHS: defaultdict[str | Kind, Truth] = defaultdict(Truth)
LENGTH = 4
PAGE = 64


def fresh(family: str | Kind, where: str) -> Driver:
    sizes = {"num_slots": 40, "num_pages": 60, "num_seats": 8}
    return Driver(executor(family, TRUTHS[family], where, count_writes=True, **sizes))


@cache
def cold(
    family: str | Kind, prompt: tuple[int, ...], params: SamplingParams, index: int
) -> tuple[int, ...]:
    """One row for the whole prompt, then a token at a time, nothing beside it."""
    driver = fresh(family, "cold")
    run = driver.start(prompt, params, sample_index=index)
    driver.step([(run, len(prompt), ())])
    driver.decode([run], LENGTH)
    return run.text


def resumable(driver: Driver, prompt: tuple[int, ...]) -> list[Saved]:
    return [s for s in driver.saved if s.end < len(prompt) and s.tokens == prompt[: s.end]]


def cut_and_mix(family: str | Kind, data: st.DataObject) -> None:
    """Some steps of rows drawn at random, each compared with its prompt alone."""
    driver = fresh(family, "cut")
    live: list[tuple[Run, SamplingParams]] = []
    for _ in range(data.draw(st.integers(2, 9), label="steps")):
        if len(live) < 4 and data.draw(st.booleans(), label="start another"):
            prompt = data.draw(st.sampled_from(PROMPTS), label="prompt")
            params = data.draw(st.sampled_from((GREEDY, SEEDED)), label="params")
            known = resumable(driver, prompt)
            resume = data.draw(st.sampled_from([None, *known]), label="resume")
            live.append((driver.start(prompt, params, resume=resume), params))
        wishes = []
        for run, _ in live:
            if data.draw(st.booleans(), label="idle"):
                continue
            total = len(run.prompt)
            cuts = [*range((run.folded // PAGE + 1) * PAGE, total, PAGE), total]
            end = (
                data.draw(st.sampled_from(cuts), label="end") if run.in_prompt else len(run.tokens)
            )
            grid = range((run.folded // PAGE + 1) * PAGE, end, PAGE) if run.in_prompt else ()
            exports = [e for e in grid if data.draw(st.booleans(), label="export")]
            wishes.append((run, end, exports))
        if wishes:
            driver.step(data.draw(st.permutations(wishes)))
        for run, params in [pair for pair in live if len(pair[0].text) >= LENGTH]:
            assert run.text[:LENGTH] == cold(family, run.prompt, params, 0)
            driver.finish(run)
            live.remove((run, params))
    for run, params in live:
        assert run.text == cold(family, run.prompt, params, 0)[: len(run.text)]
    assert TRUTHS[family].differences == []
    assert driver.executor.bytes_beyond == []


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_any_cut_any_export_any_resume_any_neighbours(family: str, data: st.DataObject) -> None:
    cut_and_mix(family, data)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt", [PROMPTS[1], PROMPTS[4], PROMPTS[5]], ids=len)
def test_samples_that_fan_out_are_the_samples_of_lone_requests(
    family: str, prompt: tuple[int, ...]
) -> None:
    driver = fresh(family, "fan-out")
    first = driver.start(prompt, SEEDED)
    driver.step([(first, 64, ())])
    runs = driver.fan_out(first, SEEDED, 3)
    driver.decode(runs[1:], LENGTH)
    driver.decode(runs, LENGTH)
    texts = [run.text for run in runs]
    assert texts == [cold(family, prompt, SEEDED, index) for index in range(3)]
    assert len(set(texts)) > 1
    assert TRUTHS[family].differences == []
    assert driver.executor.bytes_beyond == []


@pytest.mark.parametrize("family", FAMILIES)
def test_known_tokens_folded_in_one_row_leave_the_states_of_single_steps(family: str) -> None:
    prompt, text = PROMPTS[4], cold(family, PROMPTS[4], GREEDY, 0)
    driver = fresh(family, "recomputed")
    run = driver.start(prompt, GREEDY, generated=text[:3])
    driver.step([(run, len(prompt), ())])
    before = TRUTHS[family].num_compared
    driver.step([(run, len(run.tokens), ())])
    assert TRUTHS[family].num_compared > before
    assert run.text == text
    assert TRUTHS[family].differences == []
