"""The blocking face, against a scripted engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from millpond import (
    GenerationConfig,
    Pipeline,
    Refused,
    Rejected,
    StepFailed,
    Unavailable,
    pipeline,
)
from millpond.front.compose import locate
from millpond.front.text import Tokenizer
from tests.front.conftest import held, make_service, wait_for

GREEDY = GenerationConfig(max_new_tokens=64, do_sample=False)


@pytest.fixture
def pipe(tokenizer: Tokenizer) -> Iterator[Pipeline]:
    with Pipeline(make_service(tokenizer, "Add.</think>4 é.")) as made:
        yield made
        wait_for(lambda: held(made.service) == 0)


def test_a_response_says_what_was_answered_and_what_it_took(pipe):
    r = pipe("What is 2 + 2?", gen_config=GREEDY)
    assert (r.text, r.reasoning_text, r.raw_text) == ("4 é.", "Add.", "Add.</think>4 é.")
    assert (r.finish_reason, r.prefix, r.cached_tokens) == ("stop", "too_short", 0)
    assert r.completion_tokens == len(r.token_ids)
    sent = pipe.service.engine.requests[-1]
    assert r.prompt_tokens == len(sent.tokens)
    assert sent.params.temperature == 0.0


def test_a_string_goes_through_the_chat_template_and_ids_do_not(pipe):
    pipe("hi")
    pipe([{"role": "user", "content": "hi"}])
    pipe("hi", do_preprocess=False)
    pipe([5, 6])
    chat, same, raw, ids = (r.tokens for r in pipe.service.engine.requests)
    assert chat == same
    assert len(chat) > len(raw)
    assert ids == (5, 6)


def test_raw_text_keeps_its_think_marks(pipe):
    assert pipe("hi", do_preprocess=False).text == "Add.</think>4 é."


def test_a_list_of_prompts_gives_a_list_in_its_order(pipe):
    made = pipe(["a", [{"role": "user", "content": "b"}], [7, 8, 9]], gen_config=GREEDY)
    assert [r.index for r in made] == [0, 1, 2]
    assert made[2].prompt_tokens == 3
    assert pipe([]) == []


def test_each_prompt_may_have_its_own_configuration(pipe):
    short = GenerationConfig(max_new_tokens=1)
    assert [r.completion_tokens > 1 for r in pipe(["a", "b"], gen_config=[short, GREEDY])] == [
        False,
        True,
    ]
    with pytest.raises(Rejected, match="2 configurations for 1"):
        pipe(["a"], gen_config=[short, GREEDY])


def test_a_stream_joined_is_the_whole_answer(pipe):
    whole = pipe("a", gen_config=GREEDY)
    pieces = list(pipe.stream_infer("a", gen_config=GREEDY))
    assert "".join(p.text for p in pieces) == whole.text
    assert "".join(p.reasoning_text for p in pieces) == whole.reasoning_text
    assert tuple(t for p in pieces for t in p.token_ids) == whole.token_ids
    assert (pieces[-1].finish_reason, pieces[0].finish_reason) == ("stop", None)
    assert pieces[-1].completion_tokens == whole.completion_tokens


def test_leaving_a_stream_early_ends_the_request(tokenizer):
    with Pipeline(make_service(tokenizer, "word " * 500, pause=0.01)) as pipe:
        for _ in pipe.stream_infer(["a", "b"]):
            break
        wait_for(lambda: held(pipe.service) == 0)
        assert len(pipe.service.engine.aborted) == 2


def test_samples_of_one_prompt_come_together(pipe):
    r = pipe("a", gen_config=GenerationConfig(max_new_tokens=64, n=3))
    assert [s.text for s in r.samples] == ["4 é.", "4 é. #1", "4 é. #2"]
    assert r.text == r.samples[0].text


def test_stop_words_end_an_answer_without_being_part_of_it(pipe):
    r = pipe("a", gen_config=GenerationConfig(stop_words=["nk>4"]))
    assert (r.raw_text, r.finish_reason, r.stop_reason) == ("Add.</thi", "stop", "nk>4")


def test_logprobs_have_the_token_first(pipe):
    r = pipe("a", gen_config=GenerationConfig(logprobs=2))
    assert [next(iter(d)) for d in r.logprobs] == list(r.token_ids)
    assert pipe("a").logprobs is None


def test_a_seed_that_was_drawn_is_told(pipe):
    r = pipe("a", gen_config=GenerationConfig(do_sample=True))
    assert r.random_seed == pipe.service.engine.requests[-1].params.seed
    assert pipe("a", gen_config=GREEDY).random_seed is None


@pytest.mark.parametrize(
    "prompt",
    ["", [""], [[]], 3, [3.5], ["a", 3], [5, "a"], [True], [-1], [2048], [{"role": "x"}], "\ud800"],
)
def test_a_prompt_that_cannot_be_served_is_a_value_error(pipe, prompt):
    with pytest.raises(ValueError) as caught:
        pipe(prompt)
    assert isinstance(caught.value, Rejected)
    assert pipe.service.engine.requests == []


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(pipe):
    with pytest.raises(Rejected, match=r"600.*allows 512"):
        pipe([5] * 600)


def test_a_failed_answer_raises_alone_and_is_marked_in_a_list(pipe):
    pipe.service.engine.fault = "not finite"
    with pytest.raises(StepFailed, match="not finite"):
        pipe("a")
    pipe.service.engine.fault = "not finite"
    failed = [r.error for r in pipe(["a", "b"])]
    assert sorted(failed, key=str) == [None, "not finite"]
    pipe.service.engine.fault = "not finite"
    with pytest.raises(StepFailed):
        list(pipe.stream_infer("a"))


def test_a_closed_pipeline_says_so(tokenizer):
    pipe = Pipeline(make_service(tokenizer, "x"))
    pipe.close()
    pipe.close()
    with pytest.raises(Unavailable, match="closed"):
        pipe("a")


def test_callers_hear_that_the_pipeline_was_closed_under_them(tokenizer):
    """Also while the thread that brings them their pieces is busy with something else."""
    pipe = Pipeline(make_service(tokenizer, "and so on " * 50, pause=0.02))
    long = GenerationConfig(max_new_tokens=400, ignore_eos=True)
    ends: list[str | None] = []
    callers = [
        threading.Thread(target=lambda: ends.append(pipe("a", long).finish_reason), daemon=True)
        for _ in range(3)
    ]
    for caller in callers:
        caller.start()
    wait_for(lambda: len(pipe._pumps) == 3)
    pipe._loop.call_soon_threadsafe(time.sleep, 0.5)
    pipe.close()
    for caller in callers:
        caller.join(10)
    assert ends == ["abort"] * 3


def test_several_threads_may_share_a_pipeline(pipe):
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(pipe("a").text)) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert texts == ["4 é."] * 6


def test_an_unknown_model_is_refused_with_what_there_is(tmp_path):
    with pytest.raises(Refused, match="millpond-tiny-glm"):
        pipeline("no-such-model")
    with pytest.raises(Refused, match=r"config\.json"):
        pipeline(tmp_path)
    assert locate(None).name == "millpond-tiny-glm"
