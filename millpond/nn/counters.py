"""What the device knows of every seat while it speculates: how far its state is, and its drafts.

Knows numbers of seats only; who proposes drafts, and who accepts them, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from millpond.memory.host_ring import HostRing
from millpond.ops.reference.staging import COUNTERS, keep_counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """The counters of n seats, int64. Token `first` stands at position `base + pending`."""

    base: torch.Tensor  # [n] end of the seat's slot
    pending: torch.Tensor  # [n] drafts accepted last time, not folded yet
    first: torch.Tensor  # [n] the certain token: the one drawn last
    num_drafts: torch.Tensor  # [n] how many of `drafts` there are
    parity: torch.Tensor  # [n] the ring bank that holds the pending drafts' inputs
    drafts: torch.Tensor  # [n, K] guesses for the positions after `first`

    @property
    def position(self) -> torch.Tensor:
        """Where `first` stands [n]."""
        return self.base + self.pending


class SeatCounters:
    """One table for all seats, as `millpond.ops.reference.staging` describes it.

    A negative seat means none: it reads zeros, its writes are lost. Everything stays at the same
    address and no call waits for the device.
    """

    def __init__(
        self,
        num_seats: int,
        num_drafts: int,
        device: torch.device,
        ring: HostRing | None = None,
        keep: Callable[..., None] = keep_counters,
    ) -> None:
        self.num_drafts = num_drafts
        self._keep = keep
        self._ring = ring or HostRing(device)
        # Rows as the fields of `Counters`: kernels want each of them contiguous by seat. The entry
        # before the last is where writes of no seat go, the last stays zero.
        shape = (COUNTERS + num_drafts, num_seats + 2)
        self.table = torch.zeros(shape, dtype=torch.int64, device=device)
        self._num_seats = num_seats

    def reset(self, seats: Sequence[int]) -> None:
        """Seats change hands: nothing is pending, nothing drafted."""
        if seats:
            self.table.index_fill_(1, self._ring.integers(seats), 0)

    def of(self, seats: torch.Tensor) -> Counters:
        """The counters of `seats` [n]."""
        rows = self.table.index_select(1, torch.where(seats < 0, self._num_seats + 1, seats))
        base, pending, first, num_drafts, parity = rows[:COUNTERS].unbind()
        return Counters(
            base=base,
            pending=pending,
            first=first,
            num_drafts=num_drafts,
            parity=parity,
            drafts=rows[COUNTERS:].T,
        )

    def put(self, seats: torch.Tensor, counters: Counters) -> None:
        """Write the counters of `seats` [n], each at most once."""
        c = counters
        self._keep(
            self.table,
            seats,
            base=c.base,
            pending=c.pending,
            first=c.first,
            num_drafts=c.num_drafts,
            parity=c.parity,
            drafts=c.drafts,
        )
