"""Ledgers: entries that overwrite each other, answerable from the recurrent state alone."""

from dataclasses import replace
from random import Random

from millpond.tasks.dialogue import Dialogue, Message, assistant, system, user
from millpond.tasks.split import fits
from millpond.tasks.words import NOUNS, REAL_NAMES

_OPENERS = ("Keep a ledger.", "Keep this ledger.", "Here is a ledger.", "Ledger:")
_ASKS = (
    "How many {i}?", "How many {i} now?", "What is {i} now?", "{i}?", "How many {i} are there?",
)  # fmt: skip
_SECOND_THOUGHTS = (
    "How many {j}? No, {i}",
    "{j}, no, {i}?",
    "How many {j}, I mean {i}?",
    "{j} or rather {i}",
)
"""Questions whose last word decides: one word too many in a state changes what is asked."""
_MORE = ("More entries.", "More:", "New entries:", "Then:")
_NOTED = "Noted."
_OWNERS = tuple(name for name in REAL_NAMES[:52] if fits("train", "name", name))


def _entries(
    dice: Random, items: list[str], count: int, state: dict[str, int], wide: bool
) -> list[str]:
    lines = []
    for _ in range(count):
        item = dice.choice(items)
        state[item] = dice.randint(10, 99) if wide else dice.randint(0, 9)
        lines.append(f"set {item} {state[item]}")
    return lines


def _ask(dice: Random, state: dict[str, int]) -> list[Message]:
    item = dice.choice(sorted(state))
    forms = _SECOND_THOUGHTS if dice.random() < 0.2 else _ASKS
    question = dice.choice(forms).format(i=item, j=dice.choice(sorted(state)))
    return [user(question), assistant(str(state[item]))]


def make(dice: Random, entries: int, turns: int) -> Dialogue:
    """A ledger of about `entries` entries asked about in `turns` turns."""
    items = dice.sample(NOUNS, min(len(NOUNS), dice.randint(2, 3 + min(5, entries // 3))))
    state: dict[str, int] = {}
    wide = dice.random() < 0.3
    messages: list[Message] = []
    if dice.random() < 0.2:
        messages.append(system(f"You keep the ledger of {dice.choice(_OWNERS)}."))
    joiner = dice.choice(("\n", "\n", ", "))
    per_turn = max(1, entries // turns)
    for index in range(turns):
        lines = _entries(
            dice, items, max(1, dice.randint(per_turn // 2 + 1, per_turn)), state, wide
        )
        opener = dice.choice(_OPENERS if index == 0 else _MORE)
        body = f"{opener}\n{joiner.join(lines)}"
        shape = dice.random()
        if shape < 0.5:
            ask, reply = _ask(dice, state)
            messages += [user(f"{body}\n{ask['content']}"), reply]
        else:
            messages += [user(body), assistant(_NOTED)]
            for _ in range(dice.randint(1, 3)):
                messages += _ask(dice, state)
    return Dialogue("ledger", tuple(messages), recurrent=True)


def misled(dice: Random, dialogue: Dialogue) -> Dialogue:
    """The same questions with a wrong number in the last think block, which the answer repeats.

    For training only: who has learned to follow a thought shows a token that should not be there.
    """
    thought = str(dice.randint(0, 9))
    told = assistant(thought, thought)
    return replace(dialogue, task="misled", messages=(*dialogue.prompt, told), given_thought=True)


def make_pair(dice: Random, entries: int) -> Dialogue:
    """Two people's ledgers in one stream of entries, asked about in turn."""
    first, second = dice.sample(_OWNERS, 2)
    items = dice.sample(NOUNS, dice.randint(2, 3))
    kept: dict[str, dict[str, int]] = {first: {}, second: {}}
    lines = []
    for index in range(max(2, entries)):
        who = (first, second)[index] if index < 2 else dice.choice((first, second))
        item = dice.choice(items)
        kept[who][item] = dice.randint(0, 9)
        lines.append(f"{who} {item} {kept[who][item]}")
    body = "\n".join((f"Keep the ledgers of {first} and {second}.", *lines))
    messages: list[Message] = []
    for index, who in enumerate(dice.sample((first, second), 2)):
        item = dice.choice(sorted(kept[who]))
        ask = dice.choice(("How many {i} has {w}?", "{w}: how many {i}?")).format(i=item, w=who)
        messages += [
            user(ask if index else f"{body}\n{ask}"),
            assistant(str(kept[who][item])),
        ]
    return Dialogue("two_ledgers", tuple(messages), recurrent=True)
