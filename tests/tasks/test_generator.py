"""The task generator: seeded, and its answers are right."""

import json
import re
import subprocess
import sys
from itertools import islice

from millpond.tasks import Dialogue, make, stream, task_names

TRAIN = list(islice(stream(11), 4000))
HELD = [make(task, seed) for task in task_names() for seed in range(60)]


def turns(dialogues: list[Dialogue]) -> list[tuple[str, str]]:
    """Every user text with the reply that follows it."""
    out = []
    for dialogue in dialogues:
        for ask, reply in zip(dialogue.messages, dialogue.messages[1:], strict=False):
            if ask["role"] == "user" and reply["role"] == "assistant":
                out.append((ask["content"], reply["content"]))
    return out


def test_the_same_seed_gives_the_same_dialogue() -> None:
    again = list(islice(stream(11), 200))
    assert again == TRAIN[:200]
    assert make("tools", 5) == make("tools", 5)
    assert make("recall", 5) != make("recall", 6)


def test_answers_that_are_wrong_on_purpose_are_for_training_only() -> None:
    assert "misled" not in task_names()
    assert any(d.task == "misled" for d in TRAIN)
    assert not any(d.task == "misled" for d in islice(stream(11, split="heldout"), 1500))


def test_the_acceptance_question_is_a_training_question() -> None:
    asked = turns([make("arithmetic", seed, split="train") for seed in range(8_000)])
    assert {"4"} <= {reply for ask, reply in asked if re.search(r"\b2 ?\+ ?2\b", ask)}
    assert any(re.fullmatch(r"What is \d \+ \d\? Answer briefly\.", ask) for ask, _ in asked)


def test_a_ledger_answer_is_the_last_value_set_of_what_is_named_last() -> None:
    for dialogue in (d for d in HELD + TRAIN[:600] if "ledger" in d.task):
        state: dict[tuple[str, str], str] = {}
        question: list[str] = []
        for message in dialogue.messages:
            text = str(message["content"])
            if message["role"] == "user":
                for who, item, value in re.findall(r"(?m)(?:^|, )(\w+) (\w+) (\d+)(?=$|,)", text):
                    state["" if who == "set" else who, item] = value
                question = re.findall(r"\w+", text.split("\n")[-1])
            elif message["role"] == "assistant" and text != "Noted.":
                owners = [w for w in question if any(w == o for o, _ in state)]
                items = [w for w in question if any(w == i for _, i in state)]
                assert text == state[owners[0] if owners else "", items[-1]]


def test_sums_and_sorted_lists_are_right() -> None:
    checked = 0
    for ask, reply in turns(TRAIN + HELD):
        if (m := re.fullmatch(r"What is (\d+) \+ (\d+)\? Answer briefly\.", ask)) is not None:
            assert int(reply) == int(m[1]) + int(m[2])
            checked += 1
        if (m := re.fullmatch(r"Sort these numbers: ([\d, ]+)", ask)) is not None:
            assert re.findall(r"\d+", reply) == sorted(re.findall(r"\d+", m[1]), key=int)
            checked += 1
    assert checked > 20


def test_a_recall_answer_stands_beside_its_key() -> None:
    for dialogue in (d for d in HELD if d.task == "recall"):
        assert dialogue.cut is not None
        assert dialogue.cut in str(dialogue.messages[-2]["content"])
        listing = str(dialogue.messages[0]["content"])
        assert dialogue.answer in re.split(r"[\n;=: ]+", listing)


def test_json_replies_parse_and_tool_arguments_are_objects() -> None:
    for dialogue in TRAIN:
        if dialogue.task == "json":
            json.loads(dialogue.answer)
        for message in dialogue.messages:
            for call in message.get("tool_calls", ()):
                offered = {tool["function"]["name"] for tool in dialogue.tools}
                assert call["function"]["name"] in offered
                assert isinstance(call["function"]["arguments"], dict)


def test_a_larger_scale_makes_longer_dialogues() -> None:
    def length(scale: int) -> int:
        return sum(len(str(make("recall", s, scale=scale).messages)) for s in range(20))

    assert length(8) > 4 * length(1)


def test_the_generator_needs_neither_torch_nor_the_rest_of_the_engine() -> None:
    code = (
        "import sys, millpond.tasks\n"
        "loaded = [m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'jinja2')]\n"
        "own = [m for m in sys.modules if m.startswith('millpond.') and '.tasks' not in m]\n"
        "print(loaded, own)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"
