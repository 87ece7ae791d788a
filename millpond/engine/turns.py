"""Whose turn it is when priorities alone would let somebody wait for ever. Knows no pool.

Higher priority goes first, so without end of it lower priority would never run. Every request may
therefore be overtaken by a bounded number of admissions; then it goes ahead of everybody.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from millpond.engine.request import Sequence

LEAST_CROWDED = 64
"""Entries among which nobody looks for those that wait no longer."""


class Turns:
    """Counts admissions, and tells who has seen more of them than it must.

    A sequence that finds `q` others in the queue waits for at most `q + max_overtakes` admissions
    before it goes first, in its whole life: what it waited before a preemption counts, and so does
    the preemption. While its prompt is folded it still counts, for it may be short of budget.
    """

    def __init__(self, max_overtakes: int) -> None:
        self._max_overtakes = max_overtakes
        self._admitted = 0
        self._due: list[tuple[int, int, Sequence]] = []  # the earliest first
        self._arrivals = 0
        self._crowded = LEAST_CROWDED

    def came(self, sequence: Sequence, others: int) -> None:
        """A sequence waits, behind `others` at most."""
        if sequence.is_first or sequence.due is not None:
            return
        if sequence.patience is None:
            sequence.patience = self._max_overtakes + others
        else:
            sequence.patience = max(0, sequence.patience - 1)
        sequence.due = self._admitted + sequence.patience
        self._arrivals += 1
        heappush(self._due, (sequence.due, self._arrivals, sequence))
        if len(self._due) > self._crowded:  # those that are over may be most of them
            self._due = [entry for entry in self._due if entry[2].due == entry[0]]
            heapify(self._due)
            self._crowded = max(LEAST_CROWDED, 2 * len(self._due))

    def done(self, sequence: Sequence) -> None:
        """A sequence waits no longer: it has all it waited for, or is over."""
        if sequence.due is not None:
            sequence.patience = max(0, sequence.due - self._admitted)
            sequence.due = None

    def admitted(self) -> None:
        """Somebody was let in."""
        self._admitted += 1

    @property
    def is_due(self) -> bool:
        """Whether `overdue` may have somebody to name."""
        return bool(self._due) and self._due[0][0] <= self._admitted

    def overdue(self) -> list[Sequence]:
        """Those that go first from here on, by when they came."""
        found = []
        while self._due and self._due[0][0] <= self._admitted:
            due, _, sequence = heappop(self._due)
            if sequence.due == due:
                sequence.due = None
                found.append(sequence)
        return found
