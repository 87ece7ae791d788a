"""A packed batch: documents laid end to end in rows, flat over tokens.

Knows where documents start and what each position may see; knows no weights.
"""

from dataclasses import dataclass

import numpy as np
import torch

POOL = 4
NEAR = 4
"""Tokens a query of a `near` document may look back on, itself included."""


@dataclass(frozen=True, slots=True)
class Batch:
    """`N` tokens in rows of `row` tokens. Documents start at multiples of `POOL` in a row.

    ids, pos (index inside the document), doc (its number): [N] int64.
    starts: [M + 1] int32, token offsets of the documents in order, padded by repeating the end.
    near, reset: [N] bool; reset marks tokens whose state starts from nothing.
    target: [L] int64, positions of tokens to predict; weight: [L] float32 (0 is padding).
    """

    row: int
    ids: torch.Tensor
    pos: torch.Tensor
    doc: torch.Tensor
    starts: torch.Tensor
    near: torch.Tensor
    reset: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def from_arrays(cls, row: int, arrays: dict[str, np.ndarray], device: str) -> "Batch":
        """Moves the arrays of `training.data` to `device`."""
        return cls(row, **{k: torch.from_numpy(v).to(device) for k, v in arrays.items()})

    def mask(self) -> torch.Tensor:
        """[B, T, T] bool: same document, causal, and near only where asked."""
        doc, near = self.doc.view(-1, self.row), self.near.view(-1, self.row)
        place = torch.arange(self.row, device=doc.device)
        back = place[:, None] - place[None, :]
        same = doc[:, :, None] == doc[:, None, :]
        return same & (back >= 0) & ((back < NEAR) | ~near[:, :, None])
