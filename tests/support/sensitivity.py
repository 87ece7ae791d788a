"""The share of right replies under each fault: what a model shows of damage, and what it hides.

Places of a hand-off: `value`, when the last token of the value that is asked for has been folded,
where a checkpoint inside a message is handed on (in tasks without one it is `question`);
`question`, when the last token of the user's last message has been folded; and `reply`, when the
whole prompt has been folded and the first token of the reply is drawn, which is where decoding, and
with it speculation, begins. `body` is before the question.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from millpond.evaluate.cases import Dialect
from millpond.tasks import make
from tests.support import faults
from tests.support.faults import Fault
from tests.support.handoff import Bench, Handoff

Place = Literal["body", "value", "question", "reply"]

ROWS: tuple[tuple[str, Fault, Place], ...] = (
    ("none", faults.nothing, "question"),
    ("state zeroed", faults.state_zeroed, "reply"),
    ("state of another sequence", faults.state_swapped, "reply"),
    ("state two tokens old", faults.state_two_tokens_old, "value"),
    ("convolution window dropped", faults.window_dropped, "question"),
    ("rollback missed: a wrong digit stays", faults.rejected_digit_kept, "reply"),
    ("rollback missed: a foreign token stays", faults.foreign_token_kept, "reply"),
    ("KV zeroed", faults.kv_zeroed, "question"),
    ("KV of another sequence", faults.kv_swapped, "question"),
    ("one page of another sequence", faults.wrong_page, "question"),
)
"""Name, fault, and where the hand-off is."""

GATES: tuple[tuple[str, str, float], ...] = (
    ("state zeroed", "ledger", 0.3),
    ("state of another sequence", "ledger", 0.3),
    ("state two tokens old", "ledger", 0.7),
    ("rollback missed: a wrong digit stays", "ledger", 0.3),
    ("KV zeroed", "recall", 0.3),
    ("KV of another sequence", "recall", 0.3),
)
"""Fault, task and the largest share of right replies with which a bundled model is released."""

TASKS = ("ledger", "recall", "copy", "arithmetic")


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt with its right reply and the token that ends it; `places` are lengths in tokens."""

    tokens: tuple[int, ...]
    places: dict[Place, int]

    @property
    def reply(self) -> int:
        """The index of the reply's first token."""
        return self.places["reply"]


class Speaker:
    """Makes texts of one model."""

    def __init__(self, model: Path) -> None:
        self.dialect = Dialect(model)
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def text(self, task: str, seed: int) -> Text:
        """The held-out dialogue of `seed`."""
        dialogue = make(task, seed)
        case = self.dialect.of(dialogue, seed)
        prompt = self.dialect.prompt(dialogue)
        message = str(dialogue.messages[-2]["content"]).strip()
        question = message.split("\n")[-1]
        start = prompt.rindex(question)
        encoded = self.tokenizer.encode(prompt, add_special_tokens=False)
        assert tuple(encoded.ids) == case.prompt
        reply = self.tokenizer.encode(case.reply, add_special_tokens=False).ids
        tokens = (*case.prompt, *reply, self.dialect.ends[0])
        asked = start + len(question)
        told = _value_end(prompt[:start], question) if task == "ledger" else asked
        places: dict[Place, int] = {
            "body": sum(stop <= start for _, stop in encoded.offsets),
            "value": sum(begin < told for begin, _ in encoded.offsets),
            "question": sum(begin < asked for begin, _ in encoded.offsets),
            "reply": len(case.prompt),
        }
        return Text(tokens, places)


def _value_end(text: str, question: str) -> int:
    """Where the last value ends in `text` of the item that a question about a ledger names last."""
    asked = [w for w in re.findall(r"\w+", question) if re.search(rf"set {w} \d", text)]
    return [m.end() for m in re.finditer(rf"set {asked[-1]} \d+", text)][-1]


def handoffs(bench: Bench, texts: Iterable[Text], place: Place) -> list[Handoff]:
    """Each text folded up to a place."""
    return [Handoff.at(bench, t.tokens, t.places[place], t.reply) for t in texts]


def share_right(cases: Sequence[Handoff], fault: Fault) -> float:
    """The share of replies that stay right; each case's other sequence is the one before it."""
    right = [case.is_right(fault(case, cases[i - 1])) for i, case in enumerate(cases)]
    return sum(right) / len(right)


Table = dict[str, dict[str, float]]
"""Shares by fault and task."""


def measure(
    model: Path,
    tasks: Sequence[str] = TASKS,
    count: int = 40,
    *,
    rows: Sequence[tuple[str, Fault, Place]] = ROWS,
    place: Place | None = None,
    first_seed: int = 5000,
) -> Table:
    """The table of a model; `place` overrides where each hand-off is."""
    bench, speaker = Bench(model), Speaker(model)
    table: Table = {name: {} for name, _, _ in rows}
    for task in tasks:
        texts = [speaker.text(task, first_seed + i) for i in range(count)]
        made: dict[Place, list[Handoff]] = {}
        for name, fault, own in rows:
            where = place or own
            if where not in made:
                made[where] = handoffs(bench, texts, where)
            table[name][task] = share_right(made[where], fault)
    return table


def markdown(table: Table, place: Place | None = None) -> str:
    """The table as text; the share a gate forbids is marked."""
    where = {name: place or own for name, _, own in ROWS}
    limits = {(name, task): limit for name, task, limit in GATES}
    tasks = list(next(iter(table.values())))
    lines = [
        "| fault | place | " + " | ".join(tasks) + " |",
        "|---|---|" + "---|" * len(tasks),
    ]
    for name, shares in table.items():
        cells: list[Any] = [name, where[name]]
        for task, share in shares.items():
            limit = limits.get((name, task))
            mark = "" if limit is None else f" (≤ {limit}: {'yes' if share <= limit else 'NO'})"
            cells.append(f"{share:.2f}{mark}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
