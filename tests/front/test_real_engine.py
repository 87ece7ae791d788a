"""The doors over the real engine and the bundled model, audited after every step."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Iterator

import httpx
import pytest

from millpond import GenerationConfig, Pipeline, PytorchEngineConfig, Rejected
from millpond.front.compose import open_service
from millpond.front.service import Service
from tests.front.conftest import BUNDLED, Running, wait_for

CONFIG = PytorchEngineConfig(
    max_batch_size=4, session_len=1024, num_kv_pages=80, prefix_cache_state_budget=4,
    max_prefill_token_num=256, device="cpu", debug_audit=True, debug_poison=True,
)  # fmt: skip
GREEDY = GenerationConfig(max_new_tokens=12, do_sample=False, ignore_eos=True)
COMPLETE = "/v1/completions"


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


@pytest.fixture(autouse=True)
def _nothing_stays_held(service: Service) -> Iterator[None]:
    """After every test all slots and pages are free or a checkpoint's, and no request is left."""
    yield
    wait_for(lambda: idle(service))
    assert service.engine.healthy, service.engine.failure
    service.engine.flush_cache()
    stats = service.engine.stats()
    assert (stats.slots_free, stats.pages_free) == (stats.slots_total, stats.pages_total)


def idle(service: Service) -> bool:
    s = service.engine.stats()
    return not (s.requests_running or s.requests_waiting or s.slots_running) and (
        s.pages_used == s.pages_indexed
    )


@pytest.fixture
def pipe(service: Service) -> Pipeline:
    made = Pipeline(service)
    made.close = lambda: None  # type: ignore[method-assign]  # the engine is the module's
    return made


def post(server: Running, path: str, body: object) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def test_the_second_of_two_equal_prompts_is_served_from_the_cache(pipe, service):
    prompt = [(7 * i) % 2000 for i in range(300)]
    cold, warm = pipe(prompt, GREEDY), pipe(prompt, GREEDY)
    assert (cold.cached_tokens, cold.prefix) == (0, "never_seen")
    assert (warm.cached_tokens, warm.prefix) == (256, "hit")
    assert warm.token_ids == cold.token_ids
    pipe.flush_cache()
    again = pipe(prompt, GREEDY)
    assert again.cached_tokens == 0
    assert again.token_ids == cold.token_ids


def test_usage_metric_log_and_response_agree_on_how_prompts_met_the_cache(server, pipe, caplog):
    def counted() -> dict[str, float]:
        lines = httpx.get(server.url + "/metrics").text.splitlines()
        shown = re.compile(r'millpond_prefix_(?:hit_)?tokens_total{(?:outcome|kind)="(.*)"} (.*)')
        return {m[1]: float(m[2]) for m in map(shown.fullmatch, lines) if m}

    caplog.set_level(logging.DEBUG, "millpond.requests")
    body = {"max_tokens": 2, "ignore_eos": True}
    body |= {"prompt": [(3 * i) % 2000 for i in range(200)]}
    longer = body | {"prompt": [*body["prompt"], *range(100)]}
    for asked, outcome, tokens in (
        (body, "never_seen", 200),
        (body, "hit", 192),
        (longer, "hit", 192),
        (body | {"prompt": [5] * 50}, "too_short", 50),
        (body | {"prompt": [8, *body["prompt"]]}, "never_seen", 201),
    ):
        before = counted()
        caplog.clear()
        details = post(server, COMPLETE, asked).json()["usage"]["prompt_tokens_details"]
        cached = tokens if outcome == "hit" else 0
        assert details == {"cached_tokens": cached, "prefix_outcomes": {outcome: tokens}}
        gained = {k: v - before.get(k, 0) for k, v in counted().items() if v != before.get(k)}
        anchor = {"prompt_end": 192} if cached else {}
        assert gained == {outcome: tokens, **anchor}
        [line] = [record.getMessage() for record in caplog.records]
        told = f"prefix {outcome}, {cached} of {len(asked['prompt'])} prompt tokens cached, anchor "
        assert told + next(iter(anchor), "none") in line
    again = pipe(body["prompt"], GREEDY)
    assert (again.prefix, again.cached_tokens) == ("hit", 192)


def test_usage_says_why_each_prompt_of_a_request_was_or_was_not_reused(server):
    """Too short to be cached, new, and found again are three different things to a client."""
    body = {"prompt": [[7] * 30, [(5 * i) % 2000 for i in range(200)]], "max_tokens": 1}
    for met, cached in (({"never_seen": 200}, 0), ({"hit": 192}, 192)):
        usage = post(server, COMPLETE, body).json()["usage"]["prompt_tokens_details"]
        assert usage["prefix_outcomes"].items() >= {"too_short": 30, **met}.items()
        assert usage["cached_tokens"] == cached


def test_a_batch_answers_as_its_prompts_alone_do(pipe):
    prompts = [f"Question {i}?" for i in range(6)]
    alone = [pipe(p, GREEDY).token_ids for p in prompts]
    assert [r.token_ids for r in pipe(prompts, GREEDY)] == alone


