"""What a request may say about tools."""

from __future__ import annotations

import pytest

from millpond.errors import Rejected
from millpond.front.parsing.wish import ToolWish

A, B = ({"type": "function", "function": {"name": n, "parameters": {}}} for n in "ab")
NAMED = {"type": "function", "function": {"name": "b"}}


@pytest.mark.parametrize(
    ("tools", "choice", "made"),
    [
        ([], None, ("none", None, False)),
        (None, "auto", ("auto", None, False)),
        ([A], None, ("auto", None, True)),
        ([A], "auto", ("auto", None, True)),
        ([A], "none", ("none", None, False)),
        ([A], "required", ("required", None, True)),
        ([A, B], NAMED, ("required", "b", True)),
        ([A, B], {"type": "function", "name": "b"}, ("required", "b", True)),
    ],
)
def test_choices(tools, choice, made):
    wish = ToolWish.of(tools, choice)
    assert (wish.choice, wish.name, wish.active) == made
    assert wish.for_template == (tuple(tools) if wish.active else None)
    assert bool(wish.kinds) == wish.active


def test_only_the_named_function_may_be_called_but_all_are_shown_and_read():
    wish = ToolWish.of([A, B], NAMED)
    assert [f["name"] for f in wish.functions] == ["b"]
    assert [t.name for t in wish.kinds] == ["a", "b"]
    assert [f["name"] for f in ToolWish.of([A, B], "required").functions] == ["a", "b"]


@pytest.mark.parametrize(("given", "parallel"), [(None, True), (True, True), (False, False)])
def test_calls_are_parallel_unless_that_is_refused(given, parallel):
    assert ToolWish.of([A], None, given).parallel == parallel


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([{"type": "web_search"}], None, "tools"),
        ([{"type": "function"}], None, "tools"),
        ([{"type": "function", "function": {"name": ""}}], None, "tools"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "tools"),
        ([{"type": "function", "function": {"name": "a>\n"}}], None, "tools"),
        ([{"type": "function", "function": {"name": "a" * 129}}], None, "tools"),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}], None, "tools"),
        (["a"], None, "tools"),
        ([], "required", "tool_choice"),
        ([A], NAMED, "tool_choice"),
        ([], NAMED, "tool_choice"),
        ([A], "any", "tool_choice"),
        ([A], {"type": "function"}, "tool_choice"),
        ([A], {"type": "allowed_tools", "allowed_tools": {}}, "tool_choice"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(tools, choice, param):
    with pytest.raises(Rejected) as caught:
        ToolWish.of(tools, choice)
    assert caught.value.param == param
