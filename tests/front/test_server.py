"""The HTTP server against a scripted engine: real sockets, real clients."""

from __future__ import annotations

import json
import socket
import threading

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from millpond.errors import Rejected, Unavailable
from millpond.front.text import Tokenizer
from millpond.telemetry import logger
from tests.front.conftest import Running, held, wait_for

HELLO = [{"role": "user", "content": "hello"}]
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def server(serve) -> Running:
    return serve("Add.</think>4 héllo 😀.")


def post(server: Running, path: str, body: object, **more: object) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=30, **more)  # type: ignore[arg-type]


def chat(server: Running, **fields: object) -> httpx.Response:
    return post(server, CHAT, {"model": "tiny", "messages": HELLO, **fields})


def events(response: httpx.Response) -> list[dict]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


# Answers.


def test_a_chat_answer_has_content_reasoning_and_usage(server):
    reply = client(server).chat.completions.create(model="tiny", messages=HELLO, max_tokens=64)
    message = reply.choices[0].message
    assert message.content == "4 héllo 😀."
    assert message.reasoning == message.reasoning_content == "Add."
    assert reply.choices[0].finish_reason == "stop"
    usage, sent = reply.usage, server.service.engine.requests[-1]
    assert usage.prompt_tokens == len(sent.tokens)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_a_stream_joined_is_the_whole_answer(server):
    whole = chat(server).json()
    chunks = list(
        client(server).chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert deltas[0].role == "assistant"
    assert "".join(d.content or "" for d in deltas) == whole["choices"][0]["message"]["content"]
    assert "".join(getattr(d, "reasoning", None) or "" for d in deltas) == "Add."
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.model_dump(exclude_none=True) == whole["usage"]
    assert len({c.id for c in chunks}) == 1


def test_cached_tokens_are_reported_without_being_asked_for(server):
    reply = post(server, COMPLETE, {"prompt": [5] * 200})
    details = reply.json()["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 192, "prefix_outcomes": {"hit": 192}}


def test_several_samples_keep_their_order_and_texts(server):
    choices = chat(server, n=3).json()["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2]
    texts = [c["message"]["content"] for c in choices]
    assert texts == ["4 héllo 😀.", "4 héllo 😀. #1", "4 héllo 😀. #2"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_ends_the_answer_and_the_request(serve, stream):
    server = serve("a</think>one two three four" * 9, pause=0.002)
    body = {"stop": ["o thr", "absent"], "stream": stream}
    reply = chat(server, **body)
    if stream:
        choices = [c["choices"][0] for c in events(reply)]
        text = "".join(c["delta"].get("content", "") for c in choices)
        last = choices[-1]
    else:
        last = reply.json()["choices"][0]
        text = last["message"]["content"]
    assert text == "one tw"
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "o thr")
    wait_for(lambda: len(server.service.engine.aborted) == 1)


def test_min_tokens_keeps_stop_strings_from_ending_the_answer(server):
    text = "".join(
        c["text"]
        for c in post(
            server, COMPLETE, {"prompt": "x", "stop": "4", "min_tokens": 7, "max_tokens": 50}
        ).json()["choices"]
    )
    assert "4" in text


def test_prompts_may_be_text_texts_ids_or_lists_of_ids(server):
    for prompt, count in (("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2)):
        reply = post(server, COMPLETE, {"prompt": prompt, "max_tokens": 2})
        assert [c["index"] for c in reply.json()["choices"]] == list(range(count))
    assert [r.tokens for r in server.service.engine.requests[-2:]] == [(1, 2), (3,)]


def test_echo_with_logprobs_scores_the_prompt(server):
    body = {
        "prompt": [[40, 41, 42], [43, 44]],
        "echo": True,
        "logprobs": 1,
        "max_tokens": 1,
        "seed": 1,
    }
    first, second = post(server, COMPLETE, body).json()["choices"]
    shown = first["logprobs"]
    assert shown["token_logprobs"] == [None, -1.0, -1.0, -0.5]
    assert shown["top_logprobs"][0] is None
    assert all(len(t) == 1 for t in shown["top_logprobs"][1:])
    assert first["text"] == "".join(shown["tokens"])
    assert shown["text_offset"] == [0, 1, 2, 3]
    assert len(second["logprobs"]["tokens"]) == 3
    assert server.service.engine.requests[0].params.prompt_logprobs == 1


def test_tokens_that_are_no_text_are_told_apart_by_their_bytes(server):
    tokens = server.service.tokenizer.encode("😀")
    body = {"prompt": [tokens], "echo": True, "logprobs": 1, "max_tokens": 1}
    choice = post(server, COMPLETE, body).json()["choices"][0]
    labels = choice["logprobs"]["tokens"][:-1]
    assert all(t.startswith("bytes:\\x") for t in labels)
    assert len(set(labels)) == len(labels) > 1
    assert choice["text"].startswith("😀")


def test_a_prompt_can_be_scored_without_a_new_token(server):
    body = {"prompt": [40, 41], "echo": True, "logprobs": 0, "max_tokens": 0}
    choice = post(server, COMPLETE, body).json()["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == 2


def test_logprobs_of_a_chat_come_with_bytes_and_alternatives(server):
    reply = client(server).chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=3
    )
    content = reply.choices[0].logprobs.content
    assert len(content) == reply.usage.completion_tokens
    assert all(len(t.top_logprobs) == 3 for t in content)
    assert b"".join(bytes(t.bytes) for t in content).decode().startswith("Add.</think>4 h")


def test_sampling_fields_reach_the_engine(server):
    chat(
        server, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=11, presence_penalty=1.0,
        frequency_penalty=-1.0, repetition_penalty=1.1, logit_bias={"5": -100}, ignore_eos=True,
        min_tokens=2, max_tokens=9, max_completion_tokens=4, stop_token_ids=[9], n=2,
        cache_salt="s", priority=3,
    )  # fmt: skip
    sent = server.service.engine.requests[-1]
    p = sent.params
    assert (p.temperature, p.top_p, p.top_k, p.min_p, p.seed) == (0.5, 0.9, 7, 0.1, 11)
    assert (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (1.0, -1.0, 1.1)
    assert (p.logit_bias, p.ignore_eos, p.min_tokens, p.max_tokens) == (((5, -100.0),), True, 2, 4)
    assert (p.stop_token_ids, p.n, sent.cache_salt, sent.priority) == ((9,), 2, "s", 3)


def test_the_models_own_sampling_defaults_are_used_and_zero_is_greedy(server):
    chat(server)
    assert server.service.engine.requests[-1].params.top_p == 0.95
    chat(server, temperature=0)
    assert server.service.engine.requests[-1].params.temperature == 0.0


def test_without_a_limit_the_answer_may_fill_the_context(server):
    chat(server)
    sent = server.service.engine.requests[-1]
    assert sent.params.max_tokens == server.service.resolved.session_len


def test_null_and_empty_equal_absent(server):
    names = "stop logprobs response_format max_tokens top_logprobs tool_choice stream temperature"
    reply = chat(server, tools=[], logit_bias={}, best_of=1, **dict.fromkeys(names.split()))
    assert reply.status_code == 200
    assert "x-ignored-fields" not in reply.headers


def test_ignored_fields_are_named_in_a_header_and_logged_once(server, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(
        logger("front"), "warning", lambda form, *values: told.append(form % values)
    )
    for _ in range(2):
        reply = chat(server, zebra=1, alpha={"x": 2}, **{"bad\r\nname": 1})
    assert reply.headers["x-ignored-fields"] == "alpha, bad??name, zebra"
    assert [t for t in told if "zebra" in t] == ["ignored request field 'zebra'"]


def test_reasoning_can_be_hidden_or_left_in_the_text(server):
    hidden = chat(server, include_reasoning=False).json()["choices"][0]["message"]
    assert "reasoning" not in hidden
    assert hidden["content"] == "4 héllo 😀."
    merged = chat(server, separate_reasoning=False).json()["choices"][0]["message"]
    assert merged["content"] == "Add.</think>4 héllo 😀."


def test_tokens_go_there_and_back(server):
    tokens = post(server, "/tokenize", {"prompt": "héllo"}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert post(server, "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "héllo"}
    talk = post(server, "/tokenize", {"messages": HELLO}).json()["tokens"]
    chat(server)
    assert server.service.engine.requests[-1].tokens == tuple(talk)


def test_models_are_listed_with_their_length(server):
    model = client(server).models.list().data[0]
    assert (model.id, model.max_model_len) == ("tiny", 512)
    assert client(server).models.retrieve("tiny").id == "tiny"


def test_health_version_and_metrics(server):
    chat(server)
    assert httpx.get(server.url + "/health").json()["status"] == "ready"
    assert httpx.get(server.url + "/ready").status_code == 200
    assert httpx.get(server.url + "/version").json()["version"]
    assert httpx.head(server.url + "/metrics").status_code == 200
    text = httpx.get(server.url + "/metrics").text
    for name in (
        'millpond_kv_pages{state="free"}', "millpond_requests_running 0.0",
        'millpond_state_slots{kind="checkpoint",state="used"}', "millpond_generation_tokens_total",
        'millpond_requests_total{finish_reason="stop"} 1.0',
        'millpond_prefix_tokens_total{outcome="hit"}',
        "millpond_time_to_first_token_seconds_count 1.0", "millpond_requests_waiting",
        "millpond_request_latency_seconds_count 1.0", "millpond_queue_time_seconds_count 1.0",
        'millpond_kv_pages{state="indexed"}',
        'millpond_http_requests_total{route="/v1/chat/completions",status="200"} 1.0',
    ):  # fmt: skip
        assert name in text, name


def test_a_request_id_is_echoed_or_made(server):
    reply = chat(server)
    assert reply.json()["id"] == "chatcmpl-" + reply.headers["x-request-id"]
    mine = post(server, CHAT, {"messages": HELLO}, headers={"X-Request-Id": "mine"})
    assert mine.headers["x-request-id"] == "mine"


def test_answers_have_the_shape_that_the_client_library_declares(server):
    """The library itself is lenient; its types are not."""
    more = {"n": 2, "logprobs": True, "top_logprobs": 1}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    ChatCompletion.model_validate(chat(server, **more).json(), strict=True)
    for chunk in events(chat(server, **more, **options)):
        ChatCompletionChunk.model_validate(chunk, strict=True)
    body = {"prompt": ["a", "b"], "logprobs": 1}
    Completion.model_validate(post(server, COMPLETE, body).json(), strict=True)
    # Chunks of completions carry a null reason until the last, which the type does not know.
    Completion.model_validate(
        events(post(server, COMPLETE, body | {"stream": True}))[-1], strict=True
    )


# Bad input: 4xx, named, nothing submitted, nothing held.

BAD_CHAT = [
    (dict(messages=[]), "messages"),
    (dict(messages="hi"), "messages"),
    (dict(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages"),
    (dict(temperature="hot"), "temperature"),
    (dict(temperature=-1), "temperature"),
    (dict(temperature=True), "temperature"),
    (dict(seed=False), "seed"),
    (dict(max_tokens=-1), "max_tokens"),
    (dict(max_tokens=0), "max_tokens"),
    (dict(max_tokens=1.5), "max_tokens"),
    (dict(n=0), "n"),
    (dict(n=9), "n"),
    (dict(top_p=0), "top_p"),
    (dict(top_p=2), "top_p"),
    (dict(top_k=-5), "top_k"),
    (dict(top_logprobs=3), "top_logprobs"),
    (dict(logprobs=True, top_logprobs=21), "top_logprobs"),
    (dict(stop=[1]), "stop"),
    (dict(stop_token_ids=[2048]), "stop_token_ids"),
    (dict(logit_bias={"x": 1}), "logit_bias"),
    (dict(logit_bias={"2048": 1}), "logit_bias"),
    (dict(logit_bias={"1": 101}), "logit_bias"),
    (dict(min_tokens=9, max_tokens=3), "min_tokens"),
    (dict(repetition_penalty=0), "repetition_penalty"),
    (dict(presence_penalty=9), "presence_penalty"),
    (dict(response_format={"type": "xml"}), "response_format"),
    (dict(tool_choice="required"), "tool_choice"),
    (dict(tool_choice={"type": "function", "function": {"name": "f"}}), "tool_choice"),
    (dict(best_of=2), "best_of"),
    (dict(regex="a", structured_outputs={"regex": "b"}), "structured_outputs.regex"),
    (dict(continue_final_message=True, add_generation_prompt=True), "continue_final_message"),
    (dict(thinking_token_budget=-1), "thinking_token_budget"),
    (dict(tools=[{"type": "web_search"}]), "tools"),
    (dict(stream=True, prompt_logprobs=1), "prompt_logprobs"),
    (dict(modalities=["audio"]), "modalities"),
    (dict(reasoning_effort="medium"), "reasoning_effort"),
    (dict(chat_template_kwargs={"messages": 1}), "messages"),
    (dict(stream_options={"include_usage": 1}), "stream_options"),
]  # fmt: skip


@pytest.mark.parametrize("fields, param", BAD_CHAT, ids=lambda v: v if isinstance(v, str) else "")
def test_a_bad_chat_request_is_a_400_that_names_the_field(shared, fields, param):
    reply = chat(shared, **fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    assert shared.service.engine.requests == []


BAD_BODIES = [
    b"", b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe", b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}', b'{"prompt": NaN}', b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "top_p": 1e999}', b'{"prompt": ""}', b'{"prompt": []}', b'{"prompt": [""]}',
    b'{"prompt": [[]]}', b'{"prompt": [1, "a"]}', b'{"prompt": [true]}', b'{"prompt": [-1]}',
    b'{"prompt": [2048]}', b'{"prompt": [99999999999999999999999]}', b'{"prompt": {"a": 1}}',
    b'{"prompt": null}', b'{"max_tokens": 1}', b"[" * 5000 + b"]" * 5000,
    b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": "x", "suffix": "y"}', b'{"prompt": "x", "cache_salt": "\\ud800"}',
]  # fmt: skip


@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda b: b[:24].decode("ascii", "replace"))
def test_a_bad_body_is_a_400_in_the_wrapped_shape(shared, body):
    reply = httpx.post(
        shared.url + COMPLETE, content=body, headers={"content-type": "application/json"}
    )
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"]
    assert shared.service.engine.requests == []


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", CHAT, COMPLETE])
@pytest.mark.parametrize("body", [b"{}", b'{"tokens": [9999]}', b'{"tokens": "a", "prompt": 1}'])
def test_other_routes_refuse_alike(shared, path, body):
    assert httpx.post(shared.url + path, content=body).status_code == 400


def test_a_body_of_another_content_type_is_told_which_header_it_needs(shared):
    form = {"content-type": "application/x-www-form-urlencoded"}  # what curl -d sends by itself
    answer = httpx.post(shared.url + CHAT, content=b'{"messages": []}', headers=form)
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETE, "/tokenize", "/detokenize"])
def test_an_unknown_model_is_a_404(shared, path):
    body = {"model": "other", "messages": HELLO, "prompt": "x", "tokens": [1]}
    reply = post(shared, path, body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert httpx.get(shared.url + "/v1/models/other").status_code == 404


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(shared):
    reply = post(shared, COMPLETE, {"prompt": [7] * 512})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "prompt of 512 tokens" in error["message"]
    assert "session_len allows 512" in error["message"]


def test_unknown_paths_and_methods_have_the_wrapped_shape(shared):
    assert "error" in httpx.get(shared.url + "/nowhere").json()
    assert httpx.get(shared.url + CHAT).status_code == 405


def test_what_the_engine_refuses_is_a_400_also_for_a_stream(server):
    for stream in (False, True):
        server.service.engine.refuse = Rejected("too long for the pool", param="prompt")
        reply = chat(server, stream=stream)
        assert reply.status_code == 400
        assert "pool" in reply.json()["error"]["message"]


def test_one_refused_prompt_of_several_leaves_none_running(serve):
    server = serve("word " * 50, pause=0.01)
    engine = server.service.engine
    submit = engine.submit

    def second_is_refused(request):
        if request.request_id.endswith("-1"):
            raise Rejected("no")
        return submit(request)

    engine.submit = second_is_refused
    assert post(server, COMPLETE, {"prompt": ["a", "b", "c"]}).status_code == 400
    wait_for(lambda: held(server.service) == 0)
    assert len(engine.aborted) == 1


# Trouble.


def test_an_engine_error_ends_one_request_and_no_other(server):
    server.service.engine.fault = "logits are not finite"
    reply = chat(server)
    assert reply.status_code == 500
    assert "not finite" in reply.json()["error"]["message"]
    server.service.engine.fault = "logits are not finite"
    assert "not finite" in events(chat(server, stream=True))[-1]["error"]["message"]
    assert chat(server).status_code == 200


def test_a_dead_engine_is_a_503_everywhere(server):
    server.service.engine.die("out of luck")
    assert chat(server).status_code == 503
    assert "out of luck" in chat(server).json()["error"]["message"]
    assert httpx.get(server.url + "/health").status_code == 503
    assert httpx.get(server.url + "/ready").status_code == 503


def test_a_full_engine_is_a_503_that_says_when_to_return(server):
    server.service.engine.refuse = Unavailable("queue is full")
    reply = chat(server)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")


def test_a_draining_server_finishes_what_runs_and_refuses_what_comes(serve):
    server = serve("word " * 40, pause=0.01)
    got: list[httpx.Response] = []
    running = threading.Thread(target=lambda: got.append(chat(server)))
    running.start()
    wait_for(lambda: server.service.engine.running)
    server.service.draining = True
    assert chat(server).status_code == 503
    assert httpx.get(server.url + "/ready").json()["phase"] == "draining"
    running.join(20)
    assert got[0].status_code == 200


@pytest.mark.parametrize("after", [0, 1, 3])
def test_leaving_a_stream_aborts_the_request(serve, after):
    server = serve("word " * 2000, pause=0.01)
    body = {"model": "tiny", "messages": HELLO, "stream": True, "n": 2}
    with httpx.stream("POST", server.url + CHAT, json=body) as reply:
        lines = reply.iter_lines()
        for _ in range(after):
            next(lines)
    wait_for(lambda: held(server.service) == 0)
    assert len(server.service.engine.aborted) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_leaving_before_a_whole_answer_aborts_the_request(serve, path):
    server = serve("word " * 2000, pause=0.01)
    body = json.dumps({"messages": HELLO, "prompt": ["a", "b"], "max_tokens": 400}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        wait_for(lambda: server.service.engine.running)
    wait_for(lambda: held(server.service) == 0)
    assert server.service.engine.aborted


def test_leaving_in_the_middle_of_a_body_submits_nothing(serve):
    server = serve("x")
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n{")
    assert chat(server).status_code == 200
    assert len(server.service.engine.requests) == 1


def test_other_requests_are_answered_while_a_long_text_is_tokenised(serve, monkeypatch):
    server = serve("x</think>y")
    tokenizer, seen = server.service.tokenizer, threading.Event()
    encode, gate = tokenizer.encode, threading.Event()

    def slow(text: str, **options: bool) -> list[int]:
        if text.startswith("slow"):
            seen.set()
            assert gate.wait(30)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", slow)
    waiting = threading.Thread(
        target=lambda: post(server, COMPLETE, {"prompt": "slow", "max_tokens": 1})
    )
    waiting.start()
    assert seen.wait(20)
    quick = httpx.post(server.url + CHAT, json={"messages": HELLO}, timeout=10)
    gate.set()
    assert quick.status_code == 200
    waiting.join(20)
    assert not waiting.is_alive()


def test_whole_texts_are_never_made_on_the_event_loop(serve, monkeypatch):
    server = serve("x")
    on: set[threading.Thread] = set()
    for name in ("encode", "decode", "token_text"):
        real = getattr(Tokenizer, name)

        def told(*args: object, real: object = real, **how: object) -> object:
            on.add(threading.current_thread())
            return real(*args, **how)

        monkeypatch.setattr(Tokenizer, name, told)
    post(server, "/tokenize", {"prompt": "a b c", "return_token_strs": True})
    post(server, "/detokenize", {"tokens": [5, 6, 7]})
    post(server, COMPLETE, {"prompt": ["a", "b"], "echo": True})
    post(server, "/v1/messages/count_tokens", {"messages": HELLO})
    chat(server)
    assert on
    assert server._thread not in on


def test_the_description_of_the_api_can_be_fetched(shared):
    document = httpx.get(shared.url + "/openapi.json").json()
    assert {CHAT, COMPLETE, "/v1/models", "/tokenize"} <= document["paths"].keys()
    assert "400" in document["paths"][CHAT]["post"]["responses"]


def test_many_at_once_do_not_mix(serve):
    server = serve("same</think>answer", pause=0.001)
    texts: list[str] = []

    def one() -> None:
        for _ in range(3):
            texts.append(chat(server).json()["choices"][0]["message"]["content"])

    threads = [threading.Thread(target=one) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert texts == ["answer"] * 24
