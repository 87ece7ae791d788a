"""What one engine hands out (slots, pages, seats, prefixes) and how room is made in it.

Knows sequences as holders only; who may push out whom is the scheduler's business.
"""

from __future__ import annotations

from collections import abc

from millpond.engine.counters import Counters
from millpond.engine.rate import PrefillRate
from millpond.engine.request import NO_SEAT, Sequence
from millpond.engine.settings import EngineSettings
from millpond.plan.step import PAGE_SIZE, Capabilities, StepPlan
from millpond.state.checkpoint import AnchorKind, Checkpoint, prefix_salt
from millpond.state.lease import ReaderLease, Seat
from millpond.state.pages import PageHandle, PagePool
from millpond.state.pool import StatePool
from millpond.state.prefix import PrefixIndex


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE_SIZE)


class Ledger:
    """The pools of one engine and the epoch of what they hold. Used from one thread."""

    def __init__(self, settings: EngineSettings, capabilities: Capabilities) -> None:
        self.settings = settings
        self.pool = StatePool(capabilities.num_slots)
        self.pages = PagePool(capabilities.num_pages)
        self.prefill_rate = PrefillRate()
        self.index = PrefixIndex(
            self.pool,
            self.pages,
            PAGE_SIZE,
            alignment=settings.smallest_prefix(capabilities),
            seconds=self.prefill_rate.seconds,
            eviction_policy=settings.eviction_policy,
        )
        self.seats = [Seat(seat) for seat in reversed(range(settings.max_batch_size))]
        self.epoch = 0
        self.counters = Counters()
        self.on_publish: abc.Callable[[Checkpoint], object] = lambda checkpoint: None

    def salt(self, cache_salt: str) -> bytes:
        """Everything but the tokens that a key of this moment names."""
        return prefix_salt(
            epoch=self.epoch,
            model_identity=self.settings.model_identity,
            adapter="",
            cache_salt=cache_salt,
        )

    def measured(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long: what there is to save by keeping checkpoints follows from it."""
        tokens = sum(len(row.tokens) for row in plan.prefill)
        rows = len(plan.decode) + len(plan.verify)
        dearer = self.prefill_rate.observe(tokens, rows, seconds)
        if dearer != 1.0:
            self.index.order.reprice(dearer)

    # Making room.

    def evict_slot(self, protect: frozenset[Checkpoint] = frozenset()) -> bool:
        """Free the slot of a checkpoint that nobody reads; False when there is none."""
        if not self.index.evict_slot(protect):
            return False
        self.counters.checkpoints_evicted += 1
        return True

    def evict_pages(self, wanted: int) -> None:
        """Have `wanted` pages free if evicting what nobody reads can do it."""
        missing = wanted - self.pages.num_free
        if missing > 0:
            before = self.index.num_checkpoints
            self.index.evict_pages(missing)
            self.counters.checkpoints_evicted += before - self.index.num_checkpoints

    def drop_checkpoint_of(self, sequence: Sequence) -> bool:
        """Take the checkpoint a sequence stands on out of the index, if nobody else reads it.

        Then the sequence is the only holder and may go on in place.
        """
        slot = sequence.state.slot
        if slot is None or len(self.pool.holders(slot)) != 2:
            return False
        checkpoint = self.index.checkpoint_at(slot)
        if checkpoint is None:
            return False
        self.index.drop(checkpoint)
        self.counters.checkpoints_evicted += 1
        return True

    def forget_prefixes(self) -> bool:
        """Give up the whole index, when a lone sequence finds no page; False when it is empty.

        What is left in it then lies on the sequence's own path, and can hold a page of an earlier
        request beside the sequence's own one for the same tokens: leaf first, that is never free.
        """
        if not self.index.num_pages:
            return False
        self.counters.checkpoints_evicted += self.index.num_checkpoints
        self.index.clear()
        return True

    # Publishing.

    def publish(self, sequence: Sequence, end: int, lease: ReaderLease, kind: AnchorKind) -> None:
        """Make a committed state of `sequence` findable, within the budget of checkpoints."""
        if self.settings.checkpoint_budget < 1:
            self.pool.release(lease)
            self.counters.checkpoints_skipped["budget"] += 1
            return
        slot = lease.slot
        if self.index_state(sequence.tokens[:end], end, sequence.pages, lease, kind, sequence.salt):
            self.counters.checkpoints_published[kind.value] += 1
            published = self.index.checkpoint_at(slot)
            if published is not None:
                self.on_publish(published)

    def index_state(
        self,
        tokens: abc.Sequence[int],
        end: int,
        pages: list[PageHandle],
        lease: ReaderLease,
        kind: AnchorKind,
        salt: bytes,
    ) -> bool:
        """Make a sealed state findable, within the budget; False when there was one already."""
        slot = lease.slot
        if not self.index.publish(tokens, end, pages, lease, kind, salt):
            return False
        if self.index.num_checkpoints > self.settings.checkpoint_budget and not self.evict_slot():
            newest = self.index.checkpoint_at(slot)  # all others are being read
            if newest is not None:
                self.index.drop(newest)
                self.counters.checkpoints_evicted += 1
        return True

    # Giving back.

    def vacate(self, sequence: Sequence) -> None:
        """Take back everything a sequence and its siblings hold; no step of theirs is in flight."""
        for one in sequence.group:
            one.state.close(self.pool)
            self.pages.release(one.pages)
            one.pages = []
            one.folded = one.planned = 0
            if one.seat != NO_SEAT:
                self.seats.append(one.seat)
                one.seat = NO_SEAT
