"""Seats that drew a token: from where each goes on, and what its counters are then.

Knows positions, parities and which token a seat drew last; does not know how drafts are made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millpond.nn.counters import Counters
from millpond.ops.batch import Settled
from millpond.runtime.propose import Live


@dataclass(frozen=True, slots=True)
class Going:
    """n seats after a step: the newest token of each, and its state's place."""

    live: Live
    base: torch.Tensor  # [n] int64, end of the seat's slot
    pending: torch.Tensor  # [n] int64, drafts that were accepted and are not folded yet
    parity: torch.Tensor  # [n] int64, the ring bank that holds their inputs

    def counters(self, drafts: torch.Tensor) -> Counters:
        """What the seats' next step begins from, with drafts [n, K] to verify."""
        return Counters(
            base=self.base,
            pending=self.pending,
            first=self.live.token,
            num_drafts=torch.full_like(self.base, drafts.shape[1]),
            parity=self.parity,
            drafts=drafts,
        )

    def then(self, other: Going) -> Going:
        """These seats, then those."""
        a, b = self.live, other.live
        return Going(
            live=Live(
                seats=a.seats + b.seats,
                seat=torch.cat((a.seat, b.seat)),
                token=torch.cat((a.token, b.token)),
                position=torch.cat((a.position, b.position)),
                hidden=torch.cat((a.hidden, b.hidden)),
                ends=a.ends + b.ends,
            ),
            base=torch.cat((self.base, other.base)),
            pending=torch.cat((self.pending, other.pending)),
            parity=torch.cat((self.parity, other.parity)),
        )


def after_known(
    seats: tuple[int, ...],
    ends: tuple[int, ...],
    numbers: torch.Tensor,
    token: torch.Tensor,
    hidden: torch.Tensor,
) -> Going:
    """Seats that drew after known rows: token [n]; hidden [T, hidden].

    numbers [3, n] int64: the seats, where their tokens stand, and from which packed token each was
    drawn.
    """
    seat, position, source = numbers.unbind()
    none = torch.zeros_like(position)
    live = Live(
        seats=seats,
        seat=seat,
        token=token,
        position=position,
        hidden=hidden.index_select(0, source),
        ends=ends,
    )
    return Going(live, base=position, pending=none, parity=none)


def after_verify(
    seats: tuple[int, ...],
    ends: tuple[int, ...],
    seat: torch.Tensor,
    settled: Settled,
    hidden: torch.Tensor,
) -> Going:
    """Verify rows that drew at every place: seat [B]; hidden [B * (K + 1), hidden]."""
    live = Live(
        seats=seats,
        seat=seat,
        token=settled.token,
        position=settled.position,
        hidden=hidden.index_select(0, settled.source),
        ends=ends,
    )
    return Going(live, base=settled.base, pending=settled.accepted, parity=settled.parity)
