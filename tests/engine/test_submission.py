"""Refusals: each names the value, the limit and the field, and allocates nothing."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from millpond.engine.constraint import Constraint, Reasoning
from millpond.errors import Refused, Rejected
from tests.support.towers import Tower


@pytest.mark.parametrize(
    "field, params",
    [
        ("n", {"n": 0}),
        ("n", {"n": 5}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": -1}),
        ("max_tokens", {"max_tokens": 10**400}),
        ("cache_salt", {"cache_salt": "\ud800"}),
        ("min_tokens", {"min_tokens": -1}),
        ("min_tokens", {"min_tokens": 6, "max_tokens": 5}),
        ("temperature", {"temperature": math.nan}),
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": math.inf}),
        ("top_p", {"top_p": 0.0}),
        ("top_p", {"top_p": 1.5}),
        ("top_k", {"top_k": -1}),
        ("min_p", {"min_p": math.nan}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("presence_penalty", {"presence_penalty": math.inf}),
        ("frequency_penalty", {"frequency_penalty": math.nan}),
        ("logit_bias", {"logit_bias": ((50, 1.0),)}),
        ("logit_bias", {"logit_bias": ((1, math.nan),)}),
        ("stop_token_ids", {"stop_token_ids": (-1,)}),
        ("logprobs", {"logprobs": -1}),
        ("prompt_logprobs", {"prompt_logprobs": 51}),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(field, params):
    tower = Tower()
    with pytest.raises(Rejected) as refusal:
        tower.engine.submit(tower.request(range(10), **params))
    assert refusal.value.param == field
    assert isinstance(refusal.value, ValueError)
    tower.assert_nothing_is_held()


@pytest.mark.parametrize("tokens", [(), (50,), (-1,), (1, 2.5), ("a",), (1 << 70,), None])
def test_a_prompt_that_is_no_list_of_tokens_is_refused(tokens):
    tower = Tower()
    request = tower.request([1])
    request = type(request)(request_id="x", tokens=tokens, params=request.params)
    with pytest.raises(Rejected) as refusal:
        tower.engine.submit(request)
    assert refusal.value.param == "prompt"


@pytest.mark.parametrize(
    "limits, words",
    [
        ({"session_len": 100}, "session_len allows 100 tokens"),
        ({"max_position": 100}, "the model allows 100 tokens"),
        ({"num_pages": 1}, "all 1 pages hold 64 tokens"),
    ],
)
def test_a_prompt_without_room_for_an_answer_is_refused_with_both_numbers(limits, words):
    tower = Tower(**limits)
    longest = tower.token_limit - 1
    assert tower.answers([tower.request(range(longest))])
    with pytest.raises(Rejected, match=words) as refusal:
        tower.engine.submit(tower.request(range(longest + 1)))
    assert refusal.value.code == "context_length_exceeded"
    assert str(longest + 1) in str(refusal.value)


def test_samples_whose_copies_can_never_fit_are_refused():
    tower = Tower(num_pages=3)
    tower.answers([tower.request(range(65), n=2)])
    with pytest.raises(Rejected) as refusal:
        tower.engine.submit(tower.request(range(65), n=3))
    assert refusal.value.param == "n"


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    tower = Tower()
    request = tower.request(range(10))
    tower.engine.submit(request)
    with pytest.raises(Rejected) as refusal:
        tower.engine.submit(request)
    assert refusal.value.param == "request_id"
    tower.run()
    assert tower.answers([request]) == [tower.naive(request)]


@pytest.mark.parametrize(
    "numbers, words",
    [
        ({"prefill_save_alignment": 100}, "100 is not a positive multiple of the page, 64"),
        ({"prefill_save_alignment": 0}, "0 is not a positive multiple"),
        ({"max_batch_size": 5}, "max_batch_size 5 exceeds the 4 seats"),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens must be at least 1"),
        ({"session_len": 1}, "session_len must be at least 2, not 1"),
        ({"checkpoint_budget": -1}, "must not be negative"),
        ({"num_slots": 0}, "0 slots"),
    ],
)
def test_settings_that_cannot_serve_are_refused_at_start(numbers, words):
    with pytest.raises(Refused, match=words):
        Tower(**numbers)


@pytest.mark.parametrize(
    "reasoning, field",
    [
        (Reasoning(end_token=50, is_open=True), "reasoning"),
        (Reasoning(end_token=-1, is_open=True), "reasoning"),
        (Reasoning(end_token=1, is_open=False, start_token=99), "reasoning"),
        (Reasoning(end_token=1, is_open=True, budget=-1), "thinking_token_budget"),
        (Reasoning(end_token=1, is_open=True, budget=1 << 70), "thinking_token_budget"),
    ],
)
def test_reasoning_that_cannot_be_followed_is_refused(reasoning, field):
    tower = Tower()
    request = replace(tower.request(range(10)), reasoning=reasoning)
    with pytest.raises(Rejected) as refusal:
        tower.engine.submit(request)
    assert refusal.value.param == field
    tower.assert_nothing_is_held()


def test_a_constraint_without_anything_to_compile_it_is_refused():
    tower = Tower()
    constraint = Constraint(kind="json_object", param="theirs")
    with pytest.raises(Rejected) as refusal:
        tower.engine.submit(replace(tower.request(range(10)), constraint=constraint))
    assert (refusal.value.param, refusal.value.code) == ("theirs", "unsupported")
    tower.assert_nothing_is_held()
