"""Text to token ids and back, piece by piece; knows one model's tokenizer, nothing of chats."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from millpond.errors import Refused, Rejected
from millpond.front.verbatim import Spans, any_of


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model's directory; `Refused` names the file otherwise."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise Refused(f"cannot read {path}: not a JSON object")
    return found


def _byte_of_char() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE: one character per byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(plain)]
    table = {chr(b): b for b in plain}
    return table | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _keeps_bytes(raw: Mapping[str, Any]) -> bool:
    """Whether all bytes of a text are in its tokens: nothing is normalised, stripped or dropped."""
    before = raw.get("pre_tokenizer") or {}
    parts = before.get("pretokenizers", [before])
    return (
        raw.get("normalizer") is None
        and raw.get("truncation") is None
        and all(p.get("type") in ("Split", "ByteLevel", "Digits") for p in parts)
        and all(p.get("behavior") != "Removed" for p in parts)
        and not any(t.get("lstrip") or t.get("rstrip") for t in raw.get("added_tokens") or ())
    )


class Tokenizer:
    """A byte-level BPE tokenizer read from `tokenizer.json` and `tokenizer_config.json`."""

    def __init__(self, directory: Path) -> None:
        raw = read_json(directory / "tokenizer.json")
        decoder = raw.get("decoder") or {}
        kinds = [d.get("type") for d in decoder.get("decoders", [decoder])]
        if "ByteLevel" not in kinds:
            raise Refused(f"{directory}: tokenizer decoder {kinds} is not byte-level BPE")
        try:
            self._fast = FastTokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the library raises nothing narrower
            raise Refused(f"cannot read {directory / 'tokenizer.json'}: {error}") from error
        self.config = read_json(directory / "tokenizer_config.json")
        self.added = dict(self._fast.get_added_tokens_decoder())
        self.special = frozenset(i for i, t in self.added.items() if t.special)
        self.vocab_size = self._fast.get_vocab_size(with_added_tokens=True)
        self._directory = directory
        self._bytes: dict[int, bytes] = {}
        self._keeps_bytes = _keeps_bytes(raw)
        self._longest: int | None = None

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `text` certainly has, found without tokenising it.

        No token stands for more bytes than the longest one of the vocabulary. 0 where the
        tokenizer may drop or rewrite some of the text.
        """
        if not self._keeps_bytes:
            return 0
        if self._longest is None:
            self._longest = max(len(self.token_bytes(t)) for t in range(self.vocab_size))
        return -(-len(text.encode("utf-8", "replace")) // self._longest)

    def refuse_hopeless(self, text: str, limit: int) -> None:
        """Raise `Rejected` for text that must be more than `limit` tokens, before tokenising it."""
        fewest = self.fewest_tokens(text)
        if fewest > limit:
            raise Rejected(
                f"the prompt has at least {fewest} tokens, the longest that can be served has "
                f"{limit}; shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )

    def named(self, key: str) -> str | None:
        """The text of `eos_token`, `bos_token` and the like, or None."""
        value = self.config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else None

    def token_id(self, text: str) -> int | None:
        """The id of exactly this token, or None."""
        return self._fast.token_to_id(text)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, verbatim: Spans = ()
    ) -> list[int]:
        """Token ids of `text`; added tokens written out in it are recognised.

        Not so at the places `verbatim`, which are read as any other text is (and
        `add_special_tokens` is false then). Raises `Rejected` for text that is not valid Unicode
        (a lone surrogate).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise Rejected("the text is not valid Unicode", code="invalid_unicode") from error
        # A batch of one: only the call for batches lets other threads run meanwhile, the engine's
        # and the server's among them.
        # The fast form leaves out which characters a token came from.
        if not verbatim:
            return self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
                0
            ].ids
        made: list[int] = []
        for part, plain in self._parts(text, verbatim):
            reader = self._without_added if plain else self._fast
            made += reader.encode_batch_fast([part], add_special_tokens=False)[0].ids
        return made

    @cached_property
    def _without_added(self) -> FastTokenizer:
        """The same vocabulary and merges, to which no text is an added token."""
        raw = read_json(self._directory / "tokenizer.json") | {"added_tokens": []}
        return FastTokenizer.from_str(json.dumps(raw))

    def _parts(self, text: str, verbatim: Spans) -> Iterator[tuple[str, bool]]:
        """(part, whether it spells added tokens without being any) of `text`, in order.

        Cut at added tokens only, where the tokenizer itself cuts before anything else.
        """
        done = begin = 0  # up to where all is told; where the run between two added tokens begins
        waiting = iter((*verbatim, (len(text), len(text))))
        spelled, _ = next(waiting)
        for start, end in (*self._added_in(text, verbatim), (len(text), len(text))):
            if spelled < start:
                if done < begin:
                    yield text[done:begin], False
                yield text[begin:start], True
                done = start
                while spelled < start:
                    spelled, _ = next(waiting)
            begin = end
        if done < len(text):
            yield text[done:], False

    def _added_in(self, text: str, verbatim: Spans) -> Iterator[tuple[int, int]]:
        """Where `text` has added tokens outside of `verbatim`."""
        spelling = any_of((t.content for t in self.added.values()), text)
        if spelling is None:
            return
        at = 0
        for start, end in (*verbatim, (len(text), len(text))):
            for found in spelling.finditer(text, at, start):
                yield found.span()
            at = end

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for; none for an id outside the vocabulary."""
        found = self._bytes.get(token)
        if found is None:
            text = self._fast.id_to_token(token) or ""
            if token in self.added:
                found = text.encode()
            else:
                found = bytes(_BYTE_OF_CHAR[c] for c in text)
            self._bytes[token] = found
        return found

    def token_text(self, token: int) -> str:
        """One token as text; a piece of a character shows as a replacement character."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `tokens`; invalid UTF-8 becomes replacement characters."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return "".join([*(detokenizer.push(t) for t in tokens), detokenizer.finish()])


class Detokenizer:
    """Tokens in, text out, never half a character; all pieces together equal the whole."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that became certain with this token; may be empty."""
        if token in self._skip:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What was held back: an unfinished character, as a replacement character."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Finds the first of several strings in a stream, whatever the pieces are.

    Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(s for s in stops if s))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text certainly before any stop string; sets `matched` when one is complete."""
        if not self._stops or self.matched is not None:
            return "" if self.matched is not None else text
        text = self._held + text
        hits = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if hits:  # the one that is complete first, so that pieces do not matter
            _, at, self.matched = min(hits)
            self._held = ""
            return text[:at]
        keep = max(overlap(text, s) for s in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker` and is not all of it."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0
