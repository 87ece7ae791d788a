"""What each API promises beyond its shape: fields translated, errors, what is left out."""

from __future__ import annotations

import json
from itertools import pairwise

import httpx
import pytest

from millpond.errors import Rejected
from millpond.front.text import Tokenizer
from tests.front.conftest import BUNDLED, Running, wait_for
from tests.front.test_shapes import CALL, FUNCTION, HELLO, THOUGHT, streamed

CHAT, COMPLETE, TALK, OWN = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
TOOLS = [{"type": "function", "function": FUNCTION}]


@pytest.fixture
def server(serve) -> Running:
    return serve(THOUGHT + "It is 4.")


def post(server: Running, path: str, **body: object) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=30, verify=False)


def own(server: Running, **more: object) -> dict:
    body = {"model": "tiny", "max_tokens": 100, "messages": HELLO, **more}
    return post(server, OWN, **body).json()


def prompt_of(server: Running) -> str:
    tokens = server.service.engine.requests[-1].tokens
    return server.service.tokenizer.decode(tokens, skip_special_tokens=False)


# Chat.


def test_reasoning_that_is_not_streamed_comes_whole_before_the_answer(server):
    events = streamed(post(server, CHAT, messages=HELLO, stream=True, stream_reasoning=False))
    deltas = [e["choices"][0]["delta"] for e in events]
    assert [d["reasoning"] for d in deltas if "reasoning" in d] == ["Let me add."]
    first_text = next(i for i, d in enumerate(deltas) if d.get("content"))
    assert "reasoning" in deltas[first_text]


@pytest.mark.parametrize("stream", [False, True])
def test_merged_reasoning_stays_in_the_text_beside_calls(serve, stream):
    server = serve(THOUGHT + "I call." + CALL.format(1))
    reply = post(server, CHAT, messages=HELLO, tools=TOOLS, separate_reasoning=False, stream=stream)
    if stream:
        deltas = [e["choices"][0]["delta"] for e in streamed(reply)]
        content = "".join(d.get("content") or "" for d in deltas)
        assert any("tool_calls" in d for d in deltas)
    else:
        content = reply.json()["choices"][0]["message"]["content"]
    assert content == "Let me add.</think>I call."


