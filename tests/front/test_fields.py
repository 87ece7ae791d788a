"""Every request field of every route changes what is asked or answered, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from millpond.front.routes.chat import ChatRequest
from millpond.front.routes.completions import CompletionRequest
from millpond.front.routes.generate import GenerateRequest, SamplingParams
from millpond.front.routes.messages import CountRequest, MessagesRequest
from millpond.front.routes.responses import ResponsesRequest
from millpond.front.routes.tokens import DetokenizeRequest, TokenizeRequest
from millpond.front.schema import REFUSED, Sampling
from tests.front.conftest import Running, held, make_service, wait_for

HELLO = [{"role": "user", "content": "hello"}]
CALLABLE = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": CALLABLE}]
FLAT_TOOLS = [{"type": "function", **CALLABLE}]
OWN_TOOLS = [{"name": "add", "input_schema": {"type": "object"}}]

# What every test of a route sends beside its field; a seed, so that nothing changes by itself.
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "seed": 1},
    "/v1/completions": {"prompt": "hello", "seed": 1, "max_tokens": 9},
    "/v1/responses": {"input": "hello", "seed": 1},
    "/v1/messages": {"messages": HELLO, "max_tokens": 50, "seed": 1},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/generate": {"text": "hello", "sampling_params": {"seed": 1}},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5, 2012, 7]},
}


class With:
    """A value of a field that only matters beside other fields."""

    def __init__(self, value: Any, **others: Any) -> None:
        self.value, self.others = value, others


SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "n": 2, "stop": ["l"],
    "stop_token_ids": [9], "seed": 2, "logit_bias": {"5": 3}, "presence_penalty": 1.0,
    "frequency_penalty": 1.0, "repetition_penalty": 1.2, "ignore_eos": True, "min_tokens": 3,
    "min_new_tokens": 3, "skip_special_tokens": False, "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"}, "guided_json": {"type": "object"}, "guided_regex": "a",
    "guided_choice": ["a"], "guided_grammar": 'root ::= "a"', "json_schema": {"type": "object"},
    "regex": "a", "ebnf": 'root ::= "a"',
}  # fmt: skip
GENERATE = SAMPLING | {
    "model": "other", "max_tokens": 2, "best_of": 2, "prompt_logprobs": 1, "stream": True,
    "stream_options": With({"include_usage": True}, stream=True), "cache_salt": "s", "priority": 3,
    "return_token_ids": True, "include_metrics": True,
}  # fmt: skip
TURN = [{"role": "assistant", "content": "well"}]
CASES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "/v1/chat/completions": (
        ChatRequest,
        GENERATE
        | {
            "messages": [{"role": "user", "content": "bye"}], "max_completion_tokens": 2,
            "logprobs": True, "top_logprobs": With(2, logprobs=True), "tools": TOOLS,
            "tool_choice": With("none", tools=TOOLS),
            "parallel_tool_calls": With(False, tools=TOOLS, tool_choice="required"),
            "modalities": ["audio"], "reasoning_effort": "low", "thinking_token_budget": 5,
            "include_reasoning": False, "separate_reasoning": False,
            "stream_reasoning": With(False, stream=True), "add_generation_prompt": False,
            "chat_template_kwargs": {"reasoning_effort": "low"},
            "continue_final_message": With(True, messages=HELLO + TURN),
        },
    ),
    "/v1/completions": (
        CompletionRequest,
        GENERATE
        | {
            "prompt": "bye", "echo": True, "logprobs": 1,
            "add_special_tokens": None,  # this tokenizer adds none
        },
    ),
    "/v1/responses": (
        ResponsesRequest,
        SAMPLING
        | {
            "model": "other", "input": "bye", "instructions": "Be brief.", "max_output_tokens": 2,
            "tools": FLAT_TOOLS, "tool_choice": With("none", tools=FLAT_TOOLS),
            "parallel_tool_calls": False, "text": {"format": {"type": "json_object"}},
            "reasoning": {"effort": "low"}, "thinking_token_budget": 5,
            "chat_template_kwargs": {"reasoning_effort": "low"}, "top_logprobs": 2,
            "include": ["message.output_text.logprobs"], "truncation": "auto",
            "metadata": {"a": "b"}, "user": "u", "stream": True, "cache_salt": "s", "priority": 3,
        },
    ),
    "/v1/messages": (
        MessagesRequest,
        SAMPLING
        | {
            "model": "other", "messages": [{"role": "user", "content": "bye"}], "max_tokens": 2,
            "system": "Be brief.", "tools": OWN_TOOLS,
            "tool_choice": With({"type": "none"}, tools=OWN_TOOLS),
            "thinking": {"type": "enabled", "budget_tokens": 30},
            "output_config": {"effort": "low"}, "stop_sequences": ["l"], "stream": True,
            "chat_template_kwargs": {"reasoning_effort": "low"}, "cache_salt": "s", "priority": 3,
        },
    ),
    "/v1/messages/count_tokens": (
        CountRequest,
        dict.fromkeys(Sampling.model_fields)  # of a count nothing is drawn
        | {
            "n": 2, "model": "other", "messages": [{"role": "user", "content": "goodbye then"}],
            "system": "Be brief.", "tools": OWN_TOOLS,
            "tool_choice": With({"type": "none"}, tools=OWN_TOOLS), "thinking": None,
            "output_config": {"effort": "odd"}, "chat_template_kwargs": {"odd": 1},
        },
    ),
    "/generate": (
        GenerateRequest,
        {
            "model": "other", "text": "bye", "input_ids": With([5, 6], text=None),
            "sampling_params": {"max_new_tokens": 2}, "return_logprob": True,
            "logprob_start_len": With(0, return_logprob=True),
            "top_logprobs_num": With(1, return_logprob=True),
            "return_text_in_logprobs": With(True, return_logprob=True), "stream": True,
            "rid": "mine", "priority": 3, "cache_salt": "s", "extra_key": "s",
        },
    ),
    "/tokenize": (
        TokenizeRequest,
        {
            "model": "other", "prompt": "bye", "messages": With(HELLO, prompt=None),
            "tools": With(TOOLS, messages=HELLO, prompt=None),
            "add_special_tokens": None,  # this tokenizer adds none
            "add_generation_prompt": With(False, messages=HELLO, prompt=None),
            "continue_final_message": With(True, messages=HELLO + TURN, prompt=None),
            "chat_template_kwargs": With(
                {"reasoning_effort": "low"}, messages=HELLO, prompt=None
            ),
            "return_token_strs": True,
        },
    ),
    "/detokenize": (
        DetokenizeRequest,
        {"model": "other", "tokens": [5], "skip_special_tokens": True},
    ),
}  # fmt: skip
"""None: a field that can change nothing here, which is said where it stands."""

EACH = [(p, f, v) for p, (_, fields) in CASES.items() for f, v in fields.items() if v is not None]


@pytest.fixture(scope="module")
def server(tokenizer) -> Iterator[Running]:
    running = Running(make_service(tokenizer, "Think.</think>hello <|system|> well"))
    with httpx.Client(timeout=30) as running.client:
        yield running
        wait_for(lambda: held(running.service) == 0)
    running.close()


def told(server: Running, path: str, body: dict[str, Any]) -> tuple[httpx.Response, Any]:
    """(the answer, all that a request led to but what is new every time)."""
    before = len(server.service.engine.requests)
    headers = {"x-request-id": "same"}
    reply = server.client.post(server.url + path, json=body, headers=headers)
    sent = server.service.engine.requests[before:]
    asked = [{**msgspec.to_builtins(r), "request_id": ""} for r in sent]
    ignored = reply.headers.get("x-ignored-fields")
    return reply, (asked, reply.status_code, ignored, _settled(reply.text))


def _settled(text: str) -> Any:
    """An answer without times and drawn ids."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            drawn = ("created", "created_at", "completed_at", "e2e_latency", "item_id")
            kept = {k: v for k, v in value.items() if k not in drawn}
            if str(kept.get("id", "")).startswith(("rs_", "msg_", "fc_", "call_")):
                kept.pop("id")
            return {k: clean(v) for k, v in kept.items()}
        return [clean(v) for v in value] if isinstance(value, list) else value

    parts = [p.rpartition("data: ")[2] for p in text.split("\n\n") if p]
    return [p if p == "[DONE]" else clean(json.loads(p)) for p in parts]


