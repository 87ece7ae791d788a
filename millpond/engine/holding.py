"""Who is held back while another computes the beginning they share, for how long, and why no more.

A held sequence waits in the queue: it has no lease and no seat, and it names one running sequence,
its leader. Knows no pool; what ends a hold is told by those who see it happen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from time import monotonic

from millpond.engine.counters import Counters
from millpond.engine.planned import PrefillRow
from millpond.engine.request import Sequence
from millpond.engine.sharing import SharedPrefixes
from millpond.plan.checkpoints import Anchor
from millpond.plan.step import PAGE_SIZE

Anchors = Callable[[Sequence, int, int], tuple[Anchor, ...]]
"""The anchors a running sequence will reach in `start < anchor <= end`, now or in rows to come."""


@dataclass(slots=True)
class Hold:
    """`leader` will publish its state at `anchor`; starting there saves `saves` tokens."""

    leader: Sequence
    anchor: int
    saves: int
    offered: int  # tokens the sequence could have folded in the step under way
    since: float = field(default_factory=monotonic)

    @property
    def cost(self) -> int:
        """Of the step under way, in tokens."""
        return max(self.offered, PAGE_SIZE)


class Holds:
    """The holds of one engine.

    A hold ends when its anchor was published, reported unwritten or skipped; when the leader stops
    running; when no older key matches any more; and when waiting has cost as much as computing. Its
    cost is counted in tokens: what the sequence could have folded in the steps it sat out, and a
    page at least for each, so that no hold is without end; the step after the one in flight that
    computes the anchor is not counted. After a hold in vain the next one goes on counting.
    """

    def __init__(self, counters: Counters, shared: SharedPrefixes, anchors: Anchors) -> None:
        self._counters = counters
        self._shared = shared
        self._anchors = anchors
        self._held: dict[Sequence, Hold] = {}
        self._followers: dict[Sequence, list[Sequence]] = {}
        self._spent: dict[Sequence, int] = {}
        self._seconds: dict[Sequence, float] = {}

    def __len__(self) -> int:
        return len(self._held)

    def items(self) -> list[tuple[Sequence, Hold]]:
        """Who is held, and how: for checks."""
        return list(self._held.items())

    # Of a sequence that waits.

    def begin(self, sequence: Sequence, start: int, offered: int) -> bool:
        """Hold a sequence that could start at `start` and fold `offered` tokens in this step.

        False when nobody that runs is about to publish more of its prompt than it has already, at
        no later moment than it could compute that itself. Nobody waits for a lower priority.
        """
        spent = self._spent.get(sequence, 0)
        for leader, shared in self._shared.ahead(sequence):
            if shared - start <= spent:
                return False  # nor will anyone who shares less be worth it
            if not _may_lead(leader, sequence, start):
                continue
            anchors = self._anchors(leader, leader.folded, shared)
            if not anchors or anchors[-1].end - start <= spent:
                continue
            anchor = anchors[-1].end
            self._held[sequence] = Hold(leader, anchor, anchor - start, offered)
            self._followers.setdefault(leader, []).append(sequence)
            return True
        return False

    def goes_on(self, sequence: Sequence, offered: int) -> bool:
        """Whether a sequence is held in this step too, in which it could fold `offered` tokens."""
        hold = self._held.get(sequence)
        if hold is None:
            return False
        if hold.anchor <= hold.leader.planned:
            return True  # it is being computed, in a step in flight
        if self._spent.get(sequence, 0) + hold.cost >= hold.saves:
            self._end(sequence, "cost")
            return False
        self._spent[sequence] = self._spent.get(sequence, 0) + hold.cost
        hold.offered = offered
        return True

    def forget(self, sequence: Sequence) -> float:
        """A sequence waits no longer, whatever for; the seconds it was held, in all."""
        if sequence in self._held:
            self._end(sequence, "left")
        self._spent.pop(sequence, None)
        return self._seconds.pop(sequence, 0.0)

    # Of a leader.

    def reached(self, row: PrefillRow, published: Collection[int]) -> None:
        """The row of a leader was committed; the states it left at the ends `published` are found.

        Whoever waits for an anchor in the row waits no longer.
        """
        for sequence in tuple(self._followers.get(row.sequence, ())):
            anchor = self._held[sequence].anchor
            if anchor <= row.end:
                lost = "unwritten" if anchor in row.exports or anchor == row.end else "skipped"
                self._end(sequence, "published" if anchor in published else lost)

    def stopped(self, leader: Sequence) -> None:
        """A sequence that may lead does not run any more."""
        for sequence in tuple(self._followers.get(leader, ())):
            self._end(sequence, "leader_stopped")

    def clear(self) -> None:
        """What is being computed will not be found: a new epoch has begun."""
        for sequence in tuple(self._held):
            self._end(sequence, "epoch")

    def _end(self, sequence: Sequence, why: str) -> None:
        hold = self._held.pop(sequence)
        if why == "published":
            self._spent.pop(sequence, None)
        else:
            self._spent[sequence] = self._spent.get(sequence, 0) + hold.cost
        followers = self._followers[hold.leader]
        followers.remove(sequence)
        if not followers:
            del self._followers[hold.leader]
        seconds = monotonic() - hold.since
        self._seconds[sequence] = self._seconds.get(sequence, 0.0) + seconds
        self._counters.holds[why] += 1
        self._counters.held_seconds += seconds


def _may_lead(leader: Sequence, sequence: Sequence, start: int) -> bool:
    """Whether a sequence may wait for another: never for a lower priority, nor for one behind."""
    lower = leader.request.spec.priority < sequence.request.spec.priority
    return not lower and leader.planned >= start
