"""Reasoning and tool calls from end to end: a client's tools in, calls out, results in again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from millpond import GenerationConfig, Pipeline, PytorchEngineConfig, Rejected
from millpond.front.compose import open_service
from millpond.front.parsing.base import CallStart, Reasoning, collect
from millpond.front.text import Tokenizer
from tests.front.conftest import BUNDLED, held, make_service, wait_for

GREEDY = GenerationConfig(max_new_tokens=96, do_sample=False)


def tool(name: str, **fields: str) -> dict[str, Any]:
    """A tool as clients describe it."""
    properties = {key: {"type": kind} for key, kind in fields.items()}
    parameters = {"type": "object", "properties": properties, "required": list(fields)}
    function = {"name": name, "description": f"{name}.", "parameters": parameters}
    return {"type": "function", "function": function}


WEATHER = tool("get_weather", city="string")
TOOLS = [WEATHER, tool("add", a="integer", b="integer"), tool("get_time")]
CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Åre</arg_value></tool_call>"


@pytest.fixture
def scripted(tokenizer: Tokenizer) -> Iterator[Pipeline]:
    with Pipeline(make_service(tokenizer, f"Look.</think>I look.{CALL}")) as made:
        yield made
        wait_for(lambda: held(made.service) == 0)


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    config = PytorchEngineConfig(
        max_batch_size=4, session_len=1024, num_kv_pages=80, prefix_cache_state_budget=8,
        device="cpu", debug_audit=True,
    )  # fmt: skip
    with Pipeline(open_service(BUNDLED, config, name="tiny")) as made:
        yield made


def test_a_call_arrives_in_python(scripted):
    r = scripted("Weather?", GREEDY, tools=TOOLS)
    assert (r.reasoning_text, r.text, r.finish_reason) == ("Look.", "I look.", "tool_calls")
    assert [(c.name, c.object()) for c in r.tool_calls] == [("get_weather", {"city": "Åre"})]
    streamed = list(scripted.stream_infer("Weather?", GREEDY, tools=TOOLS))
    assert len(streamed) > 5
    again = collect(e for piece in streamed for e in piece.events)
    assert [(c.name, c.arguments) for c in again.calls] == [("get_weather", '{"city": "Åre"}')]


def test_without_tools_or_with_none_wanted_the_same_tokens_are_text(scripted):
    for how in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        r = scripted("Weather?", GREEDY, **how)
        assert (r.text, r.tool_calls, r.finish_reason) == (f"I look.{CALL}", (), "stop")


def test_keywords_that_make_no_sense_are_refused(scripted):
    for how in (
        {"tools": TOOLS, "tool_choice": "some"},
        {"reasoning_effort": "medium"},
        {"thinking_budget": -1},
    ):
        with pytest.raises(Rejected):
            scripted("Weather?", GREEDY, **how)


def test_the_chat_route_streams_the_fields_that_clients_read(serve):
    running = serve(f"Look.</think>I look.{CALL}{CALL}")
    body = {
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": TOOLS,
        "stream": True,
        "temperature": 0,
    }
    lines = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=30).text
    chunks = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    for name, text in (
        ("reasoning", "Look."),
        ("reasoning_content", "Look."),
        ("content", "I look."),
    ):
        assert "".join(d.get(name) or "" for d in deltas) == text
    parts = [part for d in deltas for part in d.get("tool_calls", ())]
    for index in (0, 1):
        mine = [p for p in parts if p["index"] == index]
        assert mine[0]["id"].startswith("call_")
        assert mine[0]["type"] == "function"
        assert [p["function"]["name"] for p in mine if "name" in p["function"]] == ["get_weather"]
        arguments = "".join(p["function"]["arguments"] for p in mine)
        assert json.loads(arguments) == {"city": "Åre"}
        assert len(mine) > 2
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    whole = httpx.post(
        f"{running.url}/v1/chat/completions", json={**body, "stream": False}, timeout=30
    ).json()
    message = whole["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"]) == ("Look.", "Look.")
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["get_weather"] * 2


def test_the_bundled_model_calls_a_tool_and_goes_on_from_its_result(pipe):
    asked = {"role": "user", "content": "What is the weather in Paris?"}
    r = pipe([asked], GREEDY, tools=TOOLS)
    assert r.finish_reason == "tool_calls"
    assert [(c.name, c.object()) for c in r.tool_calls] == [("get_weather", {"city": "Paris"})]
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in r.tool_calls
    ]
    reply = {"role": "assistant", "content": r.text, "reasoning": r.reasoning_text}
    result = {"role": "tool", "tool_call_id": calls[0]["id"]}
    result["content"] = '{"temperature": 7, "sky": "rainy"}'
    talk = [asked, {**reply, "tool_calls": calls}, result]
    prompt = pipe.service.template.render(talk, tools=TOOLS).text
    tokens = tuple(pipe.tokenizer.encode(prompt, add_special_tokens=False))
    generated = r.token_ids[:-1]  # the last one only ended the turn
    before = tokens[r.prompt_tokens : r.prompt_tokens + len(generated)]
    assert before == generated
    answer = pipe(talk, GREEDY, tools=TOOLS)
    assert "7 degrees and rainy in Paris" in answer.text


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "add", "get_time"}),
        ({"type": "function", "function": {"name": "add"}}, {"add"}),
    ],
)
def test_a_call_that_is_wanted_comes_whatever_was_asked(pipe, choice, names):
    r = pipe("Hello!", GREEDY, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert r.finish_reason in ("tool_calls", "length")
    assert len(r.tool_calls) == 1
    assert r.tool_calls[0].name in names
    assert r.text == ""
    if r.finish_reason == "tool_calls":
        fields = {"get_weather": {"city"}, "add": {"a", "b"}, "get_time": set()}
        assert set(r.tool_calls[0].object()) == fields[r.tool_calls[0].name]


def test_a_thinking_budget_closes_the_block_and_leaves_room_for_the_answer(pipe):
    free = pipe("What is 12 + 34?", GREEDY, reasoning_effort="max")
    thought = pipe.tokenizer.encode(free.reasoning_text)
    for budget in range(min(3, len(thought))):
        r = pipe("What is 12 + 34?", GREEDY, reasoning_effort="max", thinking_budget=budget)
        assert len(pipe.tokenizer.encode(r.reasoning_text)) <= budget
        assert free.reasoning_text.startswith(r.reasoning_text)
        assert r.token_ids[budget] == pipe.tokenizer.token_id("</think>")
        assert r.finish_reason == "stop"


def test_events_come_in_the_order_they_were_said(scripted):
    kinds = [type(e) for e in scripted("Weather?", GREEDY, tools=TOOLS).events]
    assert kinds[0] is Reasoning
    assert kinds.index(CallStart) == 2
