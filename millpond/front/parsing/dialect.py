"""Which family's format a chat template writes, and how an answer in it is to be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from millpond.front.parsing import glm, qwen
from millpond.front.parsing.reader import (
    CALL,
    END_CALL,
    END_THINK,
    THINK,
    Call,
    CallSink,
    Reader,
    new_call_id,
)
from millpond.front.parsing.values import NONE, TEXT, Kinds, Tool
from millpond.front.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Family:
    """A way of writing reasoning and calls. Fields as of `Reader`; `call` is None without calls."""

    name: str
    markers: tuple[str, ...]
    trims: bool
    call: Callable[[CallSink], Call] | None
    untyped: Kinds = NONE


_BLOCK, _CALLS = (THINK, END_THINK), (CALL, END_CALL)
GLM = Family("glm", (*_BLOCK, *_CALLS, *glm.MARKERS), False, glm.GlmCall)
QWEN = Family("qwen", (*_BLOCK, *_CALLS), True, qwen.QwenCall, TEXT)
THINKING = Family("thinking", _BLOCK, True, None)


def family_of(template: str) -> Family | None:
    """The family whose format this template writes; None for one without reasoning and calls."""
    if glm.KEY in template and glm.VALUE in template:
        return GLM
    if qwen.FUNCTION in template and qwen.PARAMETER in template:
        return QWEN
    return THINKING if END_THINK in template else None


@dataclass(frozen=True, slots=True)
class Dialect:
    """A family's format in one model's tokens.

    `tokens` are its markers by id; `written` those that the tokenizer has no token for, which are
    found in text.
    """

    family: Family
    tokens: Mapping[int, str]
    written: tuple[str, ...]

    @classmethod
    def of(cls, template: str, tokenizer: Tokenizer | None) -> Dialect | None:
        """The dialect of a model; None for one without reasoning and calls."""
        family = family_of(template)
        if family is None:
            return None
        found = {m: tokenizer.token_id(m) if tokenizer else None for m in family.markers}
        tokens = {i: m for m, i in found.items() if i is not None}
        return cls(family, tokens, tuple(m for m, i in found.items() if i is None))

    def token(self, marker: str) -> int | None:
        """The id of a marker that has one."""
        return next((i for i, m in self.tokens.items() if m == marker), None)


@dataclass(frozen=True, slots=True)
class Reading:
    """How one answer is to be read; plain text where `dialect` is None.

    Calls are looked for only when there are `tools`. Not `parallel`: the answer ends with its first
    call.
    """

    dialect: Dialect | None = None
    in_reasoning: bool = False
    tools: tuple[Tool, ...] = ()
    parallel: bool = True

    @property
    def tokens(self) -> Mapping[int, str]:
        """Marker tokens, by id."""
        return self.dialect.tokens if self.dialect else {}

    def reader(self, new_id: Callable[[], str] = new_call_id) -> Reader:
        """A reader for one answer."""
        if self.dialect is None:
            return Reader(thinks=False, in_reasoning=False, trims=False)
        family = self.dialect.family
        return Reader(
            thinks=True,
            in_reasoning=self.in_reasoning,
            trims=family.trims,
            call=family.call if self.tools else None,
            tools=self.tools,
            untyped=family.untyped,
            written=self.dialect.written,
            new_id=new_id,
        )


PLAIN = Reading()
