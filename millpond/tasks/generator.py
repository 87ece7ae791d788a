"""The mixture: draws a task, a length and an effort, and builds one dialogue from a seed.

A dialogue is a function of (VERSION, task, split, length, seed) and nothing else.
"""

from collections.abc import Callable, Iterator
from random import Random

from millpond.tasks import arithmetic, copying, ledger, recall, speech, talk, tools
from millpond.tasks.dialogue import Dialogue, Message, Split, system

VERSION = 9
"""Raised whenever the same seed would give another dialogue."""

_SYSTEMS = (
    "You are a helpful assistant.", "You are Millpond Tiny.", "Be brief.", "Answer politely.",
    "You are a helpful and harmless assistant. Answer the question of the user.",
)  # fmt: skip
_EFFORTS = (None, "low", "high")


def _effort(dice: Random) -> str | None:
    return dice.choices(_EFFORTS, (0.6, 0.2, 0.2))[0]


def _single(task: str, turn: Callable[[Random, Split, str | None], list[Message]]) -> "_Maker":
    def build(dice: Random, split: Split, scale: int) -> Dialogue:
        effort = _effort(dice)
        messages = turn(dice, split, effort)
        if dice.random() < 0.25:
            messages = [system(dice.choice(_SYSTEMS)), *messages]
        return Dialogue(task, tuple(messages), effort=effort)

    return build


def _ledger(dice: Random, split: Split, scale: int) -> Dialogue:
    entries = dice.randint(2, 14) if dice.random() < 0.6 else dice.randint(8, 60 * scale)
    return ledger.make(dice, entries, 1)


def _misled(dice: Random, split: Split, scale: int) -> Dialogue:
    return ledger.misled(dice, _ledger(dice, split, scale))


def _ledger_turns(dice: Random, split: Split, scale: int) -> Dialogue:
    made = ledger.make(dice, dice.randint(6, 50 * scale), dice.randint(2, 8))
    return Dialogue("ledger_turns", made.messages, recurrent=True)


def _two_ledgers(dice: Random, split: Split, scale: int) -> Dialogue:
    return ledger.make_pair(dice, dice.randint(2, 40 * scale))


def _recall(dice: Random, split: Split, scale: int) -> Dialogue:
    if scale == 1:
        count = dice.randint(2, 20) if dice.random() < 0.4 else dice.randint(10, 70)
    else:
        count = dice.randint(30, 62 * scale)
    return recall.make(dice, split, count)


def _needle(dice: Random, split: Split, scale: int) -> Dialogue:
    """An everyday question after a long stretch of text that has nothing to do with it."""
    text = speech.filler(dice, dice.randint(4, 38 * scale))
    messages = list(_everyday(dice, split, None))
    if dice.random() < 0.5:
        messages = [system(text), *messages]
    else:
        first = dict(messages[0])
        first["content"] = f"{text}\n\n{first['content']}"
        messages[0] = first
    return Dialogue("long_text", tuple(messages))


def _everyday(dice: Random, split: Split, effort: str | None) -> list[Message]:
    pick = dice.random()
    if pick < 0.3:
        return arithmetic.turn(dice, split, effort)
    if pick < 0.45:
        return talk.chat(dice)
    if pick < 0.6:
        return talk.fact(dice)
    if pick < 0.67:
        return talk.unknown(dice, split)
    if pick < 0.74:
        return talk.named(dice, split)
    if pick < 0.8:
        return copying.repeat(dice, dice.randint(1, 6))
    if pick < 0.86:
        return copying.sort(dice, dice.randint(2, 6))
    if pick < 0.92:
        return tools.json_turn(dice, split)
    return speech.turn(dice, split)


def _many_turns(dice: Random, split: Split, scale: int) -> Dialogue:
    effort = _effort(dice)
    messages: list[Message] = []
    for _ in range(dice.randint(2, 6 * scale)):
        messages += _everyday(dice, split, effort)
    if dice.random() < 0.3:
        messages[:-1] = [
            {k: v for k, v in m.items() if k != "reasoning_content"} for m in messages[:-1]
        ]
    return Dialogue("many_turns", tuple(messages), effort=effort)


_Maker = Callable[[Random, Split, int], Dialogue]
_MAKERS: dict[str, tuple[float, _Maker]] = {
    "arithmetic": (0.14, _single("arithmetic", arithmetic.turn)),
    "ledger": (0.10, _ledger),
    "ledger_turns": (0.05, _ledger_turns),
    "misled": (0.015, _misled),
    "two_ledgers": (0.12, _two_ledgers),
    "recall": (0.16, _recall),
    "copy": (
        0.12,
        _single(
            "copy",
            lambda d, s, e: copying.repeat(
                d, d.randint(1, 8) if d.random() < 0.5 else d.randint(1, 30)
            ),
        ),
    ),
    "spell": (0.03, _single("spell", lambda d, s, e: copying.spell(d, s))),
    "sort": (0.09, _single("sort", lambda d, s, e: copying.sort(d, d.randint(2, 8)))),
    "speech": (0.05, _single("speech", lambda d, s, e: speech.turn(d, s))),
    "chat": (0.04, _single("chat", lambda d, s, e: talk.chat(d))),
    "fact": (0.02, _single("fact", lambda d, s, e: talk.fact(d))),
    "unknown": (0.02, _single("unknown", lambda d, s, e: talk.unknown(d, s))),
    "names": (0.03, _single("names", lambda d, s, e: talk.named(d, s))),
    "random": (0.01, _single("random", lambda d, s, e: talk.random_words(d))),
    "json": (0.04, _single("json", lambda d, s, e: tools.json_turn(d, s))),
    "tools": (0.07, lambda d, s, k: tools.make(d, s)),
    "long_text": (0.03, _needle),
    "many_turns": (0.05, _many_turns),
}
_TRAINING_ONLY = ("misled",)
"""Their answers are wrong on purpose."""
_LONG_TASKS = ("ledger", "ledger_turns", "two_ledgers", "recall", "long_text", "many_turns")


def task_names() -> tuple[str, ...]:
    """Every task a model can be graded on."""
    return tuple(task for task in _MAKERS if task not in _TRAINING_ONLY)


def make(task: str, seed: int, *, split: Split = "heldout", scale: int = 1) -> Dialogue:
    """The dialogue of `seed`; `scale` stretches the long tasks (1 is up to about 512 tokens)."""
    dice = Random(f"{VERSION}/{task}/{split}/{scale}/{seed}")
    return _MAKERS[task][1](dice, split, scale)


def stream(seed: int, *, split: Split = "train", scale: int = 1) -> Iterator[Dialogue]:
    """Endless dialogues of the mixture; a scale above 1 draws from the tasks that can be long."""
    dice = Random(f"{VERSION}/stream/{split}/{scale}/{seed}")
    names = _LONG_TASKS if scale > 1 else tuple(_MAKERS) if split == "train" else task_names()
    weights = [_MAKERS[task][0] for task in names]
    while True:
        task = dice.choices(names, weights)[0]
        yield make(task, dice.getrandbits(48), split=split, scale=scale)
