"""Prompts that share prefixes and end on, before and after the grid; and how to continue."""

from __future__ import annotations

import random

from millpond.plan.sampling import SamplingParams
from tests.exactness.families import VOCAB


def _random_tokens(seed: int, count: int) -> tuple[int, ...]:
    drawn = random.Random(seed)
    return tuple(drawn.randrange(VOCAB - 1) for _ in range(count))


BASE = _random_tokens(1, 330)
OTHER = _random_tokens(2, 330)

PROMPTS = (
    BASE[:200],
    BASE[:130] + OTHER[:65],
    BASE[:64],
    BASE[:65],
    BASE[:127],
    BASE[:192],
    BASE[:64] + OTHER[:64],
    OTHER[:90],
    BASE[:320],
)

GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(
    max_tokens=5, temperature=1.0, top_p=0.9, seed=11, frequency_penalty=0.5, ignore_eos=True
)
TWO = SamplingParams(max_tokens=4, temperature=1.2, top_k=20, seed=2**40 + 5, n=2, ignore_eos=True)
"""Enough tokens to cross a page where a prompt ends just before one."""
