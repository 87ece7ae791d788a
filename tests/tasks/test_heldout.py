"""What the models are graded on never occurred in training: sums, names and pairs, in every task.

Compares the texts of both splits as they come out of the generator, over many seeds and lengths.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice

import pytest

from millpond.tasks import Dialogue, make, stream, task_names
from millpond.tasks.split import is_held_out
from millpond.tasks.words import REAL_NAMES

Sum = tuple[str, int, int]

EXPRESSION = re.compile(r"(?<![\d.])(\d+) ?(\+|-|plus|minus) ?(\d+)(?!\d)")
NAMED = re.compile(
    r"Nice to meet you, (.+)!|Your name is (.+)\.|^Dear (.+),$|I sent the mail to (.+)\."
    r"|Who is (.+)\?|Where does (.+) live\?|How old is (.+)\?|phone number of (.+)\?"
    r"|When was (.+) born\?|think about (.+)\?|ledger of (.+)\.",
    re.M,
)


@pytest.fixture(scope="module")
def trained() -> list[Dialogue]:
    """Training dialogues of many streams, short and long."""
    short = [d for seed in range(60) for d in islice(stream(seed), 200)]
    return short + [d for seed in range(30) for d in islice(stream(seed, scale=4), 20)]


@pytest.fixture(scope="module")
def held() -> list[Dialogue]:
    """What models are graded on."""
    return [make(task, seed) for task in task_names() for seed in range(120)]


def texts(dialogue: Dialogue) -> Iterator[str]:
    """All that is said in a dialogue: messages, thoughts and calls."""
    for message in dialogue.messages:
        yield str(message.get("content", ""))
        yield str(message.get("reasoning_content", ""))
        for call in message.get("tool_calls", ()):
            yield json.dumps(call["function"]["arguments"], ensure_ascii=False)


def sums(dialogue: Dialogue) -> set[Sum]:
    """Sums and differences of two numbers, one of them above 9; sums without regard to order."""
    found = set()
    for text in texts(dialogue):
        text = re.sub(r"(?:the sum of|[Aa]dd) (\d+) and (\d+)", r"\1 + \2", text)
        for left, sign, right in EXPRESSION.findall(text):
            a, b = int(left), int(right)
            if sign in ("+", "plus"):
                found.add(("+", *sorted((a, b))))
            else:
                found.add(("-", a, b))
    return {s for s in found if max(s[1:]) > 9}


def names(dialogue: Dialogue) -> set[str]:
    """People's names, by what is said of them."""
    found = {n for text in texts(dialogue) for m in NAMED.findall(text) for n in m if n}
    for message in dialogue.messages:
        for call in message.get("tool_calls", ()):
            found |= {v for k, v in call["function"]["arguments"].items() if k == "to"}
    if dialogue.task == "json":
        found.add(json.loads(dialogue.answer)["name"])
    return found


def pairs(dialogue: Dialogue) -> set[tuple[str, str]]:
    """Keys and values of a list."""
    listing = str(dialogue.messages[0]["content"]).replace("; ", "\n").split("\n")[1:]
    lines = [re.fullmatch(r"(.+?)(?:: | = | )([^\s?.]+)", line) for line in listing]
    return {(m[1], m[2]) for m in lines if m}


def asked_pair(dialogue: Dialogue) -> tuple[str, str]:
    """The pair the last question is about."""
    asked = str(dialogue.cut)
    about = [p for p in pairs(dialogue) if re.search(rf"(?<!\w){re.escape(p[0])}(?!\w)", asked)]
    return max((p for p in about if p[1] == dialogue.answer), key=lambda p: len(p[0]))


def test_no_held_out_sum_is_said_anywhere_in_training(
    trained: list[Dialogue], held: list[Dialogue]
) -> None:
    seen = {s for d in trained for s in sums(d)}
    asked = {s for d in held if d.task == "arithmetic" for s in sums(d)}
    assert len(seen) > 1200
    assert len(asked) > 60
    assert not [s for s in seen if is_held_out("sum", *s)]
    assert all(is_held_out("sum", *s) for s in asked)
    assert not seen & asked


def test_sums_are_met_in_several_tasks(trained: list[Dialogue]) -> None:
    assert {"arithmetic", "many_turns", "long_text", "tools"} <= {
        d.task for d in trained if sums(d)
    }


def test_no_held_out_name_is_given_to_anybody_in_training(
    trained: list[Dialogue], held: list[Dialogue]
) -> None:
    seen = {n for d in trained for n in names(d)}
    asked = {n for d in held if d.task in ("names", "json") for n in names(d)}
    assert len(seen) > 700
    assert len(asked) > 100
    assert not [n for n in seen if is_held_out("name", n)]
    assert all(is_held_out("name", n) for n in asked)
    assert not seen & asked


def test_no_held_out_real_name_is_written_anywhere_in_training(trained: list[Dialogue]) -> None:
    words = {w for d in trained for text in texts(d) for w in re.findall(r"\w+", text)}
    real = {n for n in REAL_NAMES if is_held_out("name", n)}
    assert len(real) > 5
    assert not words & real
    assert len(words & set(REAL_NAMES)) > 40


def test_no_held_out_pair_is_listed_in_training(
    trained: list[Dialogue], held: list[Dialogue]
) -> None:
    seen = {p for d in trained if d.task == "recall" for p in pairs(d)}
    asked = {asked_pair(d) for d in held if d.task == "recall"}
    assert len(seen) > 50_000
    assert len(asked) > 100
    assert not [p for p in seen if is_held_out("pair", *p)]
    assert all(is_held_out("pair", *p) for p in asked)
    assert not seen & asked
