"""What messages say is text, also where it spells a control token; knows no template."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

Spans = tuple[tuple[int, int], ...]
"""(start, end) of places in a text, in order and apart."""


def any_of(words: Iterable[str], text: str) -> re.Pattern[str] | None:
    """Finds in `text` the first of several words, and of those that begin there the longest.

    None when it has none of them. Looking for each alone is quick, and lets other threads run in
    between; an expression of all of them would do neither on a long text full of their beginnings.
    """
    there = sorted((w for w in words if w and w in text), key=len, reverse=True)
    alike: dict[str, list[str]] = {}  # by how they begin, so that few are tried at a place
    for word in there:
        alike.setdefault(word[:2], []).append(re.escape(word[2:]))
    longest_first = sorted(alike, key=len, reverse=True)
    branches = (f"{re.escape(b)}(?:{'|'.join(alike[b])})" for b in longest_first)
    return re.compile("|".join(branches)) if there else None


class Controls:
    """The spellings of a tokenizer's control tokens; `markers` are those that an answer may hold.

    What an assistant has said is quoted with its markers (a template reads them, and they are the
    tokens that the model wrote); all other text is quoted without any.
    """

    def __init__(self, spellings: Iterable[str], markers: Iterable[str] = ()) -> None:
        self.every = frozenset(spellings)
        self.but_markers = self.every - frozenset(markers)


class Quotation:
    """The control tokens that one conversation spells, hidden while a template works on it.

    A template may cut, strip and join text as it likes; each spelling is one word that nobody can
    have written before.
    """

    def __init__(self, controls: Controls) -> None:
        self._controls = controls
        self._word = f"x{secrets.token_hex(8)}x"
        self._hidden: dict[str, int] = {}

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message whose texts spell no control token."""
        said = ("content", "reasoning_content") if message.get("role") == "assistant" else ()
        return {
            k: self._value(v, self._controls.but_markers if k in said else self._controls.every)
            for k, v in message.items()
        }

    def value(self, value: Any) -> Any:
        """Anything made of texts, lists and dictionaries, of which no text spells one."""
        return self._value(value, self._controls.every)

    def _value(self, value: Any, words: frozenset[str]) -> Any:
        if isinstance(value, str):
            spelling = any_of(words, value)
            return value if spelling is None else spelling.sub(self._hide, value)
        if isinstance(value, Mapping):
            return {self._value(k, words): self._value(v, words) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(v, words) for v in value]
        return value

    def _hide(self, found: re.Match[str]) -> str:
        # Equal texts stay equal: templates compare the ids of calls.
        return f"{self._word}{self._hidden.setdefault(found[0], len(self._hidden))}x"

    @cached_property
    def _spellings(self) -> list[str]:
        return list(self._hidden)

    def reveal(self, text: str) -> tuple[str, Spans]:
        """`text` as it was written, and where it spells control tokens that are none."""
        if not self._hidden:
            return text, ()
        made: list[str] = []
        spans: list[tuple[int, int]] = []
        length = at = 0
        for found in re.finditer(self._word + r"(\d+)x", text, re.IGNORECASE):
            spelled = self._spellings[int(found[1])]
            made += (text[at : found.start()], spelled)
            length += found.start() - at
            spans.append((length, length := length + len(spelled)))
            at = found.end()
        return "".join((*made, text[at:])), tuple(spans)
