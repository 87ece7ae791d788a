"""With drafts and without: the same text, the same states, the same pages, whatever is accepted."""

from __future__ import annotations

import random
from collections import defaultdict
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.plan.sampling import SamplingParams
from millpond.plan.step import Emitted
from tests.exactness.drafting import DraftDriver, Script, decoded
from tests.exactness.driver import Run
from tests.exactness.families import FAMILIES, VOCAB, Kind, executor
from tests.exactness.prompts import BASE, GREEDY, OTHER, PROMPTS, SEEDED
from tests.exactness.test_schedules import EXAMPLES
from tests.support.recording import Truth

TRUTHS: defaultdict[str | Kind, Truth] = defaultdict(Truth)
KS = (1, 3, 5, 7)
LENGTH = 16
"""Tokens drawn; with prompts that end up to that many before a page, the page is crossed."""

PENALISED = SamplingParams(
    max_tokens=99,
    temperature=0.8,
    top_k=30,
    min_p=0.01,
    repetition_penalty=1.3,
    presence_penalty=0.6,
    frequency_penalty=1.5,
    seed=5,
    min_tokens=6,
    logit_bias=((3, 2.0), (VOCAB - 1, 3.0), (40, 5.0), (41, 5.0)),
    stop_token_ids=(3, 17),
    logprobs=2,
)
"""Everything that makes a position's draw depend on the tokens before it, or on its number."""

ASKS = ((PROMPTS[4], GREEDY), (PROMPTS[2], SEEDED), (OTHER[:118], PENALISED))
"""Prompts of 127, 64 and 118 tokens."""


def driver(
    family: str | Kind, num_drafts: int, where: str, *, count_writes: bool = False
) -> DraftDriver:
    sizes = {"num_slots": 40, "num_pages": 60, "num_seats": 8, "num_drafts": num_drafts}
    found = executor(family, TRUTHS[family], where, count_writes=count_writes, **sizes)
    return DraftDriver(found)


def scripted(
    family: str | Kind, num_drafts: int, right: int, where: str, *, count_writes: bool = True
) -> tuple[DraftDriver, Script]:
    made = driver(family, num_drafts, where, count_writes=count_writes)
    script = Script(num_drafts, lambda _: right)
    made.executor.worker.runner.proposer = script
    return made, script


def begin(made: DraftDriver, prompt: tuple[int, ...], params: SamplingParams) -> Run:
    run = made.start(prompt, params)
    made.step([(run, len(prompt), ())])
    return run


@cache
def plain(
    family: str | Kind, prompt: tuple[int, ...], params: SamplingParams, index: int = 0
) -> tuple[tuple[int, ...], tuple[Emitted, ...]]:
    """The text without drafts, longer than any test needs; what was reported of each token."""
    made = driver(family, 0, "without drafts")
    run = made.start(prompt, params, sample_index=index)
    made.step([(run, len(prompt), ())])
    made.decode([run], LENGTH + max(KS) + 2)
    return run.text, tuple(made.drawn[run.name])


def unharmed(family: str | Kind, made: DraftDriver) -> bool:
    """Whether nothing differs from plain decode, and nothing was written that was not asked for."""
    assert TRUTHS[family].differences == []
    assert made.executor.bytes_beyond == []
    return True


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_drafts", KS)
def test_drafts_of_the_model_change_no_text_alone_or_together(family: str, num_drafts: int) -> None:
    made = driver(family, num_drafts, f"K = {num_drafts}")
    runs = [made.start(prompt, params) for prompt, params in ASKS]
    made.step([(runs[0], len(runs[0].prompt), ())])
    made.speculate(runs[:1], 4)
    made.step([(run, len(run.prompt), ()) for run in runs[1:]])
    made.speculate(runs, LENGTH)
    for run, (prompt, params) in zip(runs, ASKS, strict=True):
        text, _ = plain(family, prompt, params)
        assert run.text[:LENGTH] == text[:LENGTH]
    assert unharmed(family, made)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("num_drafts", "right"), [(k, r) for k in KS for r in sorted({0, 1, k})])
def test_forced_acceptance_changes_no_text_and_reports_as_plain_decode_does(
    family: str, num_drafts: int, right: int
) -> None:
    where = f"K = {num_drafts}, {right} right"
    made, script = scripted(family, num_drafts, right, where, count_writes=False)
    runs = [made.start(prompt, params) for prompt, params in ASKS]
    for run, (prompt, params) in zip(runs, ASKS, strict=True):
        script.texts[run.seat] = (*prompt, *plain(family, prompt, params)[0])
    made.step([(run, len(run.prompt), ()) for run in runs])
    made.speculate(runs, LENGTH)
    assert set(made.counts) == {(num_drafts, right)}
    for run, (prompt, params) in zip(runs, ASKS, strict=True):
        text, emitted = plain(family, prompt, params)
        assert run.text[:LENGTH] == text[:LENGTH]
        assert [told(e) for e in made.drawn[run.name][:LENGTH]] == [
            told(e) for e in emitted[:LENGTH]
        ]
    assert unharmed(family, made)


