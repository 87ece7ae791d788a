"""Constraints are compiled in the engine's process; a bad one is the client's mistake here too."""

from __future__ import annotations

import json

import httpx

COMPLETE = "/v1/completions"


def test_a_bad_grammar_is_a_400_from_the_other_process_and_the_next_request_is_served(serve):
    served = serve("open_quick")
    bad = {"prompt": "x", "guided_json": {"type": "nothing"}, "max_tokens": 2}
    for stream in (False, True):
        reply = httpx.post(served.url + COMPLETE, json=bad | {"stream": stream}, timeout=30)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "guided_json")
    reply = httpx.post(served.url + COMPLETE, json={"prompt": "x", "max_tokens": 2}, timeout=30)
    assert reply.status_code == 200


def test_a_grammar_that_is_no_text_is_a_400_although_no_message_can_hold_it(serve):
    """Half a pair of surrogates is a string of JSON, and not one of UTF-8."""
    served = serve("open_quick")
    for field, value in (("guided_regex", "\ud800"), ("guided_choice", ["a", "\ude00"])):
        body = json.dumps({"prompt": "x", "max_tokens": 2, field: value})
        reply = httpx.post(served.url + COMPLETE, content=body, timeout=30)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (400, field, "invalid_grammar")


def test_usage_can_be_forced_into_streams_by_a_flag(serve):
    served = serve("open_quick", "--force-usage")
    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    lines = httpx.post(served.url + COMPLETE, json=body, timeout=30).text.split("\n\n")
    assert '"completion_tokens":2' in lines[-3]
