"""Matrices that act on every token of a batch: stacked projections, embedding, head.

Knows the names and shapes of its tensors in a checkpoint; does not know what the products mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from millpond.ops.bind import Bound


class TensorSource(Protocol):
    """Where a layer takes its tensors from; `millpond.models.weights.Weights` is one."""

    def under(self, key: str) -> TensorSource:
        """The tensors whose names go on with `key`."""

    def stored_dtype(self, name: str) -> torch.dtype:
        """What a tensor is stored in."""

    def take(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """One tensor, in the model's dtype unless told otherwise."""

    def take_rows(
        self,
        parts: Sequence[tuple[str, int]],
        rest: tuple[int, ...],
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Several tensors [rows, *rest], one below the other."""

    def take_experts(
        self, key: str, *, experts: int, hidden: int, inner: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """gate_up [E, 2 I, H] and down [E, H, I] of a mixture."""


class Linear:
    """x [T, in] -> [T, out]. Several checkpoint matrices of one input make one product."""

    def __init__(
        self,
        weights: TensorSource,
        parts: Sequence[tuple[str, int]],
        columns: int,
        ops: Bound,
    ) -> None:
        self.weight = weights.take_rows(parts, (columns,))
        self.sizes = tuple(rows for _, rows in parts)
        self.ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, self.weight)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One product, cut into the parts: [T, rows] each, views of its rows."""
        return tuple(self.ops.linear(x, self.weight).split(self.sizes, -1))

    def split_first(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        """As `split`, of the first `count` parts alone: only their rows are multiplied."""
        sizes = self.sizes[:count]
        return tuple(self.ops.linear(x, self.weight[: sum(sizes)]).split(sizes, -1))


class Embedding:
    """Token ids to vectors, and hidden vectors to logits; one matrix for both when tied."""

    def __init__(
        self,
        text: TensorSource,
        top: TensorSource,
        *,
        vocab: int,
        hidden: int,
        tied: bool,
        ops: Bound,
    ) -> None:
        self.table = text.take("embed_tokens.weight", (vocab, hidden))
        self.head = self.table if tied else top.take("lm_head.weight", (vocab, hidden))
        self.ops = ops

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, hidden]."""
        return self.ops.embedding(token_ids, self.table)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, hidden] -> [M, vocab] fp32, the product in the model's dtype."""
        return self.ops.linear(hidden, self.head).float()