def test_calls_are_text_where_there_are_no_tools(serve):
    server = serve(THOUGHT + CALL.format(1))
    message = post(server, CHAT, messages=HELLO).json()["choices"][0]["message"]
    assert "tool_calls" not in message
    assert message["content"] == CALL.format(1)
    message = post(server, CHAT, messages=HELLO, tools=TOOLS).json()["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


def test_one_call_at_a_time_where_that_is_wished(serve):
    server = serve(THOUGHT + CALL.format(1) + CALL.format(2))
    body = {"messages": HELLO, "tools": TOOLS, "parallel_tool_calls": False}
    choice = post(server, CHAT, **body).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"


def test_usage_is_in_every_stream_where_the_server_is_told_so(server):
    plain = streamed(post(server, CHAT, messages=HELLO, stream=True))
    assert not any("usage" in e for e in plain)
    server.service.force_usage = True
    forced = streamed(post(server, CHAT, messages=HELLO, stream=True))
    assert forced[-1]["usage"]["completion_tokens"] > 0
    every = {"include_usage": True, "continuous_usage_stats": True}
    running = streamed(post(server, CHAT, messages=HELLO, stream=True, stream_options=every))
    counts = [e["usage"]["completion_tokens"] for e in running]
    assert counts == sorted(counts)
    assert len(set(counts)) > 3


def test_usage_tells_reasoning_from_the_rest(server):
    usage = post(server, CHAT, messages=HELLO).json()["usage"]
    thought = server.service.tokenizer.encode("Let me add.")
    details = usage["completion_tokens_details"]
    assert details["reasoning_tokens"] == len(thought)
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_what_an_answer_took_is_told_where_it_is_asked_for(serve, stream):
    server = serve("Think.</think>It is 4.", pause=0.005)
    reply = post(server, CHAT, messages=HELLO, include_metrics=True, stream=stream)
    last = streamed(reply)[-1] if stream else reply.json()
    assert not (stream and "usage" in last)
    told = last["metrics"]
    assert told.keys() == {
        "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms",
        "tokens_per_second",
    }  # fmt: skip
    assert told["time_to_first_token_ms"] >= 5
    assert told["generation_time_ms"] >= told["mean_itl_ms"] > 0
    assert told["tokens_per_second"] > 0
    short = post(server, CHAT, messages=HELLO, include_metrics=True, max_tokens=1).json()["metrics"]
    assert (short["mean_itl_ms"], short["tokens_per_second"]) == (None, None)


def test_a_prompts_log_probabilities_by_token_id(server):
    body = post(server, CHAT, messages=HELLO, prompt_logprobs=1, return_token_ids=True).json()
    first, *others = body["prompt_logprobs"]
    assert first is None
    assert [next(iter(o)) for o in others] == [str(t) for t in body["prompt_token_ids"][1:]]
    token = next(iter(others[0].values()))
    assert (token["logprob"], token["rank"]) == (-1.0, 1)
    assert body["choices"][0]["token_ids"]


def test_template_variables_that_are_not_read_are_named(server):
    reply = post(server, CHAT, messages=HELLO, chat_template_kwargs={"odd": 1})
    assert reply.headers["x-ignored-fields"] == "chat_template_kwargs.odd"


# Structured output, from each API's own field to one and the same constraint.

SCHEMA = {"type": "object"}
SHAPES = [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    (CHAT, {"structured_outputs": {"json": SCHEMA}}),
    (COMPLETE, {"guided_json": SCHEMA}),
    (TALK, {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
    (OWN, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ("/generate", {"sampling_params": {"json_schema": json.dumps(SCHEMA)}}),
]


@pytest.mark.parametrize("path, field", SHAPES)
def test_every_api_can_ask_for_a_schema(server, path, field):
    given = {"messages": HELLO, "prompt": "x", "input": "x", "text": "x", "max_tokens": 9}
    wanted = {CHAT: ["messages"], COMPLETE: ["prompt"], TALK: ["input"], "/generate": ["text"]}
    names = wanted.get(path, ["messages", "max_tokens"])
    reply = post(server, path, **{n: given[n] for n in names}, **field)
    assert reply.status_code == 200, reply.text
    constraint = server.service.engine.requests[-1].constraint
    assert (constraint.kind, json.loads(constraint.text)) == ("json_schema", SCHEMA)


def test_what_cannot_be_compiled_is_a_400_before_anything_runs(server):
    for stream in (False, True):
        reply = post(server, CHAT, messages=HELLO, regex="impossible", stream=stream)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "regex")
    assert server.service.engine.requests == []


# Responses.


def test_an_answer_that_was_cut_is_incomplete(server):
    cut = post(server, TALK, input="hi", max_output_tokens=3).json()
    assert cut["status"] == "incomplete"
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
    assert cut["output"][-1]["status"] == "incomplete"
    last = streamed(post(server, TALK, input="hi", max_output_tokens=3, stream=True))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")


def test_a_fault_in_a_stream_of_responses_is_its_last_event(server):
    server.service.engine.fault = "not finite"
    last = streamed(post(server, TALK, input="hi", stream=True))[-1]
    assert last["type"] == "response.failed"
    assert "not finite" in last["response"]["error"]["message"]


@pytest.mark.parametrize(
    "field", ["previous_response_id", "conversation", "background", "prompt", "max_tool_calls"]
)
def test_what_needs_a_memory_is_refused_by_name(server, field):
    reply = post(server, TALK, input="hi", **{field: "x"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "item_reference", "id": "x"},
        {},
        {"role": "user", "content": [{"type": "input_image"}]},
    ],
)
def test_items_that_cannot_be_read_are_refused(server, item):
    reply = post(server, TALK, input=[item])
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input")


def test_no_response_is_kept(server):
    made = post(server, TALK, input="hi", store=True)
    assert made.json()["store"] is False
    assert made.headers["x-ignored-fields"] == "store"
    reply = httpx.get(f"{server.url}{TALK}/{made.json()['id']}")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")


# Anthropic.


def test_thinking_is_shown_only_where_it_is_asked_for(server):
    assert [b["type"] for b in own(server)["content"]] == ["text"]
    assert server.service.engine.requests[-1].reasoning is None
    shown = own(server, thinking={"type": "enabled", "budget_tokens": 7})["content"]
    assert [b["type"] for b in shown] == ["thinking", "text"]
    assert shown[0]["thinking"] == "Let me add."
    assert server.service.engine.requests[-1].reasoning.budget == 7
    hidden = own(server, thinking={"type": "adaptive", "display": "omitted"})["content"]
    assert (hidden[0]["type"], hidden[0]["thinking"]) == ("thinking", "")
    own(server, thinking={"type": "disabled"})
    assert server.service.engine.requests[-1].reasoning.budget == 0


def test_why_an_answer_ended_in_anthropics_words(server):
    assert (own(server)["stop_reason"], own(server)["stop_sequence"]) == ("end_turn", None)
    cut = own(server, max_tokens=2)
    assert cut["stop_reason"] == "max_tokens"
    stopped = own(server, stop_sequences=["is"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "is")
    assert stopped["content"] == [{"type": "text", "text": "It "}]


def test_a_line_that_changes_with_every_request_is_left_out_of_the_system_prompt(server):
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=a1b2;"}
    own(server, system=[billing, {"type": "text", "text": "Be brief."}])
    first = server.service.engine.requests[-1].tokens
    own(
        server,
        system=[{**billing, "text": billing["text"] + "3"}, {"type": "text", "text": "Be brief."}],
    )
    assert server.service.engine.requests[-1].tokens == first
    assert "<|system|>Be brief.<|user|>" in prompt_of(server)


def test_an_effort_that_the_model_does_not_know_is_named_and_not_refused(server):
    reply = post(server, OWN, max_tokens=9, messages=HELLO, output_config={"effort": "medium"})
    assert reply.status_code == 200
    assert reply.headers["x-ignored-fields"] == "output_config.effort"


def test_a_last_message_of_the_assistants_is_continued(server):
    own(server, messages=[*HELLO, {"role": "assistant", "content": "The answer"}])
    assert prompt_of(server).endswith("</think>The answer")


BAD_OWN = [
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    {"messages": [{"role": "tool", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]},
    {"messages": []},
    {"messages": 3},
    {"max_tokens": 0},
    {"max_tokens": None},
    {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    {"tools": [{"name": "add", "input_schema": {}}], "tool_choice": {"type": "tool"}},
    {"tool_choice": {"type": "any"}},
    {"mcp_servers": [{"url": "x"}]},
    {"container": "x"},
    {"system": [{"type": "image"}]},
    {"thinking": {"type": "sometimes"}},
    {"n": 2},
]


@pytest.mark.parametrize("body", BAD_OWN, ids=str)
def test_anthropics_clients_read_their_own_shape_of_error(server, body):
    reply = post(server, OWN, **{"max_tokens": 9, "messages": HELLO} | body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["type"] == "error"
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert reply.json()["error"]["message"]


def test_faults_have_their_shape_too(server):
    body = {"max_tokens": 9, "messages": HELLO}
    assert post(server, OWN, **body, model="other").json()["error"]["type"] == "not_found_error"
    server.service.engine.fault = "not finite"
    assert post(server, OWN, **body).json()["error"]["type"] == "api_error"
    server.service.engine.fault = "not finite"
    assert streamed(post(server, OWN, **body, stream=True))[-1]["error"]["type"] == "api_error"
    server.service.draining = True
    reply = post(server, OWN, **body)
    assert (reply.status_code, reply.json()["error"]["type"]) == (503, "overloaded_error")
    server.service.draining = False
    raw = httpx.post(server.url + OWN, content=b"{")
    assert (raw.status_code, raw.json()["type"]) == (400, "error")


# /generate.


def test_generate_in_sglangs_shape(server):
    params = {"max_new_tokens": 3, "temperature": 0}
    one = post(server, "/generate", text="a b", sampling_params=params, rid="mine").json()
    ids = server.service.tokenizer.encode("a b")
    assert one["text"] == server.service.tokenizer.decode(one["output_ids"])
    meta = one["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", len(ids), 3)
    several = post(server, "/generate", input_ids=[ids, [7]], sampling_params=params).json()
    assert [m["meta_info"]["prompt_tokens"] for m in several] == [len(ids), 1]
    assert several[0]["output_ids"] == one["output_ids"]


def test_a_stream_of_generate_is_cumulative(server):
    body = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 5}, "stream": True}
    events = streamed(post(server, "/generate", **body))
    for index in (0, 1):
        own = [e for e in events if e["index"] == index]
        assert all(b["text"].startswith(a["text"]) for a, b in pairwise(own))
        assert own[-1]["meta_info"]["completion_tokens"] == 5
        assert own[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_generate_shows_log_probabilities_from_a_position_on(server):
    body = {
        "input_ids": [40, 41, 42], "return_logprob": True, "logprob_start_len": 1,
        "top_logprobs_num": 1, "sampling_params": {"max_new_tokens": 2},
    }  # fmt: skip
    meta = post(server, "/generate", **body).json()["meta_info"]
    assert [t for _, t, _ in meta["input_token_logprobs"]] == [41, 42]
    assert [p for p, _, _ in meta["output_token_logprobs"]] == [-0.5, -0.5]
    assert len(meta["output_top_logprobs"]) == len(meta["input_top_logprobs"]) == 2
    only = post(server, "/generate", **body | {"logprob_start_len": -1}).json()["meta_info"]
    assert only["input_token_logprobs"] == []
    assert server.service.engine.requests[-1].params.prompt_logprobs is None


def test_a_prompt_can_be_scored_by_generate_without_a_new_token(server):
    body = {"text": "a", "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    made = post(server, "/generate", **body, logprob_start_len=0).json()
    assert (made["text"], made["output_ids"]) == ("", [])


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"input_ids": [5000]}, "input_ids"),
        ({"text": ["a", "b"], "sampling_params": [{}, {}, {}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "n"),
        ({"text": "a", "sampling_params": {"stop_regex": "x"}}, "stop_regex"),
        (
            {"text": "a", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 2}},
            "min_tokens",
        ),
    ],
)
def test_a_bad_generate_is_a_400_that_names_the_field(server, body, param):
    reply = post(server, "/generate", **body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


# What is not served.


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/classify", "/pooling"])
def test_what_a_text_generator_does_not_do_is_said(server, path):
    reply = post(server, path, input="x", model="tiny")
    assert reply.status_code == 404
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (path.rpartition("/")[2], "not_found")
    assert path in error["message"]
    assert "this server generates text" in error["message"]


# Long prompts.


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(server, monkeypatch):
    tokenizer = server.service.tokenizer
    longest = max(len(tokenizer.token_bytes(t)) for t in range(tokenizer.vocab_size))
    seen: list[int] = []
    encode = tokenizer.encode
    monkeypatch.setattr(
        tokenizer, "encode", lambda text, **how: seen.append(len(text)) or encode(text, **how)
    )
    text = "x" * (longest * 511 + 1)
    reply = post(server, COMPLETE, prompt=text)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert seen == []
    post(server, COMPLETE, prompt=text[:-1])
    assert seen == [len(text) - 1]


def test_the_least_number_of_tokens_is_never_too_high(tokenizer):
    longest = max(range(tokenizer.vocab_size), key=lambda t: len(tokenizer.token_bytes(t)))
    dearest = tokenizer.token_text(longest)
    for text in ("", "a", "hello world", "é😀", dearest, dearest * 50, " " * 300, "\n" * 99):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))
    with pytest.raises(Rejected, match="at least"):
        tokenizer.refuse_hopeless("x" * 10_000, 10)


def test_a_tokenizer_that_may_drop_text_gives_no_least_number(tmp_path):
    raw = json.loads((BUNDLED / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for change in (
        {"normalizer": {"type": "NFC"}},
        {"added_tokens": [{**raw["added_tokens"][0], "lstrip": True}, *raw["added_tokens"][1:]]},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": False},
        ]}},
    ):  # fmt: skip
        (tmp_path / "tokenizer.json").write_text(json.dumps(raw | change))
        assert Tokenizer(tmp_path).fewest_tokens("x" * 1000) == 0


@pytest.mark.parametrize("path", [TALK, OWN, "/generate"])
def test_leaving_a_stream_of_any_api_aborts_the_request(serve, path):
    server = serve("word " * 2000, pause=0.01)
    body = {
        "messages": HELLO, "max_tokens": 400, "input": "x", "text": "x", "stream": True,
        "sampling_params": {"max_new_tokens": 400},
    }  # fmt: skip
    keep = {TALK: ("input",), OWN: ("messages", "max_tokens")}.get(
        path, ("text", "sampling_params")
    )
    sent = {k: body[k] for k in (*keep, "stream")}
    with httpx.stream("POST", server.url + path, json=sent) as reply:
        next(reply.iter_lines())
    wait_for(lambda: len(server.service.engine.aborted) == 1)