@pytest.mark.parametrize("path, field, value", EACH, ids=lambda v: v if isinstance(v, str) else "")
def test_a_field_changes_something_or_is_refused_by_name(server, path, field, value):
    case = value if isinstance(value, With) else With(value)
    base = BASE[path] | case.others
    if path == "/generate" and field == "sampling_params":
        case.value = base["sampling_params"] | case.value
    _, plain = told(server, path, base)
    reply, changed = told(server, path, base | {field: case.value})
    assert reply.status_code < 500, reply.text
    if reply.status_code == 200:
        assert changed != plain
    elif path.startswith("/v1/messages"):
        assert field in reply.json()["error"]["message"]
    else:
        assert reply.json()["error"]["param"] in (field, f"{field}.{field}"), reply.text


@pytest.mark.parametrize("path", CASES)
def test_the_same_request_twice_says_the_same_and_no_field_is_forgotten(server, path):
    model, fields = CASES[path]
    assert set(fields) == set(model.model_fields)
    assert told(server, path, BASE[path])[1] == told(server, path, BASE[path])[1]


@pytest.mark.parametrize("field", sorted(SamplingParams.model_fields))
def test_a_sampling_parameter_of_generate_changes_something(server, field):
    own = {"max_new_tokens": 2, "sampling_seed": 5}
    base = BASE["/generate"]
    _, plain = told(server, "/generate", base)
    params = base["sampling_params"] | {field: (SAMPLING | own)[field]}
    reply, changed = told(server, "/generate", base | {"sampling_params": params})
    assert reply.status_code == 200, reply.text
    assert changed != plain


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("field", sorted(REFUSED))
def test_what_is_known_and_not_served_is_refused_by_name(server, path, field):
    _, harmless = REFUSED[field]
    reply, _ = told(server, path, BASE[path] | {field: {"x": 1}})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field
    for value in (*harmless, None, False):
        assert told(server, path, BASE[path] | {field: value})[0].status_code == 200
