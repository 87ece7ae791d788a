"""Tile sizes and warps of every kernel: one set for any GPU, others only for a GPU by its name.

Knows no batch. A set under a GPU's name was measured on that GPU. The others follow from
registers and shared memory as compiled for sm_90.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import torch


@dataclass(frozen=True, slots=True)
class ConvChoice:
    """A program's tile of a prompt's convolution: of outputs, and of windows."""

    tokens: int = 32
    channels: int = 256
    warps: int = 2
    window_channels: int = 256
    window_warps: int = 2


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """A program's tile of the per-token delta rule; the bytes are the same for any `values`."""

    values: int = 16  # value channels of one head
    warps: int = 1
    verify_registers: int | None = 128  # a thread, of this tile: sixteen warps at a time


@dataclass(frozen=True, slots=True)
class ChunkChoice:
    """The chunk form: a program's part of a state, and how far ahead chunks are loaded."""

    values: int = 64  # value channels of one head, along the chunks
    warps: int = 4
    stages: int = 3
    prepare_warps: int = 4
    head_registers: int | None = 168  # a thread, decay by head: three programs at a time, no spills


@dataclass(frozen=True, slots=True)
class Choices:
    """Everything that may be tuned on one GPU."""

    conv: ConvChoice = ConvChoice()
    tokens: TokenChoice = TokenChoice()
    chunks: ChunkChoice = ChunkChoice()


DEFAULT = Choices()

SMALL = Choices(chunks=ChunkChoice(stages=1))
"""For GPUs whose blocks get less shared memory than `DEFAULT` takes, some 226 KB in bf16."""

ROOMY = frozenset({(9, 0), (10, 0), (10, 3)})
"""Compute capabilities whose blocks may have that much."""

MEASURED: MappingProxyType[str, Choices] = MappingProxyType(
    {
        "NVIDIA H200": Choices(
            conv=ConvChoice(tokens=32, channels=256, warps=2, window_channels=256, window_warps=2),
            tokens=TokenChoice(values=16, warps=1),
        ),
    }
)
"""By the name that CUDA gives the GPU."""


@cache
def _of_device(device: torch.device) -> Choices:
    if device.type != "cuda":
        return DEFAULT
    roomy = torch.cuda.get_device_capability(device) in ROOMY
    return MEASURED.get(torch.cuda.get_device_name(device), DEFAULT if roomy else SMALL)


def conv_choice(device: torch.device) -> ConvChoice:
    """What `conv_prefill` uses on `device`."""
    return _of_device(device).conv


def token_choice(device: torch.device) -> TokenChoice:
    """What `mix_decode` and `mix_verify` use on `device`."""
    return _of_device(device).tokens


def chunk_choice(device: torch.device) -> ChunkChoice:
    """What `delta_prefill` uses on `device`."""
    return _of_device(device).chunks
