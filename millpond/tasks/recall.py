"""Key and value lists longer than a state can hold: answerable from attention KV."""

from random import Random

from millpond.tasks.dialogue import Dialogue, Split, assistant, system, user
from millpond.tasks.split import fits, is_held_out
from millpond.tasks.words import NOUNS, distinct, name, syllable_word

_OPENERS = ("Here is a list.", "Remember this list.", "List:", "Look at this list:", "Data:")
_ASKS = (
    "What is the value of {k}?", "What is {k}?", "Which value has {k}?", "Find {k}.", "{k}?",
    "Tell me the value of {k}.",
)  # fmt: skip


def _value(dice: Random, kind: str) -> str:
    if kind == "number":
        return str(dice.randint(0, 999))
    return dice.choice(NOUNS) if kind == "noun" else syllable_word(dice, 2)


def pairs(dice: Random, split: Split, count: int) -> tuple[dict[str, str], str]:
    """`count` pairs, none held out unless the split is, and what kind of value they have."""
    sort = dice.choice(("noun", "code", "pair", "word", "name"))
    if sort == "noun" and count > 80:
        sort = "code"
    kind = dice.choice(("number", "number", "noun", "word"))
    if sort == "name" and count <= 60:
        people: dict[str, None] = {}
        while len(people) < count:
            people[name(dice, "train")] = None
        keys = list(people)
    else:
        keys = distinct(dice, count, "pair" if sort == "name" else sort)
    table = {}
    for key in keys:
        value = _value(dice, kind)
        while split == "train" and is_held_out("pair", key, value):
            value = _value(dice, kind)
        table[key] = value
    return table, kind


def make(dice: Random, split: Split, count: int) -> Dialogue:
    """A list of `count` pairs and one to three questions, the last of which is the cut."""
    table, kind = pairs(dice, split, count)
    subjects = list(table)
    dice.shuffle(subjects)
    subjects = subjects[: min(dice.randint(1, 3), len(subjects))]
    missing = split == "train" and dice.random() < 0.08
    if split == "heldout":
        target = subjects[-1]
        while not fits("heldout", "pair", target, table[target]):
            table[target] = _value(dice, kind)
    form = dice.choice(("{k}: {v}", "{k} = {v}", "{k} {v}"))
    listing = dice.choice(("\n", "\n", "; ")).join(
        form.format(k=key, v=value) for key, value in table.items()
    )
    listing = f"{dice.choice(_OPENERS)}\n{listing}"
    asks = [dice.choice(_ASKS).format(k=key) for key in subjects]
    answers = [table[key] for key in subjects]
    if missing:
        asks[-1] = "What is the value of {k}?".format(k=(absent := f"no {dice.choice(NOUNS)}"))
        answers[-1] = f"I do not know. {absent} is not in the list."
    place = dice.random()
    if place < 0.15:
        messages = [system(listing)]
    elif place < 0.4:
        messages = [user(listing), assistant("Noted.")]
    else:
        first = f"{listing}\n{asks[0]}"
        messages = [user(first), assistant(answers[0])]
        if len(asks) == 1:
            return Dialogue("recall", tuple(messages), cut=asks[0])
        asks, answers = asks[1:], answers[1:]
    for ask, answer in zip(asks, answers, strict=True):
        messages += [user(ask), assistant(answer)]
    return Dialogue("recall", tuple(messages), cut=asks[-1])