def told(emitted: Emitted) -> tuple[object, ...]:
    """What a client is told of a token."""
    return emitted.token, emitted.finite, emitted.logprob, emitted.top


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_among_replayed_drafts_holds_the_bytes_of_plain_decode(family: str) -> None:
    prompt = PROMPTS[4]
    made, script = scripted(family, 5, 5, "exports")
    run = made.start(prompt, GREEDY)
    script.texts[run.seat] = (*prompt, *plain(family, prompt, GREEDY)[0])
    made.step([(run, len(prompt), ())])
    made.verify([(run, 5, None)])
    for offset in (1, 3, 5):
        made.verify([(run, 5, run.folded + offset)])
    assert made.strays == []
    exported = {s.end: s.slot for s in made.saved if s.end > len(prompt)}
    assert list(exported) == [129, 137, 145]

    reference = driver(family, 0, "without drafts, for its bytes")
    twin = begin(reference, prompt, GREEDY)
    slots, expected = made.executor.arenas.slots, reference.executor.arenas.slots
    for end in range(128, 146):
        reference.step([(twin, end, ())])
        if end in exported:
            assert torch.equal(slots.storage[exported[end]], expected.storage[twin.slot])
    assert unharmed(family, made)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_that_is_not_reached_is_neither_written_nor_reported(family: str) -> None:
    prompt = PROMPTS[4]
    made, script = scripted(family, 3, 1, "unreached")
    run = made.start(prompt, GREEDY)
    script.texts[run.seat] = (*prompt, *plain(family, prompt, GREEDY)[0])
    made.step([(run, len(prompt), ())])
    for offset in (0, 3, 9):  # one draft is pending at most
        made.verify([(run, 3, run.folded + offset)])
    assert len(made.strays) == 3
    assert [s for s in made.saved if s.end > len(prompt)] == []
    assert unharmed(family, made)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_goes_on_from_an_anchor_that_accepted_drafts_crossed(family: str) -> None:
    prompt, anchor = BASE[:120], 128
    reference = driver(family, 0, "without drafts")
    twin = begin(reference, prompt, GREEDY)
    while twin.folded < anchor:
        reference.step([(twin, len(twin.tokens), ())])
    turn = (*twin.tokens[:anchor], *OTHER[:20])
    after = reference.start(turn, GREEDY, resume=decoded(twin, anchor, twin.slot))
    reference.step([(after, len(turn), ())])
    reference.decode([after], 12)

    made, script = scripted(family, 5, 5, "crossing")
    run = made.start(prompt, GREEDY)
    script.texts[run.seat] = (*prompt, *plain(family, prompt, GREEDY)[0])
    made.step([(run, len(prompt), ())])
    made.verify([(run, 5, None)])
    made.verify([(run, 5, None)])
    assert run.folded < anchor <= run.folded + made.pending[run.name]
    made.verify([(run, 5, anchor)])
    (saved,) = [s for s in made.saved if s.end == anchor]
    made.finish(run)
    resumed = made.start(turn, GREEDY, resume=saved)
    script.texts[resumed.seat] = (*turn, *after.text)
    made.step([(resumed, len(turn), ())])
    made.speculate([resumed], 12)
    assert resumed.text[:12] == after.text
    assert unharmed(family, made)


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_of_a_fan_out_draft_each_for_itself(family: str) -> None:
    prompt = PROMPTS[4]
    made = driver(family, 3, "fan-out")
    first = made.start(prompt, SEEDED)
    made.step([(first, 64, ())])
    runs = made.fan_out(first, SEEDED, 3)
    made.speculate(runs[1:], 6)
    made.speculate(runs, 10)
    texts = [run.text[:10] for run in runs]
    assert texts == [plain(family, prompt, SEEDED, index)[0][:10] for index in range(3)]
    assert len(set(texts)) == 3
    assert unharmed(family, made)


def accept_and_mix(family: str | Kind, data: st.DataObject) -> None:
    """Some steps of rows with any acceptance, each compared with its prompt without drafts."""
    num_drafts = data.draw(st.sampled_from(KS), label="K")
    dice = random.Random(data.draw(st.integers(0, 9999), label="acceptance"))
    made = driver(family, num_drafts, "random", count_writes=True)
    script = Script(num_drafts, lambda _: dice.randint(0, num_drafts))
    made.executor.worker.runner.proposer = script
    live: list[tuple[Run, SamplingParams]] = []
    for _ in range(data.draw(st.integers(3, 8), label="steps")):
        if len(live) < 4 and data.draw(st.booleans(), label="start another"):
            prompt, params = data.draw(st.sampled_from(ASKS), label="request")
            run = made.start(prompt, params)
            script.texts[run.seat] = (*prompt, *plain(family, prompt, params)[0])
            live.append((run, params))
        known, wishes = [], []
        for run, _ in live:
            if data.draw(st.integers(0, 3), label="idle") == 0:
                continue
            if run.in_prompt:
                whole = run.folded > 0 or data.draw(st.booleans(), label="whole")
                known.append((run, len(run.prompt) if whole else 64, ()))
                continue
            count = data.draw(st.integers(0, num_drafts), label="drafts")
            pending = made.pending.get(run.name, 0)
            inside = st.sampled_from([None, *range(run.folded + 1, run.folded + pending + 1)])
            wishes.append((run, count, data.draw(inside, label="export")))
        if known or wishes:
            made.verify(wishes, known)
        for run, params in [pair for pair in live if len(pair[0].text) >= LENGTH]:
            made.finish(run)
            live.remove((run, params))
            assert run.text[:LENGTH] == plain(family, run.prompt, params)[0][:LENGTH]
    for run, params in live:
        assert run.text == plain(family, run.prompt, params)[0][: len(run.text)]
    assert unharmed(family, made)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=EXAMPLES // 2)
@given(data=st.data())
def test_any_acceptance_any_number_of_drafts_any_neighbours(
    family: str, data: st.DataObject
) -> None:
    accept_and_mix(family, data)
