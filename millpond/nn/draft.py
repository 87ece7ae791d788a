"""The multi-token-prediction layer: one attending layer over pairs, as both families have it.

Knows how a pair becomes an entry and an entry a vector to draw from; does not know who draws. Entry
i is made from the final hidden of token i - 1 and the embedding of token i.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch

from millpond.nn.linear import Linear
from millpond.nn.residual import RMSNorm


class DraftMixer(Protocol):
    """An attention layer in the forms that drafting needs. `...` is what its family's layers take
    beside their input: rotation tables if it has them, the batch, the arenas.
    """

    @property
    def remember(self) -> Callable[..., None]:
        """(x [T, hidden], ...): write what a page keeps of every token, and no more."""

    @property
    def draft(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
        """(x [B, hidden], selected, ...) -> what is added to x, and `selected`: one entry a row.

        Its norm is the mixer's own."""


class PairLayer:
    """Plain residuals around a mixer and a feed-forward part; a norm at its end."""

    has_recurrent_state: ClassVar[bool] = False

    def __init__(
        self,
        *,
        embedding_norm: RMSNorm,
        hidden_norm: RMSNorm,
        fuse: Linear,
        mixer: DraftMixer,
        mlp: Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]],
        norm: RMSNorm,
    ) -> None:
        self.embedding_norm = embedding_norm
        self.hidden_norm = hidden_norm
        self.fuse = fuse
        self.mixer = mixer
        self.mlp = mlp
        self.norm = norm

    def remember(self, embedding: torch.Tensor, previous: torch.Tensor, *where: Any) -> None:
        """Write the entry of every token: its embedding and the hidden before it, [T, hidden]."""
        self.mixer.remember(self._fused(embedding, previous), *where)

    def __call__(
        self,
        embedding: torch.Tensor,
        previous: torch.Tensor,
        selected: torch.Tensor | None,
        *where: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One step of a chain of drafts: [B, hidden] twice -> n [B, hidden], and `selected`."""
        z = self._fused(embedding, previous)
        y, selected = self.mixer.draft(z, selected, *where)
        n, _ = self.norm.of_sum(*self.mlp(z, y))
        return n, selected

    def _fused(self, embedding: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        pair = (self.embedding_norm(embedding), self.hidden_norm(previous))
        return self.fuse(torch.cat(pair, -1))
