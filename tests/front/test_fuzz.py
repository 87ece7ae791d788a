"""Whatever is sent, the answer is 200 or 4xx in the wrapped shape, and nothing stays held."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.front.routes.chat import ChatRequest
from millpond.front.routes.completions import CompletionRequest
from millpond.front.routes.generate import GenerateRequest
from millpond.front.routes.messages import CountRequest, MessagesRequest
from millpond.front.routes.responses import ResponsesRequest
from millpond.front.routes.tokens import DetokenizeRequest, TokenizeRequest
from millpond.front.text import Tokenizer
from tests.front.conftest import Running, held, make_service, wait_for

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.sampled_from(
        [2**31, 2**63, -(2**70), 1e300, 0.5, "", "x", "\x00", "é😀", "1", "text", "low"]
    ),
    st.lists(st.one_of(st.integers(-1, 2050), st.text(max_size=3), st.none()), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(-3, 3), max_size=2),
    st.just({"type": "json_schema"}),
    st.just([[1, 2], [3]]),
)
CONTENT = st.one_of(
    st.text(max_size=5),
    ODD,
    st.lists(st.fixed_dictionaries({"type": ODD, "text": ODD}), max_size=2),
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "robot", None])},
    optional={
        "content": CONTENT,
        "tool_calls": ODD,
        "name": ODD,
        "reasoning": ODD,
        "tool_call_id": ODD,
    },
)
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(["function_call", "function_call_output", "reasoning", "message"])},
    optional={
        "content": CONTENT,
        "output": CONTENT,
        "call_id": ODD,
        "name": ODD,
        "arguments": ODD,
        "summary": CONTENT,
    },
)
ROUTES = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/generate": GenerateRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


@st.composite
def sent(draw: st.DrawFn) -> tuple[str, dict]:
    path = draw(st.sampled_from(sorted(ROUTES)))
    names = draw(
        st.lists(st.sampled_from(sorted(ROUTES[path].model_fields)), max_size=5, unique=True)
    )
    body = {
        "messages": draw(st.lists(MESSAGE, max_size=3)),
        "prompt": draw(st.sampled_from(["x", ["x", "y"], [5, 6], [[1], [2, 3]]])),
        "tokens": [5, 6],
        "max_tokens": 4,
        "text": "x",
        "input": draw(st.one_of(st.just("x"), st.lists(st.one_of(MESSAGE, ITEM), max_size=3))),
    }
    if path == "/v1/responses":
        del body["text"], body["prompt"]
    body |= {n: draw(MESSAGE.map(lambda m: [m]) if n == "messages" else ODD) for n in names}
    return path, body | draw(st.dictionaries(st.text(max_size=8), ODD, max_size=2))


@pytest.fixture(scope="module")
def fuzzed(tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    running = Running(make_service(tokenizer, "a</think>b"))
    with httpx.Client(base_url=running.url, timeout=30) as client:
        yield client
    wait_for(lambda: held(running.service) == 0)
    running.close()


@given(request_=sent())
@settings(max_examples=200, suppress_health_check=list(HealthCheck), deadline=None)
def test_no_request_is_a_fault_of_ours(fuzzed, request_):
    path, body = request_
    reply = fuzzed.post(path, json=body)
    assert reply.status_code in (200, 400, 404), (reply.status_code, reply.text, body)
    if reply.status_code != 200:
        assert reply.json()["error"]["message"]
