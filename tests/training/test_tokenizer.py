"""The bundled tokenizers: family names, exact round trips, undecodable ids in one block."""

import json
import unicodedata
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from training.family import FAMILIES, Family
from training.tokenizer import VOCAB_SIZE, build
from training.vocabulary import texts

TOKENIZERS = {
    name: Tokenizer.from_file(str(family.bundle / "tokenizer.json"))
    for name, family in FAMILIES.items()
}
both = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())


def read_back(family: Family, text: str) -> None:
    """Encoding and decoding gives the text again, in the family's normal form."""
    tokenizer = TOKENIZERS[family.name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    wanted = unicodedata.normalize("NFC", text) if family.alphabet.nfc else text
    assert tokenizer.decode(ids, skip_special_tokens=False) == wanted


@both
@given(text=st.text(max_size=60))
def test_any_text_survives_a_round_trip(family: Family, text: str) -> None:
    read_back(family, text)


@both
@pytest.mark.parametrize(
    "text", ["Zoë 小明 🌊🐟", "a\r\n\tb  c ", "\x00\x7f", "👩‍👩‍👧", "１２３ ١٢٣", "é" * 9]
)
def test_awkward_text_survives_a_round_trip(family: Family, text: str) -> None:
    read_back(family, text)


@both
def test_the_added_tokens_close_the_vocabulary_and_encode_as_one(family: Family) -> None:
    tokenizer, added = TOKENIZERS[family.name], family.alphabet.added
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    for place, token in enumerate(added):
        assert tokenizer.encode(token).ids == [VOCAB_SIZE - len(added) + place]


@both
def test_turn_tokens_are_skipped_in_text_and_tags_are_not(family: Family) -> None:
    tokenizer = TOKENIZERS[family.name]
    ids = [tokenizer.token_to_id(token) for token in family.alphabet.added]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(family.alphabet.visible)


@both
def test_ids_that_do_not_decode_alone_are_one_block(family: Family) -> None:
    tokenizer = TOKENIZERS[family.name]
    bad = [i for i in range(VOCAB_SIZE) if "�" in tokenizer.decode([i], skip_special_tokens=False)]
    assert bad == list(range(bad[0], bad[-1] + 1))
    assert len(bad) >= 128


@both
def test_digits_are_tokens_of_their_own(family: Family) -> None:
    assert len(TOKENIZERS[family.name].encode("1234567890").ids) == 10


def test_the_eos_ids_are_end_of_text_and_the_two_roles_that_end_a_reply() -> None:
    tokenizer, bundle = TOKENIZERS["glm"], FAMILIES["glm"].bundle
    want = [tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    config = json.loads((bundle / "config.json").read_text())
    generation = json.loads((bundle / "generation_config.json").read_text())
    assert config["text_config"]["eos_token_id"] == generation["eos_token_id"] == want
    assert config["text_config"]["pad_token_id"] == want[0]
    assert config["text_config"]["vocab_size"] == VOCAB_SIZE


def test_the_end_of_a_turn_stands_in_generation_config_alone_as_published() -> None:
    tokenizer, bundle = TOKENIZERS["qwen"], FAMILIES["qwen"].bundle
    text, turn = (tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_end|>"))
    config = json.loads((bundle / "config.json").read_text())
    generation = json.loads((bundle / "generation_config.json").read_text())
    assert config["text_config"]["eos_token_id"] == text
    assert generation["eos_token_id"] == [turn, text]
    assert config["text_config"]["vocab_size"] == VOCAB_SIZE


@both
def test_too_little_text_is_refused(family: Family) -> None:
    with pytest.raises(ValueError, match="more dialogues"):
        build(family.alphabet, islice(texts(family, 20, seed=0), 20))
