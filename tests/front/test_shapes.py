"""Answers against the types that the vendors' client libraries declare, read strictly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.front.conftest import Running, held, make_service, wait_for

CALL = "<tool_call>add<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>"
THOUGHT = "Let me add.</think>"
TEXTS = {
    "text": THOUGHT + "It is 4 😀.",
    "calls": THOUGHT + "I call." + CALL.format(1) + CALL.format("[2, 3]"),
}
SCHEMA = {"type": "object", "properties": {"a": {}}}
FUNCTION = {"name": "add", "description": "adds", "parameters": SCHEMA}
HELLO = [{"role": "user", "content": "hello"}]
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def servers(tokenizer) -> Iterator[dict[str, Running]]:
    made = {k: Running(make_service(tokenizer, text)) for k, text in TEXTS.items()}
    yield made
    for running in made.values():
        wait_for(lambda r=running: held(r.service) == 0)
        running.close()


@pytest.fixture(params=sorted(TEXTS))
def server(request, servers) -> Running:
    return servers[request.param]


def post(server: Running, path: str, body: object) -> httpx.Response:
    reply = httpx.post(server.url + path, json=body, timeout=30, verify=False)
    assert reply.status_code == 200, reply.text
    return reply


def streamed(reply: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; where one has a name it is that of its type."""
    made = []
    for block in reply.text.split("\n\n"):
        name, _, data = block.rpartition("data: ")
        if data in ("", "[DONE]"):
            continue
        made.append(json.loads(data))
        if name:
            assert name == f"event: {made[-1]['type']}\n"
    return made


CHAT = {"messages": HELLO, "tools": [{"type": "function", "function": FUNCTION}]}
TALK = {"input": "hello", "tools": [{"type": "function", **FUNCTION}]}
OWN = {
    "model": "tiny", "max_tokens": 100, "messages": HELLO,
    "tools": [{"name": "add", "input_schema": SCHEMA}],
    "thinking": {"type": "enabled", "budget_tokens": 50},
}  # fmt: skip


def test_chat_answers_and_chunks(server):
    more = {"logprobs": True, "top_logprobs": 1, "n": 2}
    ChatCompletion.model_validate(post(server, "/v1/chat/completions", CHAT | more).json())
    stream = more | {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in streamed(post(server, "/v1/chat/completions", CHAT | stream)):
        ChatCompletionChunk.model_validate(chunk, strict=True)


def test_completions(server):
    body = {"prompt": ["a", "b"], "logprobs": 1}
    Completion.model_validate(post(server, "/v1/completions", body).json(), strict=True)


def test_responses_and_their_events(server):
    whole = post(server, "/v1/responses", TALK).json()
    Response.model_validate(whole, strict=True)
    events = streamed(post(server, "/v1/responses", TALK | {"stream": True}))
    for event in events:
        RESPONSE_EVENT.validate_python(event)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])


@pytest.mark.parametrize(
    "fields", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}]
)
def test_log_probabilities_of_responses_are_of_what_is_said(server, fields):
    asked = TALK | fields
    whole = post(server, "/v1/responses", asked).json()
    Response.model_validate(whole, strict=True)
    events = streamed(post(server, "/v1/responses", asked | {"stream": True}))
    for event in events:
        RESPONSE_EVENT.validate_python(event)
    assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])
    assert whole["top_logprobs"] == fields.get("top_logprobs", 0)
    parts = [i["content"][0] for i in whole["output"] if i["type"] == "message"]
    assert parts
    for part in parts:
        said = b"".join(bytes(t["bytes"]) for t in part["logprobs"]).decode()
        assert said.strip() == part["text"].strip()
        assert {len(t["top_logprobs"]) for t in part["logprobs"]} == {whole["top_logprobs"]}
    sent = [t for e in events if e["type"] == "response.output_text.delta" for t in e["logprobs"]]
    assert sent == [t for part in parts for t in part["logprobs"]]


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id")}
    return [without_ids(v) for v in value] if isinstance(value, list) else value


def test_deltas_of_responses_make_the_items(server):
    events = streamed(post(server, "/v1/responses", TALK | {"stream": True}))
    made: dict[int, dict[str, Any]] = {}
    for event in events:
        kind, at = event["type"], event.get("output_index")
        if kind == "response.output_item.added":
            made[at] = event["item"]
        elif kind == "response.content_part.added":
            made[at]["content"] = [event["part"]]
        elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            made[at]["content"][0]["text"] += event["delta"]
        elif kind == "response.function_call_arguments.delta":
            made[at]["arguments"] += event["delta"]
        elif kind == "response.output_item.done":
            assert made[at] | {"status": "completed"} == event["item"]
    assert [made[i] | {"status": "completed"} for i in made] == events[-1]["response"]["output"]


