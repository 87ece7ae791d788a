"""An engine whose steps are recordings, two in flight: texts, states and pages of plain steps."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.plan.sampling import SamplingParams
from millpond.runtime.graphs import CallAgain
from tests.exactness import engines
from tests.exactness.engines import Ask, House, Served, alone, serve
from tests.exactness.families import executor
from tests.exactness.prompts import BASE, OTHER, PROMPTS
from tests.support.recording import RecordingExecutor, Truth

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True)
SEVERAL = SamplingParams(max_tokens=12, temperature=1.2, top_k=30, seed=3, n=2, ignore_eos=True)
WEIGHED = SamplingParams(
    max_tokens=20, temperature=0.9, seed=5, frequency_penalty=0.6, logprobs=1, ignore_eos=True
)
ASKS = [
    Ask(PROMPTS[4], GREEDY),
    Ask(PROMPTS[2], SEEDED),
    Ask(BASE[:126], SEVERAL),
    Ask(PROMPTS[4], SEEDED, arrives=12),
    Ask(OTHER[:90], WEIGHED, arrives=18),
    Ask(PROMPTS[2], GREEDY, arrives=20),
]
ALONG = {"decode_checkpoint_interval": 64, "max_prefill_tokens": 512}


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of several seats record their steps."""

    def capturing(*args: Any, **given: Any) -> RecordingExecutor:
        found = executor(*args, **given)
        if given["runs_ahead"]:
            found.worker.runner.capture(capturer=CallAgain())
        return found

    monkeypatch.setattr(engines, "executor", capturing)


def served(family: str, truth: Truth, asks: list[Ask], **house: Any) -> Served:
    made = House(runs_ahead=True, num_seats=6, settings=ALONG, **house)
    return serve(family, made, asks, truth, "recorded")


@pytest.mark.parametrize("family, num_drafts", [("glm", 0), ("qwen", 0), ("glm", 3)])
def test_texts_states_and_pages_are_those_of_plain_steps(family: str, num_drafts: int) -> None:
    truth = Truth()
    found = served(family, truth, ASKS, num_drafts=num_drafts)
    assert found.texts == [alone(family, ask, truth) for ask in ASKS]
    assert truth.differences == []
    assert truth.num_compared > 0
    assert found.executor.bytes_beyond == []
    runner = found.executor.worker.runner
    assert runner.num_replays > found.stats.steps_ahead > 10


def test_ends_aborts_and_failures_leave_the_others_right() -> None:
    truth = Truth()
    asks = [
        Ask(PROMPTS[4], GREEDY, aborted=9),
        Ask(PROMPTS[2], SEEDED, cut=12),
        Ask(BASE[:126], GREEDY),
        Ask(OTHER[:118], SEEDED, arrives=6),
    ]
    found = served("qwen", truth, asks, num_drafts=3, fail_at=16)
    assert found.stats.steps_failed == 1
    for text, ask in zip(found.texts[2:], asks[2:], strict=True):
        assert text == alone("qwen", ask, truth)
    assert truth.differences == []
    assert found.executor.bytes_beyond == []
