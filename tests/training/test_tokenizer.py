"""The bundled tokenizer: family names, exact round trips, undecodable ids in one block."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from training.render import BUNDLE
from training.tokenizer import ADDED, VISIBLE, VOCAB_SIZE, build

TOKENIZER = Tokenizer.from_file(str(BUNDLE / "tokenizer.json"))


@given(st.text(max_size=60))
def test_any_text_survives_a_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text", ["Zoë 小明 🌊🐟", "a\r\n\tb  c ", "\x00\x7f", "👩‍👩‍👧", "１２３ ١٢٣", "é" * 9]
)
def test_awkward_text_survives_a_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_the_added_tokens_close_the_vocabulary_and_encode_as_one() -> None:
    assert TOKENIZER.get_vocab_size() == VOCAB_SIZE
    for place, token in enumerate(ADDED):
        assert TOKENIZER.encode(token).ids == [VOCAB_SIZE - len(ADDED) + place]


def test_turn_tokens_are_skipped_in_text_and_tags_are_not() -> None:
    ids = [TOKENIZER.token_to_id(token) for token in ADDED]
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "".join(VISIBLE)


def test_ids_that_do_not_decode_alone_are_one_block() -> None:
    bad = [i for i in range(VOCAB_SIZE) if "�" in TOKENIZER.decode([i], skip_special_tokens=False)]
    assert bad == list(range(bad[0], bad[-1] + 1))
    assert len(bad) >= 128


def test_digits_are_tokens_of_their_own() -> None:
    assert len(TOKENIZER.encode("1234567890").ids) == 10


def test_the_eos_ids_are_end_of_text_and_the_two_roles_that_end_a_reply() -> None:
    want = [TOKENIZER.token_to_id(t) for t in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    config = json.loads((BUNDLE / "config.json").read_text())
    generation = json.loads((BUNDLE / "generation_config.json").read_text())
    assert config["text_config"]["eos_token_id"] == generation["eos_token_id"] == want
    assert config["text_config"]["pad_token_id"] == want[0]
    assert config["text_config"]["vocab_size"] == VOCAB_SIZE


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="more dialogues"):
        build(20, seed=0)
