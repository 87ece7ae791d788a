"""Deltas of tokens to pieces of an answer: the same message, however tokens and deltas fall."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.engine.types import Delta, TokenOut
from millpond.front.answer import Answer, Ask, Piece
from millpond.front.parsing.base import Event, Message, collect, merged
from millpond.front.parsing.dialect import Reading
from millpond.plan.sampling import SamplingParams
from tests.front.parsing.feeding import GLM, QWEN, TOKENIZER, TOOLS

USER = TOKENIZER.token_id("<|user|>")
assert USER is not None
PLAIN = Ask(tokens=(1,), params=SamplingParams(max_tokens=99))
ASKS = {
    name: replace(PLAIN, reading=Reading(template.dialect, True, TOOLS))
    for name, template in (("glm", GLM), ("qwen", QWEN))
}
CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Ångström 🦆</arg_value></tool_call>"


def answer(
    ask: Ask, tokens: Sequence[int], sizes: Sequence[int] = (), finish: str = "stop"
) -> list[Piece]:
    """The pieces of an answer whose tokens come in deltas of these sizes, then one by one."""
    got = Answer(ask, TOKENIZER)
    all_tokens = [*tokens, USER] if finish == "stop" else list(tokens)
    pieces, at, left = [], 0, list(sizes)
    while at < len(all_tokens):
        size = left.pop(0) if left else 1
        part = all_tokens[at : at + size]
        at += size
        last = at >= len(all_tokens)
        piece = got.push(
            Delta(
                request_id="r",
                sample_index=0,
                tokens=tuple(TokenOut(token=t) for t in part),
                finish_reason=finish if last else None,
                stop_token=USER if last and finish == "stop" else None,
            )
        )
        if piece is not None:
            pieces.append(piece)
    return pieces


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def without_ids(events: Sequence[Event]) -> list[Event]:
    return [replace(e, id="") if hasattr(e, "id") else e for e in merged(events)]


def whole(pieces: Sequence[Piece]) -> Message:
    return collect(e for p in pieces for e in p.events)


SHAPES = (
    "hm",
    "é🦆",
    " ",
    "\n",
    "</think>",
    "<tool_call>",
    "now",
    CALL,
    "</tool_call>",
    "STOP",
    "ST",
)
PARTS = st.sampled_from([*SHAPES, "\n<function=now>\n</function>\n", "<|assistant|>"])


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(ASKS)),
    st.lists(PARTS, max_size=8).map("".join),
    st.lists(st.integers(1, 9), max_size=12),
    st.sampled_from([(), ("STOP",), ("</think>h", "w</"), ("\n",)]),
    st.integers(0, 6),
    st.sampled_from(["stop", "length"]),
)
def test_however_tokens_fall_into_deltas_the_answer_is_the_same(
    family, text, sizes, stops, least, finish
):
    params = replace_params(min_tokens=least)
    ask = replace(ASKS[family], stops=stops, params=params)
    tokens = encode(text) or encode("x")
    one_by_one, grouped = (answer(ask, tokens, s, finish) for s in ((), sizes))
    events = [[e for p in pieces for e in p.events] for pieces in (one_by_one, grouped)]
    assert without_ids(events[0]) == without_ids(events[1])
    raw = ["".join(p.raw for p in pieces) for pieces in (one_by_one, grouped)]
    assert raw[0] == raw[1]
    ends = [(p[-1].finish_reason, p[-1].stop_reason) for p in (one_by_one, grouped)]
    assert ends[0] == ends[1]


def replace_params(**fields: int) -> SamplingParams:
    return SamplingParams(max_tokens=99, **fields)


def test_a_turn_that_ends_with_calls_says_so():
    pieces = answer(ASKS["glm"], encode(f"hm</think>Let me see.{CALL}"))
    got = whole(pieces)
    assert (got.reasoning, got.content) == ("hm", "Let me see.")
    assert [(c.name, json.loads(c.arguments)) for c in got.calls] == [
        ("get_weather", {"city": "Ångström 🦆"})
    ]
    assert got.calls[0].id.startswith("call_")
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("tool_calls", USER)


def test_text_and_reasoning_of_a_piece_are_those_of_its_events():
    pieces = answer(ASKS["glm"], encode("hm</think>yes"), [99])
    assert [(p.text, p.reasoning, p.raw) for p in pieces] == [("yes", "hm", "hm</think>yes")]


@pytest.mark.parametrize(
    ("finish", "stops", "reason"),
    [("length", (), "length"), ("stop", ("Ång",), "stop")],
)
def test_a_call_that_was_cut_off_is_no_reason_to_call(finish, stops, reason):
    tokens = encode(f"</think>{CALL}")[:-1]
    pieces = answer(replace(ASKS["glm"], stops=stops), tokens, finish=finish)
    got = whole(pieces)
    assert pieces[-1].finish_reason == reason
    assert [c.complete for c in got.calls] == [False]


def test_a_stop_string_after_a_call_leaves_the_call_whole():
    ask = replace(ASKS["glm"], stops=("done",))
    pieces = answer(ask, encode(f"</think>{CALL}done"))
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("tool_calls", "done")


def test_a_whole_call_before_one_that_was_cut_off_is_no_reason_to_call():
    ask = replace(ASKS["glm"], stops=("Ång",))
    tokens = encode(f"</think><tool_call>now</tool_call>{CALL}")
    pieces = answer(ask, tokens)
    assert [c.complete for c in whole(pieces).calls] == [True, False]
    assert pieces[-1].finish_reason == "stop"


def test_what_was_held_for_a_stop_string_after_the_only_call_is_not_said():
    reading = replace(ASKS["glm"].reading, parallel=False)
    ask = replace(ASKS["glm"], reading=reading, stops=("</tool_call>more!",))
    assert whole(answer(ask, encode(f"</think>{CALL}more, more"))).content == ""


def test_an_answer_ends_with_its_first_call_where_calls_are_not_parallel():
    ask = replace(ASKS["glm"], reading=replace(ASKS["glm"].reading, parallel=False))
    tokens = encode(f"</think>{CALL}")
    for sizes in ((), (99,)):
        pieces = answer(ask, [*tokens, *encode(f"{CALL}more")], sizes)
        assert len(whole(pieces).calls) == 1
        assert whole(pieces).content == ""
        assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("tool_calls", None)
        assert sum(len(p.tokens) for p in pieces) == len(tokens)


def test_calls_are_text_when_the_request_has_no_tools():
    ask = replace(ASKS["glm"], reading=replace(ASKS["glm"].reading, tools=()))
    pieces = answer(ask, encode(f"hm</think>{CALL}"))
    assert whole(pieces) == Message(CALL, "hm")
    assert pieces[-1].finish_reason == "stop"


def test_marker_text_that_is_written_letter_by_letter_is_text():
    tokens = [t for c in "</think> <tool_call>now</tool_call>" for t in encode(c)]
    got = whole(answer(ASKS["glm"], tokens))
    assert got == Message("", "</think> <tool_call>now</tool_call>")


def test_a_marker_after_half_a_character_is_still_a_marker():
    half = encode("🦆")[:-1]
    pieces = answer(ASKS["glm"], [*half, *encode("</think>ok")])
    assert whole(pieces).content == "ok"
    assert whole(pieces).reasoning
    assert set(whole(pieces).reasoning) == {"\ufffd"}
    assert "".join(t.text for p in pieces for t in p.tokens) == "".join(p.raw for p in pieces)


def test_a_stop_string_across_a_marker_is_found_and_a_marker_held_for_one_is_whole():
    ask = replace(ASKS["glm"], stops=("m</think>o",))
    pieces = answer(ask, encode("hm</think>ok"))
    assert whole(pieces) == Message("", "h")
    assert pieces[-1].stop_reason == "m</think>o"
    pieces = answer(replace(ask, stops=("think>x",)), encode("hm</think>ok"))
    assert whole(pieces) == Message("ok", "hm")
    pieces = answer(replace(ask, stops=("think>",)), encode("hm</think>ok"))
    assert whole(pieces) == Message("", "hm</")


def test_stop_strings_sleep_until_the_least_number_of_tokens():
    ask = replace(ASKS["glm"], stops=("</think>",), params=replace_params(min_tokens=50))
    assert whole(answer(ask, encode("hm</think>ok"))) == Message("ok", "hm")


def test_drafts_beyond_a_stop_string_are_not_counted_as_accepted():
    """They were verified and are right, and yet not in the answer."""
    got = Answer(replace(PLAIN, stops=("three",)), TOKENIZER)
    run = tuple(TokenOut(token=t) for t in encode("one two three four five six"))
    several = Delta(
        request_id="r", sample_index=0, tokens=run, drafted=len(run) - 1, accepted=len(run) - 1
    )
    got.push(several)
    got.push(several)  # under way when the answer was cut
    assert got.samples[0].done
    assert got.accepted == got.completion_tokens == len(encode("one two three")) < len(run) - 1
    assert got.drafted == 2 * (len(run) - 1)


@pytest.mark.parametrize("sizes", [(), (99,), (3,) * 30])
def test_tokens_of_what_is_said_are_told_from_the_others(sizes):
    pieces = answer(ASKS["glm"], encode(f"hm</think>See 🦆.{CALL}Then this."), sizes)
    said = [t.out.token for p in pieces for t in p.tokens if t.said]
    assert TOKENIZER.decode(said) == "See 🦆.Then this." == whole(pieces).content
