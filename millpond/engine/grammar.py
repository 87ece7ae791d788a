"""Compiles constraints, in threads of their own, and keeps what was compiled.

Knows the tokenizer and the library that matches grammars; does not know requests. Whatever a user
wrote is judged here: what cannot be compiled is `Rejected`, in bounded time.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from millpond.engine.constraint import Constraint
from millpond.engine.schema_keywords import first_unknown
from millpond.errors import Rejected, Unavailable

Words = NDArray[np.int32]
"""A set of tokens: bit t % 32 of word t // 32."""

MAX_TEXT = 64 << 10
"""Characters of a constraint. What a schema costs grows with the square of its properties: as many
as fit are compiled within a second or two."""

MAX_PENDING = 256
"""Compilations that may wait; more callers are sent away rather than queued for minutes."""

LIMITS = LLParserLimits(
    max_lexer_states=50_000, max_items_in_row=20_000, step_max_items=200_000, verbose_errors=False
)
"""Bounds what one grammar may take. Each property that an object may lack is some items of a row:
the library's own limits end at 500 of them. Without verbose errors no user's text gets into logs.
"""

PROBE = 6
"""Tokens of an answer that are tried before a constraint is accepted."""

BLANKS = r"( ?|\r?\n[ \t]{0,64})"
"""Between the parts of JSON text: nothing, a space, or a new line with its indentation. Were there
no bound, a model that is not sure how to go on could write blanks until its tokens run out."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled constraint. `prototype` is only ever copied; `first` are its first tokens."""

    prototype: LLMatcher
    first: Words

    def matcher(self) -> LLMatcher:
        """A matcher at the beginning."""
        return self.prototype.deep_copy()


class Grammars:
    """Compiled constraints of one tokenizer. Thread-safe; nothing is loaded before the first.

    `eos_token_ids` are what ends an answer; `vocab_size` is the model's, padding included: tokens
    that the tokenizer lacks match nothing.
    """

    def __init__(
        self,
        tokenizer_json: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        *,
        num_workers: int = 2,
        num_kept: int = 64,
    ) -> None:
        self.vocab_size = vocab_size
        self._tokenizer_json = tokenizer_json
        self._eos = list(eos_token_ids)
        self._num_kept = num_kept
        self._kept: OrderedDict[Constraint, Future[Grammar]] = OrderedDict()
        self._pending = 0
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._pool = ThreadPoolExecutor(num_workers, "millpond-grammar")

    def prepare(self, constraint: Constraint) -> Future[Grammar]:
        """Compile, unless it was done before; returns at once. `Unavailable` when too many wait.

        The future raises `Rejected` for what cannot be compiled, or matches no text at all.
        """
        with self._lock:
            found = self._kept.get(constraint)
            if found is not None:
                self._kept.move_to_end(constraint)
                return found
            if self._pending >= MAX_PENDING:
                raise Unavailable(f"{self._pending} grammars wait to be compiled; try again later")
            try:
                made = self._pool.submit(self._compile, constraint)
            except RuntimeError:
                raise Unavailable("the engine is closing and compiles nothing more") from None
            self._pending += 1
            self._kept[constraint] = made
            while len(self._kept) > self._num_kept:
                self._kept.popitem(last=False)
        # Outside the lock: what is done already calls back at once.
        made.add_done_callback(lambda future: self._compiled(constraint, future))
        return made

    def close(self) -> None:
        """Let what is being compiled finish by itself; nothing new is."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, constraint: Constraint, future: Future[Grammar]) -> None:
        with self._lock:
            self._pending -= 1
            failed = future.cancelled() or future.exception() is not None
            if failed and self._kept.get(constraint) is future:
                del self._kept[constraint]

    def _compile(self, constraint: Constraint) -> Grammar:
        vocabulary = self._vocabulary()
        try:
            text = definition(constraint)
            prototype = LLMatcher(vocabulary, text, log_level=0, limits=LIMITS)
        except Rejected:
            raise
        except BaseException as error:  # a panic of the library is no `Exception`
            raise _refusal(constraint, str(error) or type(error).__name__) from error
        if prototype.is_error():
            raise _refusal(constraint, prototype.get_error())
        # The first mask is what all its answers begin with, and the dearest: the lexer is cold.
        first = np.zeros(num_words(self.vocab_size), np.int32)
        prototype.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)
        if prototype.is_error():
            raise _refusal(constraint, "no text matches it, or it is too complex")
        first.flags.writeable = False
        _try_out(constraint, prototype.deep_copy(), first)
        return Grammar(prototype, first)

    def _vocabulary(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(
                    str(self._tokenizer_json), n_vocab=self.vocab_size, eos_token=self._eos or None
                )
            return self._tokenizer


def definition(constraint: Constraint) -> str:
    """A constraint in the library's own terms. Raises `ValueError` or `Rejected`."""
    kind, text = constraint.kind, constraint.text
    if len(text) > MAX_TEXT:
        raise _refusal(constraint, f"it has {len(text)} characters, at most {MAX_TEXT} are read")
    if "\0" in text or not _is_unicode(text):
        raise _refusal(constraint, "it is not plain Unicode text")
    if kind == "json_object":
        return _schema('{"type": "object"}', strict=False)
    if kind == "json_schema":
        schema = json.loads(text)
        if schema is True:
            text = "{}"  # the same, as an object
        elif not isinstance(schema, dict):
            raise _refusal(constraint, "a JSON schema is an object that allows something")
        elif not constraint.strict and "json-schema.org/" not in str(schema.get("$schema")):
            # A dialect of somebody's own (OpenAPI has one) is read as JSON Schema.
            text = json.dumps({name: schema[name] for name in schema if name != "$schema"})
        unknown = first_unknown(schema) if constraint.strict else None
        if unknown is not None:
            raise _refusal(constraint, f"keyword {unknown!r} is not known, and strict is set")
        return _schema(text, strict=constraint.strict)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(_lark(text))
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices:
        raise _refusal(constraint, "choices are a list of strings, and not empty")
    if not all(isinstance(choice, str) and _is_unicode(choice) for choice in choices):
        raise _refusal(constraint, "choices are strings")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(c) for c in choices))


