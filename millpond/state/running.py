"""The slots one live request owns, and in which of them its next state may go. Knows no token.

A step is planned, then committed or discarded:

    plan_output, plan_export ...  --commit-->   the output is the current state, exports are sealed
                                  --discard-->  the step failed; an in-place output is lost with it
                                  --cancel-->   the step never ran; everything is as before

While it is in flight one more may be planned with `plan_ahead`: it starts from the output of the
first. `commit` is of the first, and leaves the other planned; `discard` and `cancel` are of both.

What a planned step reads and writes stays leased until then, whatever else happens meanwhile:
eviction, another request's exit, or the wish to close this one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from millpond.errors import Broken, LeaseError
from millpond.state.lease import ProducerLease, ReaderLease, SlotId
from millpond.state.pool import StatePool


class Exported(NamedTuple):
    """A state written inside a forward and sealed at commit; the caller owns the lease."""

    end: int
    lease: ReaderLease


class RunningState:
    """The leases of one running sequence.

    Its current state is one of: nothing (the zero state, end 0), a slot it may write, or a slot it
    reads together with others (a checkpoint, a fan-out). The next state goes in place where this
    request is the only holder, and to a fresh slot elsewhere. No state is ever copied.
    """

    __slots__ = ("_ahead", "_anchor", "_current", "_exports", "_exports_ahead", "_output", "holder")

    def __init__(self, holder: str) -> None:
        self.holder = holder
        self._current: ProducerLease | ReaderLease | None = None
        self._output: ProducerLease | None = None
        self._ahead: ProducerLease | None = None  # the output of the step after that one
        self._anchor: Exported | None = None  # an earlier state, kept for whoever comes after
        self._exports: list[tuple[int, ProducerLease]] = []
        self._exports_ahead: list[tuple[int, ProducerLease]] = []

    def start(self, lease: ReaderLease | None) -> None:
        """Begin at the state of `lease`, which now belongs here, or at the zero state.

        Raises `LeaseError` when the request still holds a state: close it first.
        """
        self._require_idle("start")
        if self._current is not None:
            raise LeaseError(f"{self.holder} starts while it holds slot {self._current.slot}")
        if lease is not None and not lease.live:
            raise LeaseError(f"{self.holder} starts from a spent lease on slot {lease.slot}")
        self._current = lease

    # Facts.

    @property
    def in_flight(self) -> bool:
        """Whether a step is planned and neither committed nor undone."""
        return self._output is not None or bool(self._exports)

    @property
    def is_ahead(self) -> bool:
        """Whether a second step is planned."""
        return self._ahead is not None

    @property
    def in_place(self) -> bool:
        """Whether the step planned last writes the slot it reads."""
        if self._ahead is not None:
            return self._ahead is self._output
        return self._output is not None and self._output is self._current

    @property
    def exports(self) -> tuple[int, ...]:
        """The ends of the states that planned steps export."""
        return tuple(end for end, _ in (*self._exports, *self._exports_ahead))

    @property
    def slot(self) -> SlotId | None:
        """The slot of the current state, None for the zero state."""
        return None if self._current is None else self._current.slot

    @property
    def anchor(self) -> Exported | None:
        """The earlier state that is kept, if one is."""
        return self._anchor

    @property
    def leases(self) -> tuple[ProducerLease | ReaderLease, ...]:
        """Every lease held: current, outputs, exports, anchor."""
        held: dict[int, ProducerLease | ReaderLease] = {}
        exports = (lease for _, lease in (*self._exports, *self._exports_ahead))
        anchor = None if self._anchor is None else self._anchor.lease
        for lease in (self._current, self._output, self._ahead, anchor, *exports):
            if lease is not None:
                held[id(lease)] = lease
        return tuple(held.values())

    def end(self, pool: StatePool) -> int:
        """Tokens folded into the current state."""
        return 0 if self._current is None else pool.end(self._current)

    # Plan.

    def plan_output(self, pool: StatePool) -> tuple[SlotId | None, SlotId]:
        """The slots (state_in, state_out) of the next step; equal when it runs in place.

        Raises `Exhausted` with nothing changed when a fresh slot is needed and none is free. If the
        current slot is also a checkpoint in the index, dropping that makes room: then this request
        is the only holder and continues in place.
        """
        if self._output is not None:
            raise LeaseError(f"{self.holder} plans a step while one is in flight")
        state_in = self.slot
        if isinstance(self._current, ReaderLease):
            # Reopening is a fact of the ledger, not of the step: it stays when the step is undone.
            self._current = pool.reopen(self._current) or self._current
        if isinstance(self._current, ProducerLease):
            self._output = self._current
        else:
            self._output = pool.take(self.holder)
        return state_in, self._output.slot

    def plan_ahead(self) -> SlotId:
        """Plan the step after the one in flight, in place: the slot it reads and writes."""
        if self._output is None or self._ahead is not None:
            flying = 0 if self._output is None else 2
            raise LeaseError(f"{self.holder} plans ahead of {flying} steps in flight")
        self._ahead = self._output
        return self._output.slot

    def plan_export(self, pool: StatePool, end: int) -> SlotId:
        """A fresh slot for the state at `end` inside the step planned last. Raises `Exhausted`."""
        exports = self._exports if self._ahead is None else self._exports_ahead
        if any(planned == end for planned, _ in exports):
            raise LeaseError(f"{self.holder} exports the state at {end} twice in one step")
        lease = pool.take(self.holder)
        exports.append((end, lease))
        return lease.slot

    def keep_input(self, pool: StatePool) -> SlotId:
        """Let the step planned last, in place, go to a fresh slot: what it starts from is kept.

        That becomes the anchor, at once or, where another step has yet to write it, when that one
        is committed. An older anchor goes first, and may leave its slot to the step. Raises
        `Exhausted`, with the step as it was planned, when no slot is free.
        """
        if self._ahead is not None and self.in_place:
            self.drop_anchor(pool)
            self._ahead = pool.take(self.holder)
            return self._ahead.slot
        if not self.in_place or not isinstance(self._current, ProducerLease):
            raise LeaseError(f"{self.holder} keeps a state that its next step does not overwrite")
        self.drop_anchor(pool)
        fresh = pool.take(self.holder)
        current = pool.seal(self._current)
        self._current, self._output = current, fresh
        self._anchor = Exported(pool.end(current), pool.share(current, self.holder))
        return fresh.slot

    # Then one of these three.

    def commit(
        self, pool: StatePool, end: int, written: Collection[tuple[SlotId, int]] = frozenset()
    ) -> tuple[Exported, ...]:
        """The first step ran: its output holds `end` tokens and is the current state from here on.

        `written` is the step's report, (slot, end) pairs. An export in it is sealed and returned,
        shallowest first, for the caller to index; one that is not gives its slot back.
        """
        output = self._output
        if output is None:
            raise LeaseError(f"{self.holder} commits a step that was not planned")
        if self._current is output:
            pool.record_end(output, end)
            if not self._exports and not self._exports_ahead:  # as nearly always
                ahead, self._ahead = self._ahead, None
                if ahead is None or ahead is output:
                    self._output = ahead
                    return ()
                self._ahead = ahead
        else:
            if end <= self.end(pool):
                raise Broken(f"{self.holder} commits end {end}, its state is at {self.end(pool)}")
            pool.record_end(output, end)
            if self._current is not None:
                pool.release(self._current)
            self._current = output
        exported = self._settle_exports(pool, written) if self._exports else ()
        self._output, self._ahead = self._ahead, None
        if self._output is not None:
            self._exports, self._exports_ahead = self._exports_ahead, self._exports
            if self._output is not output:  # what the other step starts from is kept
                self.drop_anchor(pool)
                self._current = pool.seal(output)
                self._anchor = Exported(end, pool.share(self._current, self.holder))
        return exported

    def _settle_exports(
        self, pool: StatePool, written: Collection[tuple[SlotId, int]]
    ) -> tuple[Exported, ...]:
        exported = []
        for export_end, lease in sorted(self._exports, key=lambda export: export[0]):
            if (lease.slot, export_end) in written:
                pool.record_end(lease, export_end)
                exported.append(Exported(export_end, pool.seal(lease)))
            else:
                pool.release(lease)
        self._exports.clear()
        return tuple(exported)

    def discard(self, pool: StatePool) -> None:
        """The step may have run, in part: nothing it wrote is kept, nor what came after it.

        After a step in place the old state is overwritten: the request is back at the zero state
        and must `start` again. Otherwise it still stands where it stood.
        """
        if self._output is self._current:
            self._current = None
        self._give_back(pool)

    def cancel(self, pool: StatePool) -> None:
        """The step was never given to the device: the current state stands."""
        if self._output is self._current:
            if self._ahead is self._output:
                self._ahead = None
            self._output = None
        self._give_back(pool)

    # Between steps.

    def publish(self, pool: StatePool, holder: str = "index") -> ReaderLease:
        """Fix the current state, and give `holder` a lease to read it; no byte moves.

        The request keeps reading it. Its next step goes to a fresh slot, or in place again once it
        is the only holder. `LeaseError` for the zero state, and while a step is in flight: what is
        being overwritten cannot be published.
        """
        return pool.share(self._sealed(pool, "publish"), holder)

    def keep(self, pool: StatePool, exported: Exported) -> None:
        """An exported state becomes the anchor, in place of an older one; a later one stays."""
        if self._anchor is not None and self._anchor.end >= exported.end:
            pool.release(exported.lease)
            return
        self.drop_anchor(pool)
        self._anchor = exported

    def take_anchor(self) -> Exported | None:
        """The anchor, if there is one; its lease belongs to the caller from here on."""
        anchor, self._anchor = self._anchor, None
        return anchor

    def drop_anchor(self, pool: StatePool) -> None:
        """Keep no earlier state."""
        anchor = self.take_anchor()
        if anchor is not None:
            pool.release(anchor.lease)

    def fan_out(self, pool: StatePool, n: int) -> list[RunningState]:
        """Fix the current state for `n` sequences in all; returns the n - 1 others.

        The last of them to move on writes in place. Nothing of it is findable.
        """
        if n < 1:
            raise ValueError(f"a fan-out to {n} sequences")
        lease = self._sealed(pool, "fan out")
        others = []
        for index in range(1, n):
            other = RunningState(f"{self.holder}/{index}")
            other.start(pool.share(lease, other.holder))
            others.append(other)
        return others

    def close(self, pool: StatePool) -> None:
        """Give up everything: finished, aborted or preempted. Closing twice is closing once.

        `LeaseError` while a step is in flight: commit, discard or cancel it first.
        """
        self._require_idle("close")
        self.drop_anchor(pool)
        if self._current is not None:
            pool.release(self._current)
            self._current = None

    def _sealed(self, pool: StatePool, what: str) -> ReaderLease:
        self._require_idle(what)
        if self._current is None:
            raise LeaseError(f"{self.holder} cannot {what} the zero state")
        if isinstance(self._current, ProducerLease):
            self._current = pool.seal(self._current)
        return self._current

    def _require_idle(self, what: str) -> None:
        if self.in_flight:
            raise LeaseError(f"{self.holder} cannot {what} while a step is in flight")

    def _give_back(self, pool: StatePool) -> None:
        if self._ahead is not None and self._ahead is not self._output:
            pool.release(self._ahead)
        if self._output is not None:
            pool.release(self._output)
        self._output = self._ahead = None
        for _, lease in (*self._exports, *self._exports_ahead):
            pool.release(lease)
        self._exports.clear()
        self._exports_ahead.clear()
