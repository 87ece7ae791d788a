"""Tile sizes and warps of what stands between a layer's states: thin products and attention.

Knows no batch beyond whether it is small. What is here follows from registers and shared memory as
compiled for sm_90.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class ThinChoice:
    """A product of few tokens: a program's outputs, its steps along the inner axis."""

    outputs: int = 16
    step: int = 256
    warps: int = 4
    stages: int = 4
    ahead: int = 1  # steps of the weights that are asked for before the inputs are there


@dataclass(frozen=True, slots=True)
class ExpertsChoice:
    """A grouped product: choices of one expert, middles or outputs, steps along the inner axis."""

    rows: int = 64
    middles: int = 64
    outputs: int = 64
    step: int = 64
    warps: int = 4
    stages: int = 4


FEW, MANY = ExpertsChoice(), ExpertsChoice(128, 64, 128, 64, 8, 3)

CROWD = 32
"""Choices of each expert, if all have as many, from which on blocks are of 128."""


def experts_choice(picks: int, experts: int) -> ExpertsChoice:
    """How `picks` choices among `experts` are multiplied; the steps of a sum are the same."""
    return FEW if picks < CROWD * experts else MANY


NARROW, WIDE = ThinChoice(), ThinChoice(outputs=64, step=128)

WIDE_ROWS = 64 * 132
"""From so many outputs on, tiles of 64 give each multiprocessor of a Hopper GPU one at least."""

THIN_TOKENS = 16
"""Products of at most so many tokens are thin."""

FIRST_CAPABILITY = (9, 0)
"""Where thin products were tried."""


@cache
def _thin(device: torch.device) -> bool:
    """Whether products of few tokens are worth a kernel of their own there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def thin_choice(x: torch.Tensor, weight: torch.Tensor) -> ThinChoice | None:
    """How x [T, ...] meets weight [N, K] in a thin product, or None: it should not."""
    if x.shape[0] > THIN_TOKENS or x.dtype != torch.bfloat16 or not _thin(x.device):
        return None
    return NARROW if weight.shape[0] < WIDE_ROWS else WIDE
