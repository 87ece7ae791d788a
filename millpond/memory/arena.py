"""The bytes of slots, pages and seats: one allocation each, and every layer's view of it.

Knows shapes, strides and devices; does not know who may touch an entry, nor why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from millpond.memory.host_ring import HostRing
from millpond.memory.layout import EntrySpec, ModelLayout, TensorSpec

NAN_BYTE = 0xFF
"""Repeated, this is a NaN in float32, bfloat16, float16 and float64 alike."""


class Arena:
    """`count` entries of `spec`, entry-major: `storage` is uint8 `[count, spec.num_bytes]`.

    One entry is one contiguous range of bytes, so that moving it is one transfer. Ids are never
    taken modulo `count`: one that is out of range raises. Ids go to the device by `ring`.
    """

    def __init__(
        self, spec: EntrySpec, count: int, device: torch.device, ring: HostRing | None = None
    ) -> None:
        self.spec = spec
        self.count = count
        self._ring = ring or HostRing(device)
        self.storage = _zero_bytes((count, spec.num_bytes), device)
        self._views = {
            (tensor.layer, tensor.name): self._view(tensor, offset)
            for tensor, offset in zip(spec.tensors, spec.offsets(), strict=True)
        }

    def view(self, layer: int, name: str) -> torch.Tensor:
        """One layer's tensor of every entry, `[count, *shape]`: a strided view, never a copy."""
        return self._views[layer, name]

    def _view(self, tensor: TensorSpec, offset: int) -> torch.Tensor:
        shape = (self.count, *tensor.shape)
        if not tensor.num_bytes:  # an empty range of bytes cannot be called anything else
            return torch.empty(shape, dtype=tensor.dtype, device=self.storage.device)
        part = self.storage[:, offset : offset + tensor.num_bytes]
        return part.view(tensor.dtype).view(shape)

    def has(self, layer: int, name: str) -> bool:
        """Whether an entry holds such a tensor."""
        return (layer, name) in self._views

    def fill_nan(self, ids: Sequence[int]) -> None:
        """Make every byte of these entries unreadable: floating point of any width reads NaN."""
        if ids:
            self.storage.index_fill_(0, self._index(ids), NAN_BYTE)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole entries, `sources[i]` to `targets[i]`; no target may also be a source."""
        if sources:
            self.storage[self._index(targets)] = self.storage[self._index(sources)]

    def _index(self, ids: Sequence[int]) -> torch.Tensor:
        if min(ids) < 0 or max(ids) >= self.count:
            raise IndexError(f"entry ids {sorted(ids)} are not all within 0..{self.count - 1}")
        return self._ring.integers(ids)


def _zero_bytes(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    if device.type == "cpu":  # calloc: memory is backed when it is first touched, not at start
        return torch.from_numpy(np.zeros(shape, dtype=np.uint8))
    return torch.zeros(shape, dtype=torch.uint8, device=device)


@dataclass(frozen=True, slots=True)
class Arenas:
    """All memory a model's forward reads and writes besides its weights."""

    slots: Arena
    pages: Arena
    seats: Arena

    @classmethod
    def allocate(
        cls,
        layout: ModelLayout,
        *,
        num_slots: int,
        num_pages: int,
        num_seats: int,
        device: torch.device,
        ring: HostRing | None = None,
    ) -> Arenas:
        """Three allocations; entries start as zero bytes."""
        ring = ring or HostRing(device)
        return cls(
            slots=Arena(layout.slot, num_slots, device, ring),
            pages=Arena(layout.page, num_pages, device, ring),
            seats=Arena(layout.seat, num_seats, device, ring),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the three allocations together."""
        return sum(a.storage.numel() for a in (self.slots, self.pages, self.seats))
