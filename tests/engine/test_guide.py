"""A guide allows what its grammar and its request allow, place by place, and nothing else."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.engine.constraint import Constraint, Reasoning
from millpond.engine.grammar import Grammar, Grammars, words_of
from millpond.engine.guide import NOTHING_LEFT, REFUSED, TOO_COMPLEX, Guide
from millpond.plan.sampling import SamplingParams
from tests.structured.engines import EOS, MODEL, VOCAB, text, tokenizer, tokens

CONSTRAINTS = {
    "regex": Constraint(kind="regex", text="[ab]{2,4}(, [0-9]{1,3})*"),
    "choice": Constraint(kind="choice", text='["yes", "yes, sure", "no", "é😀"]'),
    "object": Constraint(
        kind="json_schema",
        text=json.dumps(
            {
                "type": "object",
                "properties": {"n": {"type": "integer"}, "s": {"enum": ["x", "yy"]}},
                "required": ["n", "s"],
                "additionalProperties": False,
            }
        ),
    ),
}
END = tokenizer().token_id("</think>") or 0
THINK = tokenizer().token_id("<think>") or 0

GRAMMARS = Grammars(MODEL / "tokenizer.json", VOCAB, EOS)


def guide(
    name: str | None, reasoning: Reasoning | None = None, eos: tuple[int, ...] = EOS, **params
) -> Guide:
    grammar = None if name is None else GRAMMARS.prepare(CONSTRAINTS[name]).result(60)
    given_params = SamplingParams(**({"max_tokens": 100} | params))
    return Guide(grammar, reasoning, given_params, eos, VOCAB)


def allowed(place: bytes | None) -> list[int]:
    if place is None:
        return list(range(VOCAB))
    return np.flatnonzero(np.unpackbits(np.frombuffer(place, np.uint8), bitorder="little")).tolist()


def walk(one: Guide, seed: int, most: int = 200) -> list[int]:
    """Draw at random among what is allowed, until the answer is complete."""
    chosen, rng = [], random.Random(seed)
    while len(chosen) < most and not one.complete and one.error is None:
        chosen.append(rng.choice(allowed(one.places[0])))
        one.advance(chosen[-1])
        one.fill()
    return chosen


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "name, matches",
    [
        ("regex", re.compile("[ab]{2,4}(, [0-9]{1,3})*").fullmatch),
        ("choice", re.compile("yes|yes, sure|no|é😀").fullmatch),
        ("object", lambda written: set(json.loads(written)) == {"n", "s"}),
    ],
)
def test_any_walk_through_what_is_allowed_is_what_was_asked_for(name: str, matches, seed: int):
    one = guide(name)
    chosen = walk(one, seed)
    assert one.complete
    assert one.error is None
    assert matches(text(tuple(chosen)))


def test_what_can_go_no_further_is_complete_without_an_end_token():
    one = guide("choice")
    for token in tokens("no"):
        assert not one.complete
        one.advance(token)
    assert one.complete


def test_what_could_go_on_is_complete_with_an_end_token_only():
    one = guide("choice")
    for token in tokens("yes"):
        one.advance(token)
    one.fill()
    assert not one.complete
    assert set(EOS) < set(allowed(one.places[0]))
    one.advance(EOS[1])
    assert one.complete


def test_a_token_that_was_not_allowed_is_an_error():
    one = guide("choice")
    one.advance(tokens("maybe")[0])
    assert one.error == REFUSED
    assert not one.complete
    assert not one.is_ready


class Stuck:
    """A matcher that takes one token and then finds no way on."""

    def deep_copy(self) -> Stuck:
        return self

    def consume_token(self, token: int) -> bool:
        return True

    def try_consume_tokens(self, drafts: list[int]) -> int:
        return 1

    def is_stopped(self) -> bool:
        return False

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        pass

    def is_error(self) -> bool:
        return True

    def stop_reason(self) -> str:
        return "InternalError"

    def get_error(self) -> str:
        return "Parser Error: Current row has 2007 items\n<non-verbose/>"


@pytest.mark.parametrize("drafts", [(), (97, 98)])
def test_a_matcher_that_gives_up_is_an_error_of_the_request(drafts: tuple[int, ...]):
    grammar = Grammar(Stuck(), words_of((97,), VOCAB))  # type: ignore[arg-type]
    one = Guide(grammar, None, SamplingParams(max_tokens=9), EOS, VOCAB)
    assert allowed(one.places[0]) == [97]
    one.advance(97)
    one.fill(drafts)
    assert one.error == f"{TOO_COMPLEX} (Parser Error: Current row has 2007 items)"
    assert not one.is_ready


def test_a_schema_of_many_properties_can_be_followed():
    names = {f"property{index}": {"type": "null"} for index in range(1500)}
    schema = {"type": "object", "properties": names}
    constraint = Constraint(kind="json_schema", text=json.dumps(schema))
    grammar = GRAMMARS.prepare(constraint).result(60)
    one = Guide(grammar, None, SamplingParams(max_tokens=99), EOS, VOCAB)
    for token in tokens('{"property1": null, "property1499": null'):
        one.fill()
        assert token in allowed(one.places[0])
        one.advance(token)
    assert one.error is None


# What the request itself excludes.


def test_an_end_is_held_back_while_there_is_anything_else():
    held, free = guide("choice", min_tokens=50), guide("choice")
    ignoring = guide("choice", ignore_eos=True)
    for token in tokens("yes"):
        for one in (held, free, ignoring):
            one.advance(token)
    for one in (held, free, ignoring):
        one.fill()
    rest = set(allowed(free.places[0])) - set(EOS)
    assert set(allowed(held.places[0])) == set(allowed(ignoring.places[0])) == rest


def test_a_complete_answer_ends_whatever_else_was_wished():
    for wish in ({"min_tokens": 50}, {"ignore_eos": True}, {"min_tokens": 50, "ignore_eos": True}):
        one = guide("choice", **wish)
        for token in tokens("no"):
            one.advance(token)
        assert one.complete


def test_stop_tokens_that_leave_nothing_are_an_error_and_not_a_token():
    first = {
        allowed(guide("choice").places[0])[i]
        for i in range(len(allowed(guide("choice").places[0])))
    }
    one = guide("choice", stop_token_ids=tuple(first), min_tokens=3)
    assert one.error == NOTHING_LEFT
    assert guide("choice", stop_token_ids=tuple(first)).error is None


# Thinking.


def test_the_grammar_begins_after_the_end_of_thinking():
    one = guide("choice", Reasoning(end_token=END, is_open=True))
    for token in tokens("well, no: maybe"):
        assert set(allowed(one.places[0])) == set(range(VOCAB)) - set(EOS)
        one.advance(token)
        one.fill()
    one.advance(END)
    one.fill()
    assert one.places == guide("choice").places
    for token in tokens("no"):
        one.advance(token)
    assert one.complete


def test_a_prompt_that_opened_no_block_is_answered_at_once():
    assert guide("choice", Reasoning(end_token=END, is_open=False)).places == guide("choice").places


@pytest.mark.parametrize("name", [None, "choice"])
def test_at_the_budget_the_end_of_thinking_is_all_there_is(name: str | None):
    one = guide(name, Reasoning(end_token=END, is_open=True, budget=3))
    for token in tokens("one two three")[:3]:
        assert len(allowed(one.places[0])) > 1
        one.advance(token)
        one.fill()
    assert allowed(one.places[0]) == [END]
    one.advance(END)
    one.fill()
    assert one.places == ((None,) if name is None else guide("choice").places)


def test_a_budget_of_nothing_closes_the_block_at_once():
    assert allowed(guide(None, Reasoning(end_token=END, is_open=True, budget=0)).places[0]) == [END]


def test_a_block_that_the_model_opens_counts_and_no_other_text():
    one = guide(None, Reasoning(end_token=END, is_open=False, start_token=THINK, budget=2))
    for token in (*tokens("so"), *tokens("so"), *tokens("so"), THINK):
        assert one.places == (None,)
        one.advance(token)
        one.fill()
    for _ in range(2):
        assert one.places == (None,)
        one.advance(tokens("so")[0])
        one.fill()
    assert allowed(one.places[0]) == [END]


# Drafts.


@given(data=st.data())
def test_a_place_after_drafts_is_the_place_after_tokens(data):
    name = data.draw(st.sampled_from([*CONSTRAINTS, None]), "constraint")
    reasoning = data.draw(
        st.sampled_from(
            [
                None,
                Reasoning(end_token=END, is_open=True),
                Reasoning(end_token=END, is_open=True, budget=4),
                Reasoning(end_token=END, is_open=False, start_token=THINK, budget=1),
            ]
        ),
        "reasoning",
    )
    wish = data.draw(
        st.sampled_from([{}, {"min_tokens": 6}, {"ignore_eos": True}, {"stop_token_ids": (98,)}])
    )
    seed = data.draw(st.integers(0, 2**16), "seed")
    rng = random.Random(seed)
    one = guide(name, reasoning, **wish)
    plain = guide(name, reasoning, **wish)

    def pick(place: bytes | None) -> int:
        if place is None or (rng.random() < 0.3 and place[END // 8] >> END % 8 & 1):
            return rng.choice([END, THINK, 97, 98, 300])
        return rng.choice(allowed(place))

    for _ in range(rng.randrange(6)):
        if one.complete or one.error is not None:
            return
        token = pick(one.places[0])
        for each in (one, plain):
            each.advance(token)
            each.fill()
    if one.complete or one.error is not None:
        return
    # Drafts that fit for a while, then perhaps one that does not.
    drafts: list[int] = []
    fitting: list[int] = []
    while len(drafts) < 5 and not plain.complete and plain.error is None:
        token = pick(plain.places[0]) if rng.random() < 0.8 else rng.randrange(VOCAB)
        drafts.append(token)
        if token not in allowed(plain.places[0]):
            break
        fitting.append(token)
        plain.advance(token)
        plain.fill()
    before = one.places[0]
    one.fill(drafts)
    assert one.places[0] == before
    assert one.error is None
    assert one.num_drafts <= len(fitting)
    for token, place in zip(fitting, one.places[1:], strict=False):
        one.advance(token)
        if one.complete:
            break
        one.fill()
        assert one.places[0] == place


def test_drafts_are_verified_as_far_as_they_fit():
    for drafts, fit in (("ab, 12", True), ("ab, 12x", False), ("x", False)):
        one, told = guide("regex"), tokens(drafts)
        one.fill(told)
        assert one.num_drafts == len(told) - (not fit)
    thinking = guide("choice", Reasoning(end_token=END, is_open=True))
    told = (*tokens("so"), END, *tokens("yes"), *tokens("!"))
    thinking.fill(told)
    assert thinking.num_drafts == len(told) - 1
