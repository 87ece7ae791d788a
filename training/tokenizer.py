"""Builds the byte-level BPE tokenizer of a bundled model from rendered dialogues.

Ids: 128 ASCII bytes, merges that are text, merges that are not, the 128 high bytes, the added
tokens. Everything that does not decode alone is one block.
"""

import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

VOCAB_SIZE = 2048


@dataclass(frozen=True, slots=True)
class Alphabet:
    """A family's added tokens, in the order of their ids, and how it cuts text before merging.

    `visible` tokens are not flagged special: decoding keeps them.
    """

    added: tuple[str, ...]
    visible: tuple[str, ...]
    split: str
    nfc: bool = False


_MEDIA = ("image", "video", "audio", "transcription")
_GLM_VISIBLE = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink",
)  # fmt: skip
GLM = Alphabet(
    added=(
        "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>",
        "<|user|>", "<|assistant|>", "<|observation|>",
        *(f"<|{side}_of_{kind}|>" for kind in _MEDIA for side in ("begin", "end")),
        "<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>",
        *_GLM_VISIBLE,
        "<|begin_of_box|>", "<|end_of_box|>", "<|image|>", "<|video|>",
    ),
    visible=_GLM_VISIBLE,
    split=(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)  # fmt: skip
"""The family's pre-tokenizer, but digits one by one: sums are learned digit by digit."""

_QWEN_TAGS = ("<tool_call>", "</tool_call>")
_QWEN_FILLS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
               "<|repo_name|>", "<|file_sep|>")  # fmt: skip
_QWEN_LATER = ("<tool_response>", "</tool_response>", "<think>", "</think>")
QWEN = Alphabet(
    added=(
        "<|endoftext|>", "<|im_start|>", "<|im_end|>",
        *(f"<|{kind}_{side}|>" for kind in ("object_ref", "box", "quad", "vision")
          for side in ("start", "end")),
        "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", *_QWEN_TAGS, *_QWEN_FILLS,
        *_QWEN_LATER,
        "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>",
        "<tts_text_bos_single>", "<|audio_pad|>",
    ),
    visible=(*_QWEN_TAGS, *_QWEN_FILLS, *_QWEN_LATER),
    split=(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    nfc=True,
)  # fmt: skip
"""The family's pre-tokenizer: digits one by one, combining marks with their letters."""


def _byte_names() -> dict[int, str]:
    """The printable stand-in of every byte in a byte-level vocabulary."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in kept}
    spare = itertools.count(256)
    return {byte: names.get(byte) or chr(next(spare)) for byte in range(256)}


def _decodes(token: str, values: dict[str, int]) -> bool:
    try:
        bytes(values[char] for char in token).decode()
    except UnicodeDecodeError:
        return False
    return True


def _pre_tokenizer(alphabet: Alphabet) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(alphabet.split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def build(alphabet: Alphabet, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer trained on rendered dialogues."""
    names, added = _byte_names(), alphabet.added
    pieces = re.compile("|".join(re.escape(token) for token in added))
    corpus = (piece for text in texts for piece in pieces.split(text))
    draft = Tokenizer(models.BPE())
    if alphabet.nfc:
        draft.normalizer = normalizers.NFC()
    draft.pre_tokenizer = _pre_tokenizer(alphabet)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(added),
        initial_alphabet=list(names.values()),
        show_progress=False,
    )
    draft.train_from_iterator(corpus, trainer)
    merges = [tuple(pair) for pair in json.loads(draft.to_str())["model"]["merges"]]
    values = {name: byte for byte, name in names.items()}
    joined = ["".join(pair) for pair in merges]
    order = [names[byte] for byte in range(128)]
    order += [token for token in joined if _decodes(token, values)]
    order += [token for token in joined if not _decodes(token, values)]
    order += [names[byte] for byte in range(128, 256)]
    if len(order) + len(added) != VOCAB_SIZE:
        raise ValueError(
            f"{len(order) + len(added)} tokens, want {VOCAB_SIZE}: give more dialogues"
        )
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(order)}, merges=merges))
    if alphabet.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(alphabet)
    tokenizer.decoder = decoders.ByteLevel()
    visible = alphabet.visible
    tokenizer.add_tokens([AddedToken(t, special=t not in visible, normalized=False) for t in added])
    return tokenizer


def tokenizer_config(alphabet: Alphabet, eos: str) -> dict[str, object]:
    """The settings file beside tokenizer.json; the template is a file of its own."""
    hidden = [t for t in alphabet.added if t not in alphabet.visible and t != "<|endoftext|>"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "pad_token": "<|endoftext|>",
        "eos_token": eos,
        "bos_token": None,
        "unk_token": None,
        "additional_special_tokens": hidden,
    }
