"""Who waits and who runs, in order, and how a sequence gets from one to the other.

Knows sequences and the ledger; plans nothing.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Collection
from operator import attrgetter

from millpond.engine.admission import could_fit, fits
from millpond.engine.holding import Anchors, Holds
from millpond.engine.ledger import Ledger
from millpond.engine.planned import PrefillRow
from millpond.engine.request import Sequence
from millpond.engine.sharing import SharedPrefixes
from millpond.engine.tiers import DeviceOnly
from millpond.engine.turns import Turns
from millpond.errors import Broken

logger = logging.getLogger(__name__)

_order = attrgetter("order")


class Queues:
    """Waiting and running sequences, both in order.

    First those that were overtaken too often, then higher priority, then older ones. A running
    sequence may push out any that comes after it; so the first one always advances.
    """

    def __init__(self, ledger: Ledger, anchors: Anchors) -> None:
        self.ledger = ledger
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.leaving: list[Sequence] = []  # run no longer, with a row in flight that holds them
        self.shared = SharedPrefixes()
        self.holds = Holds(ledger.counters, self.shared, anchors)
        self.turns = Turns(ledger.settings.max_overtakes)
        self.tiers = DeviceOnly()
        self._blocked: Sequence | None = None  # found no room, until anything is given back
        self._denied: Sequence | None = None  # found no room when it was last tried

    def enqueue(self, sequence: Sequence) -> None:
        """Let a sequence wait for admission."""
        self.shared.add(sequence)
        self.turns.came(sequence, len(self.waiting))
        insort(self.waiting, sequence, key=_order)

    def enter(self, sequence: Sequence) -> None:
        """Let a sequence that holds what it needs run."""
        insort(self.running, sequence, key=_order)

    def preempt(self, sequence: Sequence) -> None:
        """Take everything from a running sequence; it waits, and is recomputed."""
        self.running.remove(sequence)
        self._stopped(sequence)
        if not self._leaves(sequence):
            self._come_back(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that is over, wherever it is, and take back what it holds."""
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
        self._stopped(sequence)
        self.turns.done(sequence)
        self.holds.forget(sequence)
        self.tiers.left(sequence)
        if not self._leaves(sequence):
            self.ledger.vacate(sequence)
            self.unblock()

    def landed(self, sequence: Sequence) -> None:
        """The last row in flight of a sequence that leaves has ended: take back what it holds."""
        self.leaving.remove(sequence)
        sequence.is_leaving = False
        sequence.state.discard(self.ledger.pool)
        if sequence.finish_reason is None:
            self._come_back(sequence)
        else:
            self.ledger.vacate(sequence)
            self.unblock()

    def abandon(self) -> None:
        """Take everything from everyone, in whatever state an error has left it."""
        for sequence in (*self.running, *self.waiting, *self.leaving):
            try:
                sequence.state.discard(self.ledger.pool)
                self.ledger.vacate(sequence)
            except Broken:
                logger.exception("%s could not give back what it holds", sequence.name)
        self.running.clear()
        self.waiting.clear()
        self.leaving.clear()

    def _leaves(self, sequence: Sequence) -> bool:
        """Whether a sequence has to wait for a row in flight before it gives anything back."""
        if sequence.state.in_flight and not sequence.is_leaving:
            sequence.is_leaving = True
            self.leaving.append(sequence)
        lead = sequence.request.samples[0]  # in its row, siblings get what they go on from
        return sequence.is_leaving or (lead.is_leaving and sequence in lead.siblings)

    def _come_back(self, sequence: Sequence) -> None:
        self.ledger.vacate(sequence)
        logprobs = sequence.request.prompt_logprobs
        if logprobs is not None:
            logprobs.clear()
        self.enqueue(sequence)
        self.unblock()

    def reached(self, row: PrefillRow, published: Collection[int]) -> None:
        """A row of a prompt was committed, and the states it left at `published` can be found."""
        self.holds.reached(row, published)
        if row.end == row.sequence.prompt_len:
            self._stopped(row.sequence, folded=True)
            self.turns.done(row.sequence)

    def unblock(self) -> None:
        """Something was given back or became evictable: try who waits for room again."""
        self._blocked = None

    def _stopped(self, sequence: Sequence, *, folded: bool = False) -> None:
        """A sequence folds its prompt no longer, so nobody can wait for it."""
        self.holds.stopped(sequence)
        self.shared.discard(sequence, folded=folded)

    # Order. Between steps only: a plan relies on it.

    def _put_overdue_first(self) -> None:
        for sequence in self.turns.overdue():
            queue = next((q for q in (self.waiting, self.running) if sequence in q), None)
            if queue is not None:
                queue.remove(sequence)
            for one in sequence.group:
                one.go_first()
            if queue is not None:  # else it is leaving, and comes back in this order
                insort(queue, sequence, key=_order)
            self.unblock()

    @property
    def wants_way(self) -> bool:
        """Whether preempting lower priorities might make room for one that found none."""
        denied = self._denied
        if denied is None or not self.running or denied not in self.waiting:
            return False
        if not self.running[-1].outranked_by(denied):
            return False
        staying = [one for one in self.running if not one.outranked_by(denied)]
        return could_fit(self.ledger, denied, staying)

    def _make_way(self) -> None:
        """Push out lower priorities, the last first, for one that found no room beside them."""
        wants_way, denied, self._denied = self.wants_way, self._denied, None
        if denied is None or not wants_way:
            return
        lower = [one for one in self.running if one.outranked_by(denied)]
        while lower and not fits(self.ledger, denied, self.running):
            self._push_out(lower.pop())

    def _push_out_last(self, sequence: Sequence) -> bool:
        """Preempt the last running sequence, if it comes after this one."""
        last = self.running[-1]
        if last is sequence:
            return False
        self._push_out(last)
        return True

    def _push_out(self, sequence: Sequence) -> None:
        self.ledger.counters.preemptions += 1
        self.preempt(sequence)
