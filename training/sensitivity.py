"""Damages a cached state or KV at the last question and counts the answers that stay right.

    python -m training.sensitivity --cases 60

Needs transformers; runs on the bundled files, on the CPU, in float32.
"""

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, Glm5NextForConditionalGeneration

from millpond.tasks import Dialogue, make
from training.render import BUNDLE, Encoder, render

Cache = Any


class Case:
    """A dialogue cut at its last question or right before the reply, with the cache up to there."""

    def __init__(self, model: Any, encoder: Encoder, dialogue: Dialogue, late: bool) -> None:
        text = render(encoder.template, dialogue)
        question = str(dialogue.messages[-2]["content"]).split("\n")[-1]
        encoding = encoder.tokenizer.encode(text, add_special_tokens=False)
        place = text.rfind(question)
        cut = next(i for i, (_, stop) in enumerate(encoding.offsets) if stop > place)
        sample = encoder(dialogue)
        self.model, self.ids = model, torch.tensor(sample.ids, dtype=torch.long)[None]
        learned = sample.learn.nonzero()[0]
        self.first = int(learned[learned >= cut][0])
        self.cut = self.first - 1 if late else cut
        self.cache = self.run(self.cut)

    @torch.no_grad()
    def run(self, stop: int, cache: Cache | None = None, start: int = 0) -> Cache:
        """The cache after tokens start..stop, continued from `cache`."""
        cache = DynamicCache(config=self.model.config) if cache is None else copy.deepcopy(cache)
        self.model(input_ids=self.ids[:, start:stop], past_key_values=cache, use_cache=True)
        return cache

    @torch.no_grad()
    def right(self, cache: Cache) -> bool:
        """Whether the reply that follows from `cache` is right in every token."""
        rest = self.ids[:, self.cut :]
        logits = self.model(
            input_ids=rest, past_key_values=copy.deepcopy(cache), use_cache=True
        ).logits
        at = self.first - self.cut
        return bool((logits[0, at - 1 : -1].argmax(-1) == rest[0, at:]).all())


def linear(cache: Cache) -> list[Any]:
    """The layers that hold a recurrent state."""
    return [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]


def with_state(case: Case, other: Cache, conv: bool) -> Cache:
    """The case's cache with the recurrent state, and if asked the convolutions, of another."""
    cache = copy.deepcopy(case.cache)
    for mine, theirs in zip(linear(cache), linear(other), strict=True):
        mine.recurrent_states[0].copy_(theirs.recurrent_states[0])
        if conv:
            mine.conv_states[0].copy_(theirs.conv_states[0])
    return cache


def zero_state(case: Case, other: Case) -> Cache:
    """State emptied, convolutions right."""
    cache = copy.deepcopy(case.cache)
    for layer in linear(cache):
        layer.recurrent_states[0].zero_()
    return cache


def swapped_state(case: Case, other: Case) -> Cache:
    """State of another sequence, convolutions right."""
    return with_state(case, other.cache, conv=False)


def old_state(case: Case, other: Case) -> Cache:
    """State two tokens old, convolutions right."""
    return with_state(case, case.run(case.cut - 2), conv=False)


def missed_rollback(case: Case, other: Case) -> Cache:
    """State and convolutions one foreign token ahead."""
    ahead = copy.deepcopy(case.cache)
    with torch.no_grad():
        case.model(input_ids=other.ids[:, 20:21], past_key_values=ahead, use_cache=True)
    return with_state(case, ahead, conv=True)


def zero_kv(case: Case, other: Case) -> Cache:
    """Latents emptied."""
    cache = copy.deepcopy(case.cache)
    for layer in cache.layers:
        if layer not in linear(cache):
            layer.keys.zero_()
    return cache


def swapped_kv(case: Case, other: Case) -> Cache:
    """Latents of another sequence, repeated if it is shorter."""
    cache = copy.deepcopy(case.cache)
    for layer, theirs in zip(cache.layers, other.cache.layers, strict=True):
        if layer not in linear(cache):
            wanted = layer.keys.shape[-2]
            times = -(-wanted // theirs.keys.shape[-2])
            layer.keys.copy_(theirs.keys.repeat(1, 1, times, 1)[:, :, :wanted])
    return cache


FAULTS: dict[str, Callable[[Case, Case], Cache]] = {
    "none": lambda case, other: case.cache,
    "state zeroed": zero_state,
    "state swapped": swapped_state,
    "state two tokens old": old_state,
    "missed rollback": missed_rollback,
    "KV zeroed": zero_kv,
    "KV swapped": swapped_kv,
}


def main() -> None:
    """Prints the share of right answers for every task and fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=BUNDLE)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--late", action="store_true", help="hand over right before the reply")
    parser.add_argument("--tasks", nargs="+", default=["ledger", "recall", "copy"])
    args = parser.parse_args()
    model = Glm5NextForConditionalGeneration.from_pretrained(args.model, dtype=torch.float32).eval()
    encoder = Encoder(args.model)
    print(f"{'':22}" + "".join(f"{task:>10}" for task in args.tasks))
    shares: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    for task in args.tasks:
        cases = [
            Case(model, encoder, make(task, 5000 + seed), args.late) for seed in range(args.cases)
        ]
        for fault, damage in FAULTS.items():
            good = [c.right(damage(c, cases[i - 1])) for i, c in enumerate(cases)]
            shares[fault].append(sum(good) / len(good))
    for fault, row in shares.items():
        print(f"{fault:22}" + "".join(f"{share:10.2f}" for share in row))


if __name__ == "__main__":
    main()
