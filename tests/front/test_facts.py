"""What a server says of itself, the page it shows, and which methods its paths take."""

from __future__ import annotations

import re
from dataclasses import fields

import httpx
import pytest

from millpond.config import Resolved
from millpond.front.guard import Limits
from millpond.front.server import Options


def get(shared, path: str) -> httpx.Response:
    return httpx.get(shared.url + path)


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_the_model_is_told_in_the_words_of_load_clients(shared, path):
    found = get(shared, path).json()
    assert found["is_generation"] is True
    assert (found["served_model_name"], found["max_model_len"]) == ("tiny", 512)
    assert found["model_path"] == "millpond-tiny-glm"  # no path of this machine's
    assert (found["parser"], found["reasoning_efforts"]) == ("glm", ["high", "low", "max"])


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_every_number_the_engine_runs_with_is_told(shared, path):
    found = get(shared, path).json()
    assert {f.name for f in fields(Resolved)} <= found.keys()
    assert found["session_len"] == shared.service.resolved.session_len
    assert found["max_total_num_tokens"] == shared.service.resolved.num_pages * 64
    assert found["phase"] == "ready"


def test_sampling_where_a_request_says_nothing_is_told_as_it_is(serve):
    server = serve("x")
    told = get(server, "/server_info").json()["sampling_defaults"]
    httpx.post(server.url + "/v1/completions", json={"prompt": "x"})
    params = server.service.engine.requests[-1].params
    assert told == {name: getattr(params, name) for name in told}


def test_drafts_are_told_where_there_are_any(shared):
    assert "avg_spec_accept_length" not in get(shared, "/server_info").json()["internal_states"][0]


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_a_wrong_method_is_told_all_right_ones(shared, path):
    reply = httpx.post(shared.url + path)
    assert reply.status_code == 405
    assert set(reply.headers["allow"].split(", ")) == {"GET", "HEAD"}
    assert httpx.head(shared.url + path).status_code == 200


def test_a_wrong_method_of_an_operators_route_is_told_all_right_ones(shared):
    allowed = httpx.delete(shared.url + "/flush_cache").headers["allow"]
    assert set(allowed.split(", ")) == {"GET", "POST"}


def test_the_page_loads_nothing_from_elsewhere(shared):
    reply = get(shared, "/")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"https?:|//\w|\bsrc\s*=|\bhref\s*=|@import|url\(|<link", reply.text)
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "innerHTML" not in reply.text  # what a model writes is text


def test_the_page_needs_no_key_and_speaks_of_what_is_there(serve):
    server = serve("Think.</think>yes", options=Options(limits=Limits(keys=("k",))))
    page = get(server, "/").text
    assert set(re.findall(r'fetch\("([^"]+)"', page)) == {"/ready", "/v1/chat/completions"}
    body = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a", "reasoning": "t"},
            {"role": "user", "content": "q"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    reply = httpx.post(
        server.url + "/v1/chat/completions", json=body, headers={"authorization": "Bearer k"}
    )
    # Every name that the page reads of a chunk is in the stream.
    for name in re.findall(r"(?:delta|usage|prompt|written)\.(\w+)", page):
        assert f'"{name}":' in reply.text, name
    assert get(server, "/v1/models").status_code == 401
