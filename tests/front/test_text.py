"""Tokens to text and back, in pieces and at once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from millpond.errors import Rejected
from millpond.front.text import Detokenizer, StopStrings, Tokenizer
from tests.front.conftest import BUNDLED

TOKENIZER = Tokenizer(BUNDLED)
ORACLE = FastTokenizer.from_file(str(BUNDLED / "tokenizer.json"))
TOKENS = st.lists(st.integers(0, 2047), max_size=24)


@given(TOKENS, st.booleans())
def test_pieces_joined_are_what_the_tokenizer_library_decodes(tokens, skip):
    pieces = Detokenizer(TOKENIZER, skip_special_tokens=skip)
    text = "".join(pieces.push(t) for t in tokens) + pieces.finish()
    assert text == ORACLE.decode(tokens, skip_special_tokens=skip)
    assert text == TOKENIZER.decode(tokens, skip_special_tokens=skip)


@given(st.text(max_size=60))
def test_text_survives_the_way_through_tokens(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=False) == text


def test_no_piece_ends_inside_a_character():
    tokens = TOKENIZER.encode("漢字 😀 é")
    pieces = Detokenizer(TOKENIZER)
    texts = [pieces.push(t) for t in tokens]
    assert "�" not in "".join(texts)
    assert len(texts) > len([t for t in texts if t])  # some tokens had to be held back
    assert "".join(texts) == "漢字 😀 é"


def test_an_unfinished_character_shows_at_the_end_only():
    tokens = TOKENIZER.encode("😀")
    pieces = Detokenizer(TOKENIZER)
    assert [pieces.push(t) for t in tokens[:-1]] == [""] * (len(tokens) - 1)
    assert pieces.finish() == "�"


def test_a_lone_surrogate_is_refused_not_encoded():
    with pytest.raises(Rejected, match="Unicode"):
        TOKENIZER.encode("a\ud800b")


def split(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(c, len(text)) for c in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


ALPHABET = st.text(alphabet="ab\n<", max_size=12)


@given(ALPHABET, st.lists(ALPHABET, max_size=3), st.lists(st.integers(0, 12)))
@example("xab", ["ab", "b"], [1, 2])
def test_a_stop_string_is_found_alike_however_the_text_is_cut(text, stops, cuts):
    def run(pieces: list[str]) -> tuple[str, str | None]:
        finder = StopStrings(stops)
        out = "".join(finder.push(p) for p in pieces)
        return out + ("" if finder.matched is not None else finder.finish()), finder.matched

    whole, by_char = run([text]), run(list(text))
    assert run(split(text, cuts)) == whole == by_char
    out, matched = whole
    assert all(s not in out for s in stops if s)
    assert matched is not None or out == text
    assert matched is None or text.startswith(out + matched)


def test_text_that_may_begin_a_stop_string_is_held_back():
    finder = StopStrings(["</answer>"])
    assert finder.push("4</ans") == "4"
    assert finder.push("wers") == "</answers"
    assert finder.push("</answer>x") == ""
    assert finder.matched == "</answer>"


@settings(max_examples=20)
@given(TOKENS)
def test_token_texts_have_the_bytes_of_the_whole(tokens):
    data = b"".join(TOKENIZER.token_bytes(t) for t in tokens)
    assert data.decode("utf-8", "replace") == ORACLE.decode(tokens, skip_special_tokens=False)