def num_words(vocab_size: int) -> int:
    """Words that hold a bit for each token."""
    return -(-vocab_size // 32)


def words_of(tokens: tuple[int, ...], vocab_size: int) -> Words:
    """The set of these tokens; ids outside the vocabulary are left out."""
    flags = np.zeros(32 * num_words(vocab_size), bool)
    flags[[token for token in tokens if 0 <= token < vocab_size]] = True
    return np.packbits(flags, bitorder="little").view(np.int32)


def all_words(vocab_size: int) -> Words:
    """The set of all tokens."""
    flags = np.arange(32 * num_words(vocab_size)) < vocab_size
    return np.packbits(flags, bitorder="little").view(np.int32)


def _try_out(constraint: Constraint, matcher: LLMatcher, first: Words) -> None:
    """Begin an answer: some limits are met by what follows the first token only."""
    words = first.copy()
    for _ in range(PROBE):
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if matcher.is_stopped() or not len(allowed):
            return
        matcher.consume_token(int(allowed[0]))
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise _refusal(constraint, f"it is too complex: {matcher.get_error()}")


def _schema(text: str, *, strict: bool) -> str:
    return LLMatcher.grammar_from_json_schema(
        text,
        overrides={
            "whitespace_pattern": BLANKS,
            "lenient": not strict,
            "coerce_one_of": not strict,
        },
    )


def _lark(text: str) -> str:
    """A grammar that is Lark as it stands, or GBNF."""
    if "::=" not in text:
        return text
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises nothing narrower
        raise ValueError(str(error)) from error


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refusal(constraint: Constraint, why: str) -> Rejected:
    why = " ".join(why.replace("<non-verbose/>", "").split())
    what = constraint.kind.replace("_", " ")
    return Rejected(
        f"the {what} cannot be used: {why[:400]}", param=constraint.param, code="invalid_grammar"
    )
