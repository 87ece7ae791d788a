"""Constrained requests through the engine on the bundled model: what they say, and who notices."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator

import pytest

from millpond.engine import guidance
from millpond.engine.constraint import Constraint, Reasoning
from millpond.engine.grammar import Grammar, Grammars
from millpond.engine.guide import NOTHING_LEFT, Guide
from millpond.errors import Rejected
from millpond.executor.uni import UniExecutor
from millpond.plan.step import Launched, StepPlan
from tests.structured.engines import EOS, MODEL, VOCAB, House, Told, read, tokenizer, tokens, worker

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "n": {"type": "integer", "minimum": -5, "maximum": 40},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "n", "tags"],
    "additionalProperties": False,
}
OBJECT = Constraint(kind="json_schema", text=json.dumps(SCHEMA), strict=True)
SMALL = Constraint(
    kind="json_schema",
    text='{"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22]}},'
    ' "required": ["ok", "n"], "additionalProperties": false}',
)
REGEX = Constraint(kind="regex", text="[a-f]{3,9}(, [0-9]{1,4}){2}")
CHOICE = Constraint(kind="choice", text='["yes", "no", "maybe so", "é😀"]')
LARK = Constraint(kind="grammar", text='start: "hello " NAME ("!" | ".")\nNAME: /[A-Z][a-z]{1,8}/')
CALL = Constraint(
    kind="grammar",
    text="start: <tool_call> /[a-z]{2,6}/ <arg_key> /[a-z]{1,3}/ </arg_key> </tool_call>",
)
ENDLESS = Constraint(kind="regex", text="[ab ]*")
END = tokenizer().token_id("</think>") or 0
CALL_ENDS = [tokenizer().token_id(text) for text in ("<tool_call>", "</tool_call>")]


def is_object(written: str) -> bool:
    found = json.loads(written)
    return (
        list(found) == ["name", "n", "tags"]
        and isinstance(found["name"], str)
        and len(found["name"]) <= 8
        and type(found["n"]) is int
        and -5 <= found["n"] <= 40
        and len(found["tags"]) <= 2
        and set(found["tags"]) <= {"a", "b"}
    )


def is_small(written: str) -> bool:
    found = json.loads(written)
    return list(found) == ["ok", "n"] and type(found["ok"]) is bool and found["n"] in (1, 22)


KINDS = {
    "object": (OBJECT, is_object),
    "regex": (REGEX, re.compile(REGEX.text).fullmatch),
    "choice": (CHOICE, json.loads(CHOICE.text).__contains__),
    "lark": (LARK, re.compile(r"hello [A-Z][a-z]{1,8}[!.]").fullmatch),
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(MODEL / "tokenizer.json", VOCAB, EOS)
    yield made
    made.close()


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.close()
    stats = made.engine.stats()
    assert (stats.slots_free, stats.pages_free) == (stats.slots_total, stats.pages_total)
    assert made.engine.healthy, made.engine.failure


def fits(grammars: Grammars, constraint: Constraint, told: Told) -> bool:
    """Whether a matcher that saw nothing of the run takes every token of it."""
    matcher = grammars.prepare(constraint).result(60).matcher()
    return matcher.try_consume_tokens(list(told.tokens)) == len(told.tokens)


@pytest.mark.parametrize("name", KINDS)
def test_sampled_answers_are_what_was_asked_for(house: House, grammars: Grammars, name: str):
    constraint, is_right = KINDS[name]
    requests = [house.request(constraint=constraint, seed=seed) for seed in range(4)]
    answers = [told for (told,) in house.tell(*requests)]
    for told in answers:
        assert told.finish == "stop"
        assert is_right(told.text), told.text
        assert fits(grammars, constraint, told)
    assert len({told.text for told in answers}) > 1


@pytest.mark.parametrize(
    "wish",
    [
        {"temperature": 0.0},
        {"temperature": 40.0},
        {"top_k": 1},
        {"top_p": 0.01, "min_p": 0.5},
        {"repetition_penalty": 3.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"logit_bias": tuple((token, -1e6) for token in tokens('{"name": 1, }'))},
        {"logit_bias": tuple((token, 1e6) for token in EOS)},
        {"ignore_eos": True, "min_tokens": 150},
        {"logprobs": 3},
    ],
    ids=str,
)
def test_no_wish_of_the_sampler_gets_around_a_grammar(house: House, wish: dict):
    ((told,),) = house.tell(house.request(constraint=SMALL, **wish))
    assert told.finish == "stop"
    assert is_small(told.text)


def test_every_sample_of_a_request_has_a_matcher_of_its_own(house: House, grammars: Grammars):
    (answers,) = house.tell(house.request(constraint=OBJECT, n=3))
    assert len({told.text for told in answers}) == 3
    assert all(is_object(told.text) and fits(grammars, OBJECT, told) for told in answers)


def test_special_tokens_are_drawn_where_a_grammar_names_them(house: House):
    ((told,),) = house.tell(house.request(constraint=CALL))
    assert [told.tokens[0], told.tokens[-1]] == CALL_ENDS
    assert told.finish == "stop"


def test_an_answer_that_is_cut_says_length(house: House, grammars: Grammars):
    ((told,),) = house.tell(house.request(constraint=OBJECT, max_tokens=5))
    assert (told.finish, len(told.tokens)) == ("length", 5)
    assert fits(grammars, OBJECT, told)


def test_min_tokens_holds_the_end_back_and_ignore_eos_never_sees_it(house: House):
    least, ignoring = house.tell(
        house.request(constraint=ENDLESS, min_tokens=20, max_tokens=40),
        house.request(constraint=ENDLESS, ignore_eos=True, max_tokens=40),
    )
    assert least[0].finish in ("stop", "length")
    assert len(least[0].tokens) >= 20
    assert not set(least[0].tokens[:19]) & set(EOS)
    assert (ignoring[0].finish, len(ignoring[0].tokens)) == ("length", 40)
    assert not set(ignoring[0].tokens) & set(EOS)


def test_stop_tokens_cut_a_grammar_as_any_text(house: House):
    (comma,) = set(tokens(",")) & set(range(VOCAB))
    ((told,),) = house.tell(house.request(constraint=REGEX, stop_token_ids=(comma,), seed=3))
    assert told.finish == "stop"
    if told.stop == comma:
        assert told.tokens[-1] == comma


def test_a_request_that_leaves_itself_no_token_fails_alone(house: House):
    plain = house.request(max_tokens=20, ignore_eos=True)
    alone = house.tell(plain)
    everything = tuple(range(VOCAB))
    refused = house.request(constraint=CHOICE, stop_token_ids=everything, min_tokens=3)
    # One token in: whatever goes on after `a` stops the request, and may not yet.
    late = house.request(
        constraint=Constraint(kind="regex", text="a[bB]{50}"),
        stop_token_ids=tuple(t for t in everything if "b" in tokenizer().token_text(t).lower()),
        min_tokens=5,
    )
    again = house.request(max_tokens=20, ignore_eos=True)
    first, second, third = house.tell(refused, late, again)
    for failed in (first[0], second[0]):
        assert (failed.finish, failed.error) == ("error", NOTHING_LEFT)
        assert failed.param == "response_format"
    assert second[0].text == "a"
    assert third[0].tokens == alone[0][0].tokens


# Thinking.


@pytest.mark.parametrize("budget", [0, 4])
def test_thinking_ends_at_its_budget_and_the_answer_is_what_was_asked_for(house: House, budget):
    reasoning = Reasoning(end_token=END, is_open=True, budget=budget)
    ((told,),) = house.tell(house.request(constraint=SMALL, reasoning=reasoning))
    at = told.tokens.index(END)
    assert at <= budget
    assert is_small(tokenizer().decode(told.tokens[at + 1 :]))
    assert told.finish == "stop"


def test_a_budget_binds_without_a_grammar(house: House):
    reasoning = Reasoning(end_token=END, is_open=True, budget=3)
    bias = ((END, -1e6),)  # would not end it by itself
    request = house.request(reasoning=reasoning, logit_bias=bias, max_tokens=12, ignore_eos=True)
    free = house.request(logit_bias=bias, max_tokens=12, ignore_eos=True)
    (bound,), (other,) = house.tell(request, free)
    assert bound.tokens[3] == END
    assert bound.tokens[:3] == other.tokens[:3]
    assert END not in other.tokens


# Neighbours.


def test_neighbours_of_a_grammar_draw_byte_for_byte_as_alone(house: House):
    wishes = [
        {"temperature": 0.0, "logprobs": 4},
        {"temperature": 1.2, "seed": 9, "logprobs": 2, "top_p": 0.8},
        {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3, "logprobs": 1},
    ]

    def deltas(*constraints: Constraint) -> list[list]:
        plain = [house.request(max_tokens=15, ignore_eos=True, **wish) for wish in wishes]
        bound = [house.request(constraint=one, seed=n) for n, one in enumerate(constraints)]
        streams = [house.engine.submit(request) for request in plain + bound]
        while house.engine.step():
            pass
        return [
            [out for delta in iter(lambda s=stream: s.get(timeout=0), None) for out in delta.tokens]
            for stream in streams[: len(plain)]
        ]

    assert deltas() == deltas(SMALL, REGEX, CALL)


class Recording(UniExecutor):
    """Keeps the plans."""

    plans: list[StepPlan]

    def launch(self, plan: StepPlan) -> Launched:
        self.plans.append(plan)
        return super().launch(plan)


def test_without_a_constraint_nothing_of_it_reaches_the_device(house: House):
    executor = Recording(worker())
    executor.plans = []
    house.engine._flights._executor = executor
    house.tell(house.request(max_tokens=5), house.request(constraint=ENDLESS, max_tokens=5))
    seats = {row.seat for plan in executor.plans for row in plan.prefill}
    bound = {mask.seat for plan in executor.plans for mask in plan.masks}
    assert (len(seats), len(bound)) == (2, 1)


# Time: what takes long is waited for by nobody else.


def test_others_run_while_a_grammar_is_compiled(house: House, monkeypatch):
    gate = threading.Event()
    compile_ = Grammars._compile

    def gated(self: Grammars, constraint: Constraint) -> Grammar:
        assert gate.wait(60)
        return compile_(self, constraint)

    monkeypatch.setattr(Grammars, "_compile", gated)
    bound = house.request(max_tokens=30, seed=2)
    bound = type(bound)(
        request_id="bound", tokens=bound.tokens, params=bound.params, constraint=CHOICE
    )
    waiting, plain = (
        house.engine.submit(bound),
        house.engine.submit(house.request(max_tokens=10, ignore_eos=True)),
    )
    while house.engine.step():
        pass
    assert read(plain, 1)[0].finish == "length"
    assert house.engine.stats().requests_waiting == 1
    gate.set()
    house.engine.prepare(CHOICE).result(60)
    wait_for(lambda: house.engine._intake._calls)  # the last of the compiling thread
    while house.engine.step():
        pass
    assert read(waiting, 1)[0].text in json.loads(CHOICE.text)


def test_a_request_aborted_while_its_grammar_is_compiled_never_runs(house: House, monkeypatch):
    gate = threading.Event()
    compile_ = Grammars._compile

    def gated(self: Grammars, constraint: Constraint) -> Grammar:
        assert gate.wait(60)
        return compile_(self, constraint)

    monkeypatch.setattr(Grammars, "_compile", gated)
    spec = house.request()
    stream = house.engine.submit(
        type(spec)(request_id="gone", tokens=spec.tokens, params=spec.params, constraint=CHOICE)
    )
    stream.abort()
    house.engine.step()
    assert read(stream, 1)[0].finish == "abort"
    gate.set()
    house.engine.prepare(CHOICE).result(60)
    wait_for(lambda: house.engine._intake._calls)
    assert not house.engine.step()


def test_an_unprepared_constraint_that_cannot_be_used_ends_its_stream(house: House, monkeypatch):
    gate = threading.Event()
    compile_ = Grammars._compile

    def gated(self: Grammars, constraint: Constraint) -> Grammar:
        assert gate.wait(60)
        return compile_(self, constraint)

    monkeypatch.setattr(Grammars, "_compile", gated)
    spec = house.request()
    bad = Constraint(kind="regex", text="[")
    stream = house.engine.submit(
        type(spec)(request_id="bad", tokens=spec.tokens, params=spec.params, constraint=bad)
    )
    gate.set()
    wait_for(lambda: house.engine._intake._calls)
    house.engine.step()
    told = read(stream, 1)[0]
    assert told.finish == "error"
    assert "regex cannot be used" in (told.error or "")


def test_a_mask_that_takes_long_delays_its_own_row_only(house: House, monkeypatch):
    gate, fill, shares = threading.Event(), guidance._fill, []

    def gated(share) -> None:
        shares.append(share)
        assert gate.wait(60)
        fill(share)

    monkeypatch.setattr(guidance, "_fill", gated)
    slow = house.engine.submit(house.request(constraint=REGEX))
    plain = house.engine.submit(house.request(max_tokens=10, ignore_eos=True))
    told = Told()
    while told.finish is None:
        assert house.engine.step()
        told = read_some(plain, told)
    assert len(told.tokens) == 10
    assert house.engine.step()  # nothing to do but to wait for the mask
    assert len(read_some(slow, Told()).tokens) == 1
    assert len(shares) == 1
    gate.set()
    while house.engine.step():
        pass
    ended = read(slow, 1)[0]
    assert (ended.finish, ended.error) == ("stop", None)


def wait_for(condition) -> None:
    while not condition():
        time.sleep(0.001)


def read_some(stream, told: Told) -> Told:
    try:
        while (delta := stream.get(timeout=0)) is not None:
            told.tokens += [out.token for out in delta.tokens]
            told.finish = delta.finish_reason or told.finish
    except TimeoutError:
        pass
    return told


def test_a_fault_in_filling_masks_ends_one_request(house: House, monkeypatch):
    class Panic(BaseException):
        """What the binding raises is no `Exception`."""

    fill = Guide.fill

    def broken(self: Guide, drafts=()) -> None:
        if self.count == 2:
            raise Panic("index out of bounds")
        fill(self, drafts)

    monkeypatch.setattr(Guide, "fill", broken)
    bound, plain = house.tell(
        house.request(constraint=REGEX), house.request(max_tokens=9, ignore_eos=True)
    )
    assert bound[0].finish == "error"
    assert "index out of bounds" in (bound[0].error or "")
    assert plain[0].finish == "length"


# Interruptions.


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_sequence_pushed_out_goes_on_where_its_grammar_was(num_drafts: int):
    house = House(num_drafts)
    request = house.request(constraint=SMALL, seed=3)
    ((undisturbed,),) = house.tell(request)
    again = house.request(constraint=SMALL, seed=3)
    stream, steps, told = house.engine.submit(again), 0, Told()
    while house.engine.step():
        steps += 1
        running = house.engine._scheduler.running
        if steps in (2, 6) and running:
            house.engine._scheduler.preempt(running[0])
        told = read_some(stream, told)
    house.close()
    assert told.tokens == undisturbed.tokens
    assert told.finish == "stop"


def test_a_step_that_fails_leaves_the_grammar_where_it_was(house: House):
    request = house.request(constraint=SMALL, seed=3)
    ((undisturbed,),) = house.tell(request)
    runner = worker().runner
    forward, calls = runner.model.forward, 0

    def failing(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls % 7 == 5:
            raise RuntimeError("planted")
        return forward(*args, **kwargs)

    runner.model.forward = failing
    try:
        ((told,),) = house.tell(house.request(constraint=SMALL, seed=3))
    finally:
        runner.model.forward = forward
    assert told.tokens == undisturbed.tokens


def test_an_abort_in_the_middle_leaves_nothing(house: House):
    streams = [house.engine.submit(house.request(constraint=SMALL, n=2)) for _ in range(2)]
    for _ in range(4):
        house.engine.step()
    streams[0].abort()
    while house.engine.step():
        pass
    assert {told.finish for told in read(streams[0], 2)} == {"abort"}
    assert all(is_small(told.text) for told in read(streams[1], 2))


def test_an_engine_without_grammars_says_so():
    house = House()
    house.engine._guidance._grammars = None
    with pytest.raises(Rejected, match="not served here") as caught:
        house.engine.prepare(CHOICE)
    assert caught.value.code == "unsupported"
    house.close()


# Drafts.


@pytest.fixture(scope="module")
def plain_texts() -> list[Told]:
    house = House()
    told = [told for answers in house.tell(*asked(house)) for told in answers]
    house.close()
    return told


def asked(house: House) -> list:
    open_block = Reasoning(end_token=END, is_open=True, budget=6)
    return [
        house.request(constraint=SMALL, seed=3, n=2),
        house.request(constraint=REGEX, temperature=0.7, min_tokens=20, stop_token_ids=(44,)),
        house.request(constraint=ENDLESS, ignore_eos=True, max_tokens=25, temperature=0.3),
        house.request(constraint=CHOICE, reasoning=open_block, temperature=0.8),
        house.request(constraint=CALL, reasoning=open_block, repetition_penalty=1.2),
    ]


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_drafts_change_no_constrained_text(plain_texts: list[Told], num_drafts: int):
    house = House(num_drafts)
    told = [told for answers in house.tell(*asked(house)) for told in answers]
    house.close()
    assert [one.tokens for one in told] == [one.tokens for one in plain_texts]
    assert [one.finish for one in told] == [one.finish for one in plain_texts]
    assert sum(one.accepted for one in told) > 10
