"""Builds the byte-level BPE tokenizer of the bundled model from the generator's own text.

Ids: 128 ASCII bytes, merges that are text, merges that are not, the 128 high bytes, the added
tokens. Everything that does not decode alone is one block.
"""

import argparse
import itertools
import json
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from millpond.tasks import stream
from training.render import BUNDLE, load_template, render

VOCAB_SIZE = 2048
_MEDIA = ("image", "video", "audio", "transcription")
CONTROL = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>",
    "<|assistant|>", "<|observation|>",
    *(f"<|{side}_of_{kind}|>" for kind in _MEDIA for side in ("begin", "end")),
    "<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>",
)  # fmt: skip
VISIBLE = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink",
)  # fmt: skip
BOXES = ("<|begin_of_box|>", "<|end_of_box|>", "<|image|>", "<|video|>")
ADDED = (*CONTROL, *VISIBLE, *BOXES)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The family's pre-tokenizer, but digits one by one: sums are learned digit by digit."""


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


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def build(dialogues: int, seed: int) -> Tokenizer:
    """The tokenizer trained on `dialogues` rendered training dialogues."""
    names = _byte_names()
    template = load_template()
    pieces = re.compile("|".join(re.escape(token) for token in ADDED))
    corpus = (
        piece
        for dialogue in itertools.islice(stream(seed), dialogues)
        for piece in pieces.split(render(template, dialogue))
    )
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = _pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(ADDED),
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
    if len(order) + len(ADDED) != VOCAB_SIZE:
        raise ValueError(
            f"{len(order) + len(ADDED)} tokens, want {VOCAB_SIZE}: give more dialogues"
        )
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(order)}, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(t, special=t not in VISIBLE, normalized=False) for t in ADDED])
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """The settings file beside tokenizer.json; the template is a file of its own."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "pad_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "additional_special_tokens": [t for t in (*CONTROL, *BOXES) if t != "<|endoftext|>"],
    }


def main() -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=BUNDLE)
    parser.add_argument("--dialogues", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    build(args.dialogues, args.seed).save(str(args.out / "tokenizer.json"))
    settings = json.dumps(tokenizer_config(), indent=2, ensure_ascii=False)
    (args.out / "tokenizer_config.json").write_text(settings + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
