"""Matrices that act on every token of a batch: stacked projections, embedding, head.

Knows the names and shapes of its tensors in a checkpoint; does not know what the products mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

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


class Norm(Protocol):
    """A norm over the hidden size; `millpond.nn.residual.RMSNorm` is one."""

    weight: torch.Tensor
    eps: float
    zero_centred: ClassVar[bool]


class Linear:
    """x [T, in] -> [T, out]. Several checkpoint matrices of one input make one product."""

    def __init__(
        self,
        weights: TensorSource,
        parts: Sequence[tuple[str, int]],
        columns: int,
        ops: Bound,
        *,
        cut: Sequence[int] | None = None,
    ) -> None:
        """`cut`: the rows of each part that `split` gives, where those are not the matrices'."""
        self.weight = weights.take_rows(parts, (columns,))
        self.sizes = tuple(cut or (rows for _, rows in parts))
        self.ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, self.weight)

    def split(
        self, norm: Norm, x: torch.Tensor, y: torch.Tensor | None, count: int | None = None
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """One product with the norm of x + y (or of x), cut into the parts; and the sum.

        The parts are [T, rows] each, views of one row. With `count` the first parts alone: only
        their rows are multiplied.
        """
        sizes, weight = self.sizes, self.weight
        if count is not None:
            sizes = sizes[:count]
            weight = weight[: sum(sizes)]
        product, total = self.ops.norm_linear(
            x, y, norm.weight, weight, eps=norm.eps, zero_centred=norm.zero_centred
        )
        return product.split_with_sizes(sizes, -1), total


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
        return self.ops.linear_float(hidden, self.head)
