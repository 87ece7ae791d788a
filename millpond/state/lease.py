"""Who may touch a slot, and how: phases and leases. Knows no tensor and no request.

    FREE --take--> OPEN --seal--> SEALED --last release--> FREE
                   OPEN --release------------------------> FREE
                   OPEN <--reopen-- SEALED   only by its one remaining holder

Leases are made and spent by `StatePool` alone; holding one is the only way to name a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NewType

SlotId = NewType("SlotId", int)
PageId = NewType("PageId", int)
Seat = NewType("Seat", int)


class Phase(Enum):
    """The phase of one slot."""

    FREE = "free"
    OPEN = "open"  # one producer; content may change; not findable
    SEALED = "sealed"  # content fixed for ever; readers and transfers only
    QUARANTINED = "quarantined"  # an invariant broke here; never used again


@dataclass(eq=False, slots=True)
class Lease:
    """The right of `holder` to touch `slot` while `live`; `generation` dates the slot's tenancy."""

    slot: SlotId
    generation: int
    holder: str
    live: bool = True


class ProducerLease(Lease):
    """May write. Exactly one per open slot."""

    __slots__ = ()


class ReaderLease(Lease):
    """May read fixed content. Any number per sealed slot."""

    __slots__ = ()


class IoLease(Lease):
    """A transfer off the compute stream reads these bytes; ends when every rank is terminal."""

    __slots__ = ()
