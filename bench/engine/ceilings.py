"""The least time that workloads of `q4` take on one H200: bytes at the rate of a copy, products at
that of a large one, both as measured there, nothing waited for and nothing computed twice.

Prompts and answers are counted one after the other; an engine that does both in one step can hide
some of the bytes behind the products, and be a little faster than this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COPY = 4.28e12  # bytes a second, read and written
PRODUCT = 679e12  # flops a second in bfloat16

BODY = 3.570e9  # parameters that every token goes through
WEIGHTS = 8.41e9  # bytes of a step, the head included, the draft layer not
STATE = 51.5e6  # bytes of one sequence's state, read and written in a step
CACHE = 32_768  # bytes of keys and values of a token
PER_PAIR = 4 * 16 * 256 * 8  # flops of a query and a position, in all attention layers
PER_STATE = 24 * 6 * 32 * 128 * 128  # flops of a token in all recurrent layers


def prompt_seconds(first: int, last: int) -> float:
    """To fold tokens `first .. last - 1` of one prompt."""
    pairs = (first + 1 + last) * (last - first) / 2
    flops = (2 * BODY + PER_STATE) * (last - first) + PER_PAIR * pairs
    return flops / PRODUCT


def step_seconds(rows: int, context: float) -> float:
    """One decode step of `rows` sequences that hold `context` tokens each."""
    return (WEIGHTS + rows * (2 * STATE + CACHE * context)) / COPY


def answer_seconds(rows: int, prompt: int, out: int) -> float:
    """All tokens of `rows` answers but the first ones, which come with the prompts."""
    return (out - 1) * step_seconds(rows, prompt + out / 2)


def least_seconds(workload: str, variant: str, asked: Mapping[str, Any]) -> float | None:
    """Wall clock of a repetition; None for what is not worked out here."""
    if workload == "D":
        return _conversations(asked, caching=variant == "on")
    if workload == "E":
        return prompt_seconds(0, asked["prompt"])
    if workload not in "ABC":
        return None
    rows, prompt, out = asked["requests"], asked["prompt"], asked["out"]
    shared = asked.get("shared", 0) if variant in ("on", "on, warm") else 0
    prompts = rows * prompt_seconds(shared, prompt)
    if variant == "on":
        prompts += prompt_seconds(0, shared)
    return prompts + answer_seconds(rows, prompt, out)


def _conversations(asked: Mapping[str, Any], caching: bool) -> float:
    rows, more, out = asked["conversations"], asked["more"], asked["out"]
    total, said = 0.0, 0
    for _ in range(asked["turns"]):
        end = said + more
        total += rows * prompt_seconds(said if caching else 0, end) + answer_seconds(rows, end, out)
        said = end + out
    return total
