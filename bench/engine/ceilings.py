"""The least time that workloads of `q4` and `g8` take on one H200: bytes at the rate of a copy,
products at that of a large one, both as measured there, nothing waited for, nothing computed twice.

Prompts and answers are counted one after the other; an engine that does both in one step can hide
some of the bytes behind the products, and be a little faster than this. Experts are read by tokens
that choose them at random; a forced draft repeats a token, and is taken to choose as it did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.engine.traffic import COLD_EVERY

COPY = 4.28e12  # bytes a second, read and written
PRODUCT = 679e12  # flops a second in bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a model moves and multiplies, in bfloat16; states and their sums in fp32."""

    body: float  # parameters that every token goes through, the head not among them
    weights: float  # bytes of a step, the head included, experts and the draft layer not
    head: float  # bytes
    draft: float  # bytes of the draft layer, its experts not among them
    state: float  # bytes of one sequence's state, read and written in a step
    cache: float  # bytes that are kept of a token
    seen: float = float("inf")  # tokens of the past that one attends to at most
    per_pair: float  # flops of a query and a position, in all attention layers
    per_state: float  # flops of a token in all recurrent layers
    expert: float = 0.0  # bytes of one
    experts: int = 1
    top_k: int = 0
    mixtures: int = 0  # layers with experts, the draft layer not among them

    def experts_read(self, tokens: int) -> float:
        """Bytes of the experts of one layer that some of `tokens` choose."""
        if not self.mixtures:
            return 0.0
        return self.expert * self.experts * (1 - (1 - self.top_k / self.experts) ** tokens)


Q4 = Costs(
    body=3.570e9,
    weights=8.41e9,
    head=1.271e9,
    draft=0.242e9,
    state=51.5e6,
    cache=32_768,
    per_pair=4 * 16 * 256 * 8,
    per_state=24 * 6 * 32 * 128 * 128,
)
G8 = Costs(
    body=2.674e9,
    weights=4.703e9,
    head=1.269e9,
    draft=0.372e9,
    state=26.1e6,
    cache=2 * (1024 + 64),
    seen=2048 + 4,
    per_pair=4 * 64 * 512 * 2,
    per_state=6 * 6 * 64 * 128 * 128,
    expert=50.33e6,
    experts=288,
    top_k=8,
    mixtures=5,
)
COSTS = {"q4": Q4, "g8": G8}


def prompt_seconds(first: int, last: int, of: Costs = Q4) -> float:
    """To fold tokens `first .. last - 1` of one prompt."""
    whole = min(last, max(first, of.seen))  # up to which every token sees all before it
    pairs = (first + 1 + whole) * (whole - first) / 2
    if whole < last:
        pairs += of.seen * (last - whole)
    flops = (2 * of.body + of.per_state) * (last - first) + of.per_pair * pairs
    return flops / PRODUCT


def step_seconds(rows: int, context: float, drafts: int = 0, of: Costs = Q4) -> float:
    """One step of `rows` sequences that hold `context` tokens each, and make `drafts`."""
    past = of.cache * min(context, of.seen)
    own = of.weights + of.mixtures * of.experts_read(rows) + rows * (2 * of.state + past)
    draft = of.draft + of.head + of.experts_read(rows)
    return (own + drafts * draft) / COPY


def tokens_a_step(drafts: int, chance: float) -> float:
    """That a row draws, if a draft is right with `chance` once those before it were."""
    return 1 + sum(chance**place for place in range(1, drafts + 1))


def answer_seconds(
    rows: int, prompt: int, out: int, drafts: int = 0, chance: float = 0.0, of: Costs = Q4
) -> float:
    """All tokens of `rows` answers but the first ones, which come with the prompts."""
    steps = (out - 1) / tokens_a_step(drafts, chance)
    return steps * step_seconds(rows, prompt + out / 2, drafts, of)


def least_seconds(
    workload: str, variant: str, asked: Mapping[str, Any], of: Costs = Q4
) -> float | None:
    """Wall clock of a repetition; None for what is not worked out here."""
    if workload == "D":
        return _conversations(asked, variant == "on", of)
    if workload == "E":
        return prompt_seconds(0, asked["prompt"], of)
    if workload not in "ABCFGI" or not {"requests", "prompt", "out"} <= set(asked):
        return None
    rows, prompt, out = asked["requests"], asked["prompt"], asked["out"]
    hits = "on" in variant.replace(",", " ").split() and "no hits" not in variant
    shared = asked.get("shared", 0) if hits else 0
    sharing = rows - rows // COLD_EVERY if workload == "I" else rows
    prompts = sharing * prompt_seconds(shared, prompt, of)
    prompts += (rows - sharing) * prompt_seconds(0, prompt, of)
    if "warm" not in variant:
        prompts += prompt_seconds(0, shared, of)
    samples, drafts = rows * asked.get("n", 1), asked.get("drafts") or 0
    return prompts + answer_seconds(samples, prompt, out, drafts, asked.get("chance") or 0.0, of)


def _conversations(asked: Mapping[str, Any], caching: bool, of: Costs) -> float:
    rows, more, out = asked["conversations"], asked["more"], asked["out"]
    total, said = 0.0, 0
    for _ in range(asked["turns"]):
        end = said + more
        total += rows * prompt_seconds(said if caching else 0, end, of)
        total += answer_seconds(rows, end, out, of=of)
        said = end + out
    return total
