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
    """A product of few tokens: a program's outputs, its steps along the inner axis."""

    outputs: int
    step: int
    warps: int
    stages: int
    ahead_bytes: int = 20 << 20  # of all weights, asked for before the inputs are there


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
    programs: int  # at least so many, if the inner axis can be split for it
    ahead_bytes: int = 20 << 20


WIDE, HEAD = WideChoice(64, 64, 4, 5, 160), WideChoice(128, 64, 4, 4, 1)
"""With some thousands of outputs, and with a vocabulary of them."""

MANY_OUTPUTS = 65536

WIDE_TOKENS = 0
"""Products of at most so many tokens, and more than `THIN_TOKENS`, are wide."""

HEAD_TOKENS = 64
"""The same of logits, which are fp32 in the end: a product by itself would be written twice."""


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """Lines (queries by heads) of a program's block, and how single tokens are split."""

    lines: int
    chunk_warps: int
    chunk_stages: int
    single_warps: int
    single_stages: int
    split_tiles: int = 2  # of a split; twice as many from 16 splits on
    max_splits: int = 64  # beyond, splits are longer


GQA = AttentionChoice(128, 8, 3, 4, 3)
MLA = AttentionChoice(64, 8, 2, 8, 2)
"""Keys of 256, and latents of 512."""

ONE, SOME = ThinChoice(16, 512, 4, 3), ThinChoice(4, 512, 4, 4)
"""Products of one or two tokens, and of more."""

SPARSE = ThinChoice(8, 512, 4, 4)
"""Products of one or two tokens with few outputs."""

SPARSE_OUTPUTS = 16 * 132 * 4
"""Fewer outputs than these leave a multiprocessor of a Hopper GPU less than four programs."""

THIN_TOKENS = 4
"""Products of at most so many tokens are thin."""

GATED_TOKENS = 4
"""Of those behind a gated norm, products of at most so many tokens take it along."""

FIRST_CAPABILITY = (9, 0)
"""Where thin products were tried."""


@cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def thin_choice(x: torch.Tensor, weight: torch.Tensor) -> ThinChoice | None:
    """How x [T, ...] meets weight [N, K] in a thin product, or None: it should not."""
    if x.shape[0] > THIN_TOKENS or x.dtype != torch.bfloat16 or not _hopper(x.device):
        return None
    if x.shape[0] > 2:
        return SOME
    return SPARSE if weight.shape[0] < SPARSE_OUTPUTS else ONE


def wide_choice(
    x: torch.Tensor, weight: torch.Tensor, most: int | None = None
) -> WideChoice | None:
    """How x [T, ...] meets weight [N, K] in a wide product, or None: it should not."""
    tokens, most = x.shape[0], WIDE_TOKENS if most is None else most
    if not THIN_TOKENS < tokens <= most or x.dtype != torch.bfloat16 or not _hopper(x.device):
        return None
    return HEAD if weight.shape[0] >= MANY_OUTPUTS else WIDE


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
