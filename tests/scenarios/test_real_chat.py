"""The same with the bundled model and its own template, through the pipeline."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from millpond import GenerationConfig, Pipeline, PytorchEngineConfig
from millpond.front.compose import open_service
from tests.front.conftest import BUNDLED
from tests.scenarios.talk import whole

CONFIG = PytorchEngineConfig(
    max_batch_size=4, session_len=2048, num_kv_pages=120, prefix_cache_state_budget=12,
    max_prefill_token_num=1024, device="cpu", debug_audit=True, debug_poison=True,
)  # fmt: skip
SYSTEM = "You look after the ledger of a mill. " * 40


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    with Pipeline(open_service(BUNDLED, CONFIG, name="tiny")) as made:
        yield made


@pytest.fixture(autouse=True)
def _starts_cold(pipe: Pipeline) -> None:
    pipe.flush_cache()


def greedy(tokens: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=tokens, do_sample=False, ignore_eos=True)


def test_a_conversation_starts_each_turn_where_the_last_answer_ended(pipe):
    history = [(5 * i) % 1500 for i in range(150)]
    before = 0
    for turn in range(3):
        history += [(turn + 3 * i) % 1500 for i in range(40)]
        answer = pipe(history, greedy(40))
        assert answer.cached_tokens == whole(before)
        history += answer.token_ids
        before = len(history) - 1
    pipe.flush_cache()
    assert pipe(history[:-40], greedy(40)).token_ids == answer.token_ids


def plan_together(pipe: Pipeline, count: int, patch: pytest.MonkeyPatch) -> threading.Thread:
    """Occupies the engine until `count` requests wait for it, so that one step finds them all."""
    engine, entered, all_there = pipe.service.engine, threading.Event(), threading.Event()
    executor, came = engine._flights._executor, []
    submit, launch = engine.submit, executor.launch

    def counted(request):
        stream = submit(request)
        came.append(request)
        if len(came) == 1 + count:
            all_there.set()
        return stream

    def late(plan):
        entered.set()
        assert all_there.wait(60)
        return launch(plan)

    patch.setattr(engine, "submit", counted)
    patch.setattr(executor, "launch", late)
    occupying = threading.Thread(target=pipe, args=([5, 6, 7], greedy(1)))
    occupying.start()
    assert entered.wait(60)
    return occupying


def test_messages_of_one_system_prompt_sent_together_compute_it_once(pipe, monkeypatch):
    asked = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{n} sacks?"}]
        for n in (7, 11, 13, 5)
    ]
    occupying = plan_together(pipe, len(asked), monkeypatch)
    answers = pipe(asked, greedy(8))
    occupying.join(60)
    first, *others = (answer.cached_tokens for answer in answers)
    assert first == 0
    assert len(set(others)) == 1
    assert answers[0].prompt_tokens - 64 - 20 < others[0], (
        "all but the question, and less than a page"
    )
    counted = pipe.service.engine.stats()
    assert counted.holds["published"] >= 3
    pipe.flush_cache()
    alone = [pipe(messages, greedy(8)).token_ids for messages in reversed(asked)]
    assert [answer.token_ids for answer in reversed(answers)] == alone


def test_a_conversation_by_messages_is_never_computed_from_the_start_again(pipe):
    messages = [{"role": "system", "content": SYSTEM}]
    before = 0
    for turn in range(3):
        messages.append({"role": "user", "content": f"And {turn + 2} more sacks, how many now?"})
        answer = pipe(messages, greedy(30))
        # What the template drops of the last turn is the think block it opened, and no more.
        assert answer.cached_tokens >= whole(max(0, before - 8))
        messages.append({"role": "assistant", "content": answer.text})
        before = answer.prompt_tokens
