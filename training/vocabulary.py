"""Writes the tokenizer files of a bundled model from the generator's own text.

python -m training.vocabulary --family qwen
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from millpond.tasks import stream
from training import render, tokenizer
from training.family import FAMILIES, Family


def texts(family: Family, dialogues: int, seed: int) -> Iterator[str]:
    """The first dialogues of the training mixture through the family's template."""
    template = render.load_template(family.bundle / "chat_template.jinja")
    for dialogue in itertools.islice(stream(seed), dialogues):
        yield family.text(template, dialogue)


def main() -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--family", choices=tuple(FAMILIES), default="glm")
    parser.add_argument("--out", type=Path, help="the bundle by default")
    parser.add_argument("--dialogues", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    family = FAMILIES[args.family]
    out = args.out or family.bundle
    made = tokenizer.build(family.alphabet, texts(family, args.dialogues, args.seed))
    made.save(str(out / "tokenizer.json"))
    content = tokenizer.tokenizer_config(family.alphabet, family.eos)
    settings = json.dumps(content, indent=2, ensure_ascii=False)
    (out / "tokenizer_config.json").write_text(settings + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