def test_messages_and_their_events(server):
    whole = post(server, "/v1/messages", OWN).json()
    Message.model_validate(whole, strict=True)
    events = streamed(post(server, "/v1/messages", OWN | {"stream": True}))
    for event in events:
        if event["type"] != "ping":  # sent by Anthropic, and not in its types
            MESSAGE_EVENT.validate_python(event)
    kinds = [e["type"] for e in events]
    assert (kinds[0], kinds[1], kinds[-2:]) == (
        "message_start", "ping", ["message_delta", "message_stop"],
    )  # fmt: skip
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            (name,) = event["delta"].keys() - {"type"}
            blocks[-1]["json" if name == "partial_json" else name] += event["delta"][name]
    for block in blocks:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
        block.pop("signature", None)
    shown = [{k: v for k, v in b.items() if k != "signature"} for b in whole["content"]]
    assert without_ids(blocks) == without_ids(shown)
    assert events[-2]["usage"] == whole["usage"]
    counted = post(server, "/v1/messages/count_tokens", {k: OWN[k] for k in ("messages", "tools")})
    MessageTokensCount.model_validate(counted.json(), strict=True)
    usage = whole["usage"]
    read = usage["cache_read_input_tokens"] + usage["input_tokens"]
    assert counted.json()["input_tokens"] == read


def test_the_libraries_themselves(servers):
    """Their own parsing, accumulating and tools, over the answer with calls."""
    url = servers["calls"].url
    with openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client:
        with client.chat.completions.stream(model="tiny", **CHAT) as stream:
            calls = stream.get_final_completion().choices[0].message.tool_calls
        assert [json.loads(c.function.arguments) for c in calls] == [{"a": 1}, {"a": [2, 3]}]
        assert all(c.id.startswith("call_") for c in calls)
        with client.responses.stream(model="tiny", **TALK) as events:
            final = events.get_final_response()
        assert [i.type for i in final.output] == [
            "reasoning", "message", "function_call", "function_call",
        ]  # fmt: skip
        assert client.responses.create(model="tiny", **TALK).output_text == "I call."
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as own:
        with own.messages.stream(**OWN) as blocks:
            message = blocks.get_final_message()
        assert [b.type for b in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert [b.input for b in message.content[2:]] == [{"a": 1}, {"a": [2, 3]}]
        assert message.stop_reason == "tool_use"
        assert own.messages.count_tokens(model="tiny", messages=HELLO).input_tokens > 0
        assert own.models.list().data[0].id == "tiny"
        assert own.models.retrieve("tiny").display_name == "tiny"
        with pytest.raises(anthropic.NotFoundError) as caught:
            own.messages.create(model="other", max_tokens=5, messages=HELLO)
        assert caught.value.body["error"]["type"] == "not_found_error"
        assert caught.value.body["type"] == "error"


def test_a_conversation_goes_round_through_every_api(servers):
    """What an answer holds can be sent back, and makes one and the same prompt whichever way."""
    server = servers["calls"]
    engine = server.service.engine
    chat = post(server, "/v1/chat/completions", CHAT).json()["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": c["id"], "content": f"is {i}"}
        for i, c in enumerate(chat["tool_calls"])
    ]
    post(server, "/v1/chat/completions", CHAT | {"messages": [*HELLO, chat, *results]})
    expected = engine.requests[-1].tokens

    output = post(server, "/v1/responses", TALK).json()["output"]
    calls = [i for i in output if i["type"] == "function_call"]
    said = [
        {"type": "function_call_output", "call_id": c["call_id"], "output": f"is {i}"}
        for i, c in enumerate(calls)
    ]
    post(server, "/v1/responses", TALK | {"input": [*HELLO, *output, *said]})
    assert engine.requests[-1].tokens == expected

    # This API describes no function where it says nothing.
    tools = [{"name": "add", "description": "adds", "input_schema": SCHEMA}]
    blocks = post(server, "/v1/messages", OWN | {"tools": tools}).json()["content"]
    uses = [b for b in blocks if b["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": u["id"], "content": f"is {i}"}
        for i, u in enumerate(uses)
    ]
    talk = [*HELLO, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    post(server, "/v1/messages", OWN | {"tools": tools, "messages": talk})
    assert engine.requests[-1].tokens == expected
