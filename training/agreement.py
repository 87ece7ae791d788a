"""Largest difference of a logit between the engine's model and transformers, in float32.

    python -m training.agreement --model millpond-tiny-glm --cases 8

Needs transformers. Held-out dialogues of every graded task, whole, in one chunked forward.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, logging

from millpond.front.directory import locate
from millpond.models.base import describe, load
from millpond.ops.bind import bind
from tests.support.batches import Bench
from tests.support.sensitivity import TASKS, Speaker


def difference(directory: Path, count: int) -> float:
    """Over all positions of `count` dialogues of each task."""
    logging.set_verbosity_error()
    oracle = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    description = describe(directory)
    cpu = torch.device("cpu")
    model = load(description, bind(cpu), dtype=torch.float32, device=cpu)
    layout, speaker = description.layout(torch.float32), Speaker(directory)
    worst = 0.0
    for task in TASKS:
        for seed in range(count):
            ids = list(speaker.text(task, 7000 + seed).tokens)
            bench = Bench(model, layout)
            with torch.inference_mode():
                expected = oracle(input_ids=torch.tensor([ids])).logits[0]
                (got,) = bench.logits([bench.row(0, 0, ids, None, 0)])
            worst = max(worst, float((got - expected).abs().max()))
    return worst


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--cases", type=int, default=8)
    args = parser.parse_args()
    print(f"largest logit difference: {difference(locate(args.model), args.cases):.1e}")


if __name__ == "__main__":
    main()
