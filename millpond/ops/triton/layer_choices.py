"""Tile sizes and warps of what stands between a layer's states: thin products and attention.

Knows no batch beyond whether it is small. What is here follows from registers and shared memory as
compiled for sm_90.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class ThinChoice:
    """A product of one token: a program's outputs, its steps along the inner axis."""

    outputs: int
    step: int
    warps: int
    stages: int


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


def experts_choice(picks: int, experts: int, dtype: torch.dtype) -> ExpertsChoice:
    """How `picks` choices among `experts` are multiplied.

    Both tiles give a choice the same bytes in 16 bits, whose products are the same instructions.
    Those of fp32 are not.
    """
    return FEW if dtype == torch.float32 or picks < CROWD * experts else MANY


@dataclass(frozen=True, slots=True)
class WideChoice:
    """A product of some dozens of tokens: a program's outputs, steps along the inner axis."""

    outputs: int
    step: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """Lines (queries by heads) of a program's block, and how single tokens are split."""

    lines: int
    chunk_warps: int
    chunk_stages: int
    single_warps: int
    single_stages: int
    split_tiles: int = 4  # of a split; twice as many from 8 splits on
    max_splits: int = 64  # beyond, splits are longer
    single_tile: int = 64  # positions that are folded at a time; a page's, or a part of one


GQA = AttentionChoice(128, 8, 3, 4, 3)
MLA = AttentionChoice(64, 8, 2, 8, 2)
"""Keys of 256, and latents of 512."""

FEW_OUTPUTS, OUTPUTS, PAIRS = (
    ThinChoice(8, 512, 4, 4),
    ThinChoice(16, 512, 4, 3),
    ThinChoice(8, 512, 2, 4),
)
"""Of one token: up to some thousands of outputs, more of them, and pairs for an activation."""

MANY_OUTPUTS = 8192

HEAD = WideChoice(128, 64, 4, 4)
"""Logits of up to so many tokens, which are fp32 in the end: one product, written once."""

HEAD_TOKENS = 64

FIRST_CAPABILITY = (9, 0)
"""Where these were measured (H200): at more than one token cuBLAS was ahead of them, but for
logits."""


@cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def thin_choice(x: torch.Tensor, weight: torch.Tensor, *, pairs: bool = False) -> ThinChoice | None:
    """How x [T, ...] meets weight [N, K] in a product of one token, or None: it should not.

    `pairs`: the halves of what comes out go into an activation.
    """
    if x.shape[0] != 1 or x.dtype != torch.bfloat16 or not _hopper(x.device):
        return None
    if pairs:
        return PAIRS
    return FEW_OUTPUTS if weight.shape[0] < MANY_OUTPUTS else OUTPUTS


def head_choice(x: torch.Tensor) -> WideChoice | None:
    """How x [T, K] becomes logits of some dozens of tokens, or None: through cuBLAS."""
    if x.shape[0] > HEAD_TOKENS or x.dtype != torch.bfloat16 or not _hopper(x.device):
        return None
    return HEAD


ROOMY = frozenset({(9, 0), (10, 0), (10, 3)})
"""Compute capabilities whose blocks may have the attention choices' shared memory: 200 KB or so."""


@cache
def attention_choice(choice: AttentionChoice, device: torch.device) -> AttentionChoice:
    """The choice on a device: fewer lines and nothing loaded ahead where memory is short."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) in ROOMY:
        return choice
    return small(choice)


def small(choice: AttentionChoice) -> AttentionChoice:
    """For blocks with less shared memory."""
    return replace(choice, lines=16, chunk_warps=4, chunk_stages=1, single_stages=1)
