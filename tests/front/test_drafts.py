"""Drafts through every door: the same answers in fewer steps, and the numbers that say so."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from millpond import GenerationConfig, Pipeline, PytorchEngineConfig, SpeculativeConfig
from millpond.errors import Refused
from millpond.front.compose import open_service
from tests.front.conftest import BUNDLED, Running

CONFIG = PytorchEngineConfig(
    max_batch_size=4, session_len=1024, num_kv_pages=60, prefix_cache_state_budget=4,
    max_prefill_token_num=256, device="cpu", debug_audit=True, debug_poison=True,
)  # fmt: skip
QUESTION = "Repeat exactly: the grey heron stands in the shallow water."
GREEDY = GenerationConfig(max_new_tokens=40, do_sample=False, ignore_eos=True)
SAMPLED = GenerationConfig(
    max_new_tokens=40, do_sample=True, temperature=0.8, random_seed=3, frequency_penalty=0.4,
    logprobs=2, ignore_eos=True,
)  # fmt: skip


def opened(count: int) -> Pipeline:
    speculative = SpeculativeConfig(method="deepseek_mtp", num_speculative_tokens=count)
    return Pipeline(open_service(BUNDLED, CONFIG, speculative, name="tiny"))


@pytest.fixture(scope="module")
def plain() -> Iterator[Pipeline]:
    with opened(0) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def drafting() -> Iterator[Pipeline]:
    with opened(3) as pipe:
        yield pipe


@pytest.mark.parametrize("wish", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_answers_are_the_same_in_fewer_steps(plain, drafting, wish):
    steps = []
    answers = []
    for pipe in (plain, drafting):
        pipe.flush_cache()
        before = pipe.stats().steps
        answers.append(pipe([QUESTION, "What is 2 + 2?"], wish))
        steps.append(pipe.stats().steps - before)
    for one, other in zip(*answers, strict=True):
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        assert [tuple(t) for t in one.logprobs or ()] == [tuple(t) for t in other.logprobs or ()]
    assert steps[1] < steps[0]
    assert drafting.stats().accepted_tokens > 0
    assert plain.stats().drafts == 0


def test_the_next_turn_finds_the_state_of_the_answer(drafting):
    drafting.flush_cache()
    prompt = [(7 * i) % 2000 for i in range(100)]
    answer = drafting(prompt, GREEDY)
    turn = drafting([*prompt, *answer.token_ids, 5, 6, 7], GREEDY)
    assert turn.cached_tokens == 128
    assert drafting.stats().checkpoints_published["decode"] >= 1


def test_metrics_and_usage_tell_what_was_drafted_and_accepted(drafting):
    server = Running(drafting.service)
    try:
        before = drafting.stats()
        body = {"prompt": QUESTION, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        usage = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()["usage"]
        after = drafting.stats()
        metrics = httpx.get(server.url + "/metrics", timeout=60).text
    finally:
        server.close()
    told = usage["completion_tokens_details"]
    accepted = after.accepted_tokens - before.accepted_tokens
    drafted = after.draft_tokens - before.draft_tokens
    assert told["accepted_prediction_tokens"] == accepted > 0
    assert told["rejected_prediction_tokens"] == drafted - accepted
    lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    for prefix in ("millpond_", "vllm:"):
        found = {
            name.removeprefix(f"{prefix}spec_decode_"): float(value)
            for name, value in lines.items()
            if name.startswith(f"{prefix}spec_decode_") and not name.endswith("_created")
        }
        per_position = after.accepted_per_position
        assert found == {
            "num_drafts_total": after.drafts,
            "num_draft_tokens_total": after.draft_tokens,
            "num_accepted_tokens_total": after.accepted_tokens,
            **{
                f'num_accepted_tokens_per_pos_total{{position="{i}"}}': per_position[i]
                for i in range(3)
            },
        }


@pytest.mark.parametrize("stream", [False, True])
def test_one_answer_tells_how_its_own_drafts_fared(drafting, stream):
    server = Running(drafting.service)
    try:
        before = drafting.stats()
        body = {
            "prompt": QUESTION, "max_tokens": 30, "temperature": 0, "ignore_eos": True,
            "stream": stream, "include_metrics": True,
        }  # fmt: skip
        reply = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
        after = drafting.stats()
        several = httpx.post(server.url + "/v1/completions", json={**body, "n": 2}, timeout=60)
    finally:
        server.close()
    last = reply.text.split("\n\n")[-3] if stream else reply.text
    told = json.loads(last.removeprefix("data: "))["metrics"]["speculative_decoding"]
    assert told["num_spec_steps"] == after.drafts - before.drafts > 0
    assert told["num_draft_tokens"] == after.draft_tokens - before.draft_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    assert told["num_accepted_draft_tokens"] == accepted > 0
    histogram = told["acceptance_histogram"]
    assert (len(histogram), told["num_spec_tokens"]) == (4, 3)
    assert sum(histogram) == told["num_spec_steps"]
    assert sum(kept * steps for kept, steps in enumerate(histogram)) == accepted
    assert told["mean_acceptance_length"] == 1 + accepted / told["num_spec_steps"]
    assert told["draft_acceptance_rate"] == accepted / told["num_draft_tokens"]
    assert "metrics" not in several.text


def test_without_drafts_load_clients_find_none(plain):
    server = Running(plain.service)
    try:
        metrics = httpx.get(server.url + "/metrics", timeout=60).text
    finally:
        server.close()
    assert "millpond_spec_decode_num_drafts_total 0.0" in metrics
    assert "vllm:" not in metrics


def test_more_drafts_than_are_served_are_refused_before_weights_are_read():
    with pytest.raises(Refused, match="8 draft tokens are not supported, use 0 to 7"):
        opened(8)
