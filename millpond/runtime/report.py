"""What a step tells the host, as one row of integers: one transfer, whatever is in it.

Knows types and shapes; does not know what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

Numbers = tuple[np.ndarray, ...]
"""Parts of a report on the host: int64, bool or float32, of the shapes they had on the device."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape and type of every part, in order."""

    parts: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor]) -> Layout:
        """That of these parts."""
        return cls(tuple((tuple(part.shape), part.dtype) for part in parts))

    def read(self, packed: np.ndarray) -> Numbers:
        """The parts again: packed uint8, the bytes of what `pack` made."""
        numbers, at, found = packed.view(np.int64), 0, []
        for shape, dtype in self.parts:
            end = at + int(np.prod(shape, dtype=np.int64))
            part = numbers[at:end].reshape(shape)
            if dtype == torch.float32:
                part = part.astype(np.int32).view(np.float32)
            elif dtype == torch.bool:
                part = part.astype(np.bool_)
            found.append(part)
            at = end
        return tuple(found)


def pack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Parts, int64, bool or float32, one after the other as int64 [n]."""
    return torch.cat([_integers(part).flatten() for part in parts])


def _integers(part: torch.Tensor) -> torch.Tensor:
    if part.dtype == torch.float32:
        return part.contiguous().view(torch.int32).long()
    return part.long()
