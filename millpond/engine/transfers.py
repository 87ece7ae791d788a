"""What transfers hold of the ledger, from their beginning until every rank has reported.

Knows leases and pages; what is moved, why and when is not its business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from millpond.engine.ledger import Ledger, pages_for
from millpond.errors import Exhausted, LeaseError
from millpond.plan.step import Capabilities
from millpond.state.checkpoint import Checkpoint
from millpond.state.lease import IoLease, Lease, PageId, ProducerLease, SlotId
from millpond.state.pages import PageHandle
from millpond.store.memory import Parts

Spare = Callable[[Collection[SlotId], Collection[PageId]], object]
"""Told what a transfer is about to write, so that nothing else writes it as free memory."""


@dataclass(eq=False, slots=True)
class Holding:
    """A slot, and a reference on each page, shallowest first; of them `fresh` are to be filled."""

    lease: IoLease | ProducerLease
    pages: list[PageHandle]
    fresh: int = 0

    @property
    def parts(self) -> Parts:
        """What is moved: of a put everything, of a get what is fresh."""
        moved = self.pages[len(self.pages) - self.fresh :] if self.fresh else []
        if isinstance(self.lease, IoLease):
            moved = self.pages
        return Parts(self.lease.slot, tuple(handle.id for handle in moved))


class Transfers:
    """Holdings, within bounds that leave room for whoever runs.

    Of the slots, one for each running sequence and a spare stay out of their reach, so that a store
    that hangs takes no slot a request needs; of the pages, those of the longest session stay, or
    half of all where that is more than half.
    """

    def __init__(self, ledger: Ledger, capabilities: Capabilities, spare: Spare) -> None:
        settings = ledger.settings
        self._ledger = ledger
        self._spare = spare
        self._holdings: list[Holding] = []
        self._pages: Counter[PageId] = Counter()
        longest = pages_for(min(settings.session_len, capabilities.max_position))
        self.max_slots = max(0, ledger.pool.size - settings.max_batch_size - 1)
        self.max_pages = max(ledger.pages.size - longest, ledger.pages.size // 2)

    # Facts.

    @property
    def leases(self) -> list[Lease]:
        """All leases held."""
        return [one.lease for one in self._holdings]

    @property
    def page_runs(self) -> list[list[PageHandle]]:
        """All page references held."""
        return [one.pages for one in self._holdings]

    @property
    def num_slots(self) -> int:
        """Slots that somebody holds here."""
        return len({one.lease.slot for one in self._holdings})

    @property
    def num_slots_alone(self) -> int:
        """Of them, those that nobody else holds, as far as another thread can tell."""
        pool = self._ledger.pool
        slots = {one.lease.slot for one in tuple(self._holdings)}
        own = Counter(one.lease.slot for one in tuple(self._holdings))
        return sum(len(pool.leases(slot)) <= own[slot] for slot in slots)

    @property
    def num_pages(self) -> int:
        """Pages that somebody holds here."""
        return len(self._pages)

    def has_room(self, num_pages: int) -> bool:
        """Whether a transfer of a slot and so many pages stays within the bounds."""
        return self.num_slots < self.max_slots and self.num_pages + num_pages <= self.max_pages

    # Begin.

    def pin(self, checkpoint: Checkpoint, pages: Sequence[PageHandle], name: str) -> Holding:
        """Keep what a put reads: the checkpoint's slot and its pages."""
        self._ledger.pages.retain(pages)
        lease = self._ledger.pool.pin(checkpoint.lease, name)
        return self._keep(Holding(lease, list(pages)))

    def receive(
        self, known: Sequence[PageHandle], fresh: int, protect: Checkpoint | None, name: str
    ) -> Holding | None:
        """A slot and `fresh` pages to fill, and references on the pages `known`; None: no room.

        Checkpoints that nobody reads make way, all but `protect`.
        """
        ledger = self._ledger
        if ledger.settings.checkpoint_budget < 1:
            return None
        ledger.pages.retain(known)
        try:
            keep = frozenset(() if protect is None else (protect,))
            if not ledger.pool.num_free and not ledger.evict_slot(keep):
                raise Exhausted("no slot")
            ledger.evict_pages(fresh)
            taken = ledger.pages.take(fresh)
        except Exhausted:
            ledger.pages.release(known)
            return None
        lease = ledger.pool.take(name)
        self._spare((lease.slot,), [handle.id for handle in taken])
        return self._keep(Holding(lease, [*known, *taken], fresh))

    # End.

    def release(self, holding: Holding) -> None:
        """Every rank has reported: give back the slot and the pages."""
        self._forget(holding)
        self._ledger.pool.release(holding.lease)
        self._ledger.pages.release(holding.pages)

    def _keep(self, holding: Holding) -> Holding:
        self._holdings.append(holding)
        self._pages.update(handle.id for handle in holding.pages)
        return holding

    def _forget(self, holding: Holding) -> None:
        self._holdings.remove(holding)
        for handle in holding.pages:
            self._pages[handle.id] -= 1
            if not self._pages[handle.id]:
                del self._pages[handle.id]

    def hand_over(self, holding: Holding) -> ProducerLease:
        """A get worked: its slot is the caller's, who gives back the pages when it has used them.

        `LeaseError` for a put.
        """
        self._forget(holding)
        if not isinstance(holding.lease, ProducerLease):
            raise LeaseError(f"{holding.lease.holder} only read slot {holding.lease.slot}")
        return holding.lease