def test_a_stream_over_http_is_the_whole_answer(server):
    body = {"prompt": "Hello.", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    whole = post(server, COMPLETE, body).json()
    with httpx.stream("POST", server.url + COMPLETE, json={**body, "stream": True}) as reply:
        lines = [x.removeprefix("data: ") for x in reply.iter_lines() if x]
    assert lines[-1] == "[DONE]"
    text = "".join(json.loads(x)["choices"][0]["text"] for x in lines[:-1])
    assert text == whole["choices"][0]["text"]
    assert whole["usage"]["completion_tokens"] == 16


def test_a_seed_gives_the_same_text_alone_and_among_others(pipe):
    seeded = GenerationConfig(
        max_new_tokens=12, do_sample=True, temperature=1.0, random_seed=5, ignore_eos=True
    )
    alone = pipe("Say something.", seeded).token_ids
    among = pipe(["Other.", "Say something.", "More."], seeded)[1].token_ids
    assert among == alone
    assert pipe("Say something.", GREEDY).token_ids != alone


def test_samples_of_one_prompt_differ_and_each_repeats(pipe):
    seeded = GenerationConfig(
        max_new_tokens=8, do_sample=True, temperature=1.0, random_seed=5, n=3, ignore_eos=True
    )
    first, again = (pipe("Say something.", seeded).samples for _ in range(2))
    assert [s.token_ids for s in first] == [s.token_ids for s in again]
    assert len({s.token_ids for s in first}) == 3


def test_echoed_prompts_are_scored_as_generated_ones_are(server):
    base = {"temperature": 0, "logprobs": 1, "ignore_eos": True}
    first = post(
        server,
        COMPLETE,
        {**base, "prompt": [40, 41, 42], "max_tokens": 3, "return_token_ids": True},
    )
    choice = first.json()["choices"][0]
    longer = [40, 41, 42, *choice["token_ids"]]
    echo = {**base, "prompt": [longer], "echo": True, "max_tokens": 1}
    shown = post(server, COMPLETE, echo).json()["choices"][0]["logprobs"]
    assert shown["token_logprobs"][0] is None
    assert len(shown["tokens"]) == len(longer) + 1
    assert shown["token_logprobs"][3:6] == pytest.approx(
        choice["logprobs"]["token_logprobs"], abs=1e-4
    )


def test_a_stop_string_gives_everything_back_at_once(pipe, service):
    free = pipe("Hello.", GenerationConfig(max_new_tokens=8, ignore_eos=True), do_preprocess=False)
    middle = free.raw_text[1:3]
    stopped = pipe(
        "Hello.",
        GenerationConfig(max_new_tokens=900, ignore_eos=True, stop_words=[middle]),
        do_preprocess=False,
    )
    assert stopped.raw_text == free.raw_text[: free.raw_text.index(middle)]
    assert stopped.completion_tokens <= 8


@pytest.mark.parametrize("prompts", [["x"], ["x", "y", "z", "u", "v", "w"]])
def test_leaving_a_stream_gives_everything_back(server, service, prompts):
    body = {"prompt": prompts, "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 2}
    with httpx.stream("POST", server.url + COMPLETE, json=body, timeout=60) as reply:
        next(reply.iter_lines())
    wait_for(lambda: idle(service))
    assert service.engine.stats().finished["abort"] >= 1


def test_leaving_during_the_prompt_gives_everything_back(server, service):
    body = json.dumps({"prompt": [5] * 900, "max_tokens": 100, "ignore_eos": True}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        head = f"POST {COMPLETE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        wait_for(lambda: service.engine.stats().requests_running)


def test_more_requests_than_seats_all_get_their_answer(server):
    reply = post(server, COMPLETE, {"prompt": ["a"] * 12, "max_tokens": 3, "ignore_eos": True})
    assert [c["index"] for c in reply.json()["choices"]] == list(range(12))
    assert all(c["finish_reason"] == "length" for c in reply.json()["choices"])


def test_what_never_fits_is_refused_and_holds_nothing(server, pipe):
    reply = post(server, COMPLETE, {"prompt": [5] * 1024})
    assert reply.status_code == 400
    assert "session_len allows 1024" in reply.json()["error"]["message"]
    with pytest.raises(Rejected):
        pipe("a", GenerationConfig(n=5))


def test_the_answer_ends_where_the_context_does(server):
    body = {"prompt": [5] * 1020, "max_tokens": 100, "ignore_eos": True}
    reply = post(server, COMPLETE, body).json()
    assert reply["usage"]["total_tokens"] == 1024
    assert reply["choices"][0]["finish_reason"] == "length"


def test_a_logit_bias_and_stop_ids_are_obeyed(pipe):
    only = GenerationConfig(max_new_tokens=6, logit_bias={77: 100.0}, ignore_eos=True)
    assert set(pipe("a", only).token_ids) == {77}
    ended = pipe(
        "a", GenerationConfig(max_new_tokens=6, logit_bias={77: 100.0}, stop_token_ids=[77])
    )
    assert (ended.token_ids, ended.finish_reason, ended.raw_text) == ((77,), "stop", "")
