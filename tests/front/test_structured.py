"""Structured output over HTTP and in Python, on the bundled model."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from millpond import GenerationConfig, Pipeline, PytorchEngineConfig, Rejected
from millpond.engine.grammar import Grammars
from millpond.front.compose import open_service
from millpond.front.service import Service
from tests.front.conftest import BUNDLED, Running

CONFIG = PytorchEngineConfig(
    max_batch_size=6, session_len=2048, num_kv_pages=160, prefix_cache_state_budget=4,
    device="cpu", debug_audit=True, debug_poison=True,
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
HELLO = [{"role": "user", "content": "Say something."}]
AMPLE = 700
"""Tokens in which any answer in the schema ends: it has 8 places for blanks, at most 66 in each."""
CHAT = {"messages": HELLO, "max_tokens": AMPLE, "temperature": 1.5, "thinking_token_budget": 12}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Lima", "Oslo"]}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    made = open_service(BUNDLED, CONFIG, name="tiny")
    yield made
    made.engine.close(drain=False, timeout=10)


@pytest.fixture(scope="module")
def server(service: Service) -> Iterator[Running]:
    running = Running(service)
    yield running
    running.close()


def post(server: Running, path: str, body: object) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def is_right(written: str) -> bool:
    found = json.loads(written)
    return list(found) == ["ok", "n"] and type(found["ok"]) is bool and found["n"] in (1, 22)


@pytest.mark.parametrize("seed", range(3))
def test_a_chat_thinks_freely_and_answers_in_the_schema(server: Running, seed: int):
    reply = post(server, "/v1/chat/completions", {**CHAT, "response_format": FORMAT, "seed": seed})
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert is_right(choice["message"]["content"])


def test_a_stream_is_the_same_answer(server: Running):
    body = {**CHAT, "response_format": FORMAT, "seed": 4}
    whole = post(server, "/v1/chat/completions", body).json()["choices"][0]["message"]
    with httpx.stream(
        "POST", server.url + "/v1/chat/completions", json={**body, "stream": True}, timeout=60
    ) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1] if "delta" in line]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["content"]


@pytest.mark.parametrize(
    "fields, pattern",
    [
        ({"response_format": {"type": "regex_schema", "regex_schema": "[ab]{5}"}}, "[ab]{5}"),
        ({"structured_outputs": {"regex": "[ab]{5}"}}, "[ab]{5}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "x" ("y" | "z")'}, "x[yz]"),
        ({"ebnf": 'root ::= "x" [yz]'}, "x[yz]"),
        ({"regex": "[ab]{5}", "n": 2}, "[ab]{5}"),
    ],
)
def test_completions_take_every_spelling(server: Running, fields: dict[str, Any], pattern: str):
    body = {"prompt": "Go on.", "max_tokens": 30, "temperature": 1.5, **fields}
    reply = post(server, "/v1/completions", body)
    assert reply.status_code == 200, reply.text
    for choice in reply.json()["choices"]:
        assert re.fullmatch(pattern, choice["text"])
        assert choice["finish_reason"] == "stop"


def test_other_routes_answer_in_the_schema_too(server: Running):
    schema = json.dumps(SCHEMA)
    sampling = {"temperature": 1.5, "max_new_tokens": AMPLE, "json_schema": schema}
    own = post(server, "/generate", {"text": "Go on.", "sampling_params": sampling})
    assert is_right(own.json()["text"])
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    body = {"input": "Go on.", "text": text, "max_output_tokens": AMPLE}
    body["thinking_token_budget"] = 9
    said = post(server, "/v1/responses", body).json()
    (message,) = [item for item in said["output"] if item["type"] == "message"]
    assert is_right(message["content"][0]["text"])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": TOOL["function"]}])
def test_a_required_call_is_made_with_its_arguments(server: Running, choice: Any):
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": "get_weather"}}
    body = {**CHAT, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    reply = post(server, "/v1/chat/completions", body).json()["choices"][0]
    assert reply["finish_reason"] == "tool_calls"
    (call,) = reply["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Lima", "Oslo")


@pytest.mark.parametrize(
    "fields, param",
    [
        (
            {"response_format": {**FORMAT, "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
        ),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
        ({"ebnf": "root ::= nowhere"}, "ebnf"),
        ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json"),
        ({"regex": "a", "response_format": FORMAT}, "regex"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_compiled_is_a_400_that_names_the_field(
    server: Running, fields: dict[str, Any], param: str, stream: bool
):
    reply = post(server, "/v1/chat/completions", {**CHAT, **fields, "stream": stream})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_a_request_that_leaves_itself_nothing_to_say_is_its_callers_mistake(server: Running):
    body = {
        "prompt": "x", "guided_choice": ["ab"], "stop_token_ids": list(range(2048)),
        "min_tokens": 3, "max_tokens": 9,
    }  # fmt: skip
    reply = post(server, "/v1/completions", body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "guided_choice")
    assert "stop_token_ids and min_tokens" in reply.json()["error"]["message"]
    events = post(server, "/v1/completions", {**body, "stream": True}).text.split("\n\n")
    assert '"type":"invalid_request_error"' in events[-3]
    wish = GenerationConfig(
        response_format={"type": "regex_schema", "regex_schema": "ab"},
        stop_token_ids=tuple(range(2048)), min_new_tokens=3, max_new_tokens=9,
    )  # fmt: skip
    pipe = Pipeline(server.service)
    pipe.close = lambda: None  # type: ignore[method-assign]  # the engine is the module's
    with pytest.raises(Rejected, match="min_tokens"):
        pipe("x", wish, do_preprocess=False)


def test_a_compilation_stalls_no_other_request(server: Running, monkeypatch):
    gate, entered = threading.Event(), threading.Event()
    compile_ = Grammars._compile

    def gated(self: Grammars, constraint):
        entered.set()
        assert gate.wait(60)
        return compile_(self, constraint)

    monkeypatch.setattr(Grammars, "_compile", gated)
    got: list[httpx.Response] = []
    body = {"prompt": "Go on.", "max_tokens": 40, "regex": "never compiled before"}
    asking = threading.Thread(target=lambda: got.append(post(server, "/v1/completions", body)))
    asking.start()
    assert entered.wait(60)
    plain = post(server, "/v1/completions", {"prompt": "Go on.", "max_tokens": 3})
    assert plain.status_code == 200
    assert httpx.get(server.url + "/health").status_code == 200
    assert not got
    gate.set()
    asking.join(60)
    assert got[0].json()["choices"][0]["text"] == "never compiled before"


def test_python_asks_by_response_format(service: Service):
    pipe = Pipeline(service)
    pipe.close = lambda: None  # type: ignore[method-assign]  # the engine is the module's
    wish = GenerationConfig(
        max_new_tokens=AMPLE, do_sample=True, temperature=1.5, response_format=FORMAT
    )
    answers = pipe(["One.", "Two."], wish, do_preprocess=False)
    assert all(is_right(answer.text) and answer.finish_reason == "stop" for answer in answers)
    with pytest.raises(Rejected, match="cannot be used"):
        pipe(
            "One.",
            wish.model_copy(
                update={"response_format": {"type": "regex_schema", "regex_schema": "["}}
            ),
        )
