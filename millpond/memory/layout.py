"""How many bytes a slot, a page and a seat take, and where each layer's tensors lie in them.

Knows shapes and dtypes; holds no memory. One slot is one contiguous range of bytes, one page
likewise; each layer's tensors are strided views of the arena.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

ALIGNMENT = 256
"""Bytes; every tensor starts on a multiple, so that any vector load is aligned."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of one layer inside one entry (slot, page or seat)."""

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes without padding."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class EntrySpec:
    """All tensors of one slot, page or seat, in the order of their bytes."""

    tensors: tuple[TensorSpec, ...]

    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each tensor within an entry."""
        at, found = 0, []
        for t in self.tensors:
            found.append(at)
            at += -(-t.num_bytes // ALIGNMENT) * ALIGNMENT
        return tuple(found)

    @property
    def num_bytes(self) -> int:
        """Bytes of one entry, padding included."""
        return sum(-(-t.num_bytes // ALIGNMENT) * ALIGNMENT for t in self.tensors)


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The three kinds of entries a model needs; computable from its configuration alone.

    slot  per linear layer `recurrent` [H, V, K] fp32 and `conv` [width - 1, channels] model dtype;
          once `boundary_hidden` [hidden] model dtype (layer -1): the target's final hidden at
          end - 1.
    page  per attention layer, the draft layer included: `key`/`value` [kv_heads, 64, D], or
          `latent` [64, C] and `pooled` [64 / pool, index_dim]; model dtype.
    seat  per indexed layer, the draft layer included: `tail` [R, 2, index_dim] raw keys and gates
          of the newest tokens, by position modulo R: the pool, or with K drafts the least multiple
          of it that is at least pool + K. With K drafts also, in two banks, the drafts that a step
          verifies as raw inputs: per linear layer `ring_conv` [2, K, channels], `ring_decay`
          [2, K, H] or [2, K, H, key_dim] and `ring_beta` [2, K, H]; once `ring_hidden`
          [2, K, hidden] (layer -1), their final hidden; model dtype.
    """

    slot: EntrySpec
    page: EntrySpec
    seat: EntrySpec
