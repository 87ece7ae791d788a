"""Checkpoints along an answer: each sequence keeps its newest, in a slot that no row needs.

Knows sequences and the ledger; does not know the order of queues. A checkpoint here costs no row
anything: it is made when all rows have their slots, given up for whoever lacks one, and published
when its sample ends, for the next turn of the conversation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from millpond.engine.ledger import Ledger
from millpond.engine.request import Sequence
from millpond.plan.step import Export, Row, VerifyRow
from millpond.state.checkpoint import AnchorKind
from millpond.state.running import Exported


class AnswerAnchors:
    """Makes, keeps, gives up and publishes the checkpoints of running answers."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._step = ledger.settings.decode_anchor_step
        self._kept: int | None = None  # states kept, and planned to be; None: not counted yet

    # In a plan.

    def passes(self, start: int, end: int) -> bool:
        """Whether a row that folds tokens `start .. end - 1` overwrites a state worth keeping.

        That it starts from, or that it only passes; in its own output the state at `end` is safe.
        """
        return self._step > 0 and -start % self._step < end - start

    def next_after(self, start: int) -> int | None:
        """The first place after `start` where a state is worth keeping; None: nowhere."""
        return (start // self._step + 1) * self._step if self._step else None

    def _is_due(self, sequence: Sequence, start: int) -> bool:
        """Whether the state at `start`, which a planned row overwrites, is to be kept."""
        state = sequence.state
        return (
            start % self._step == 0
            and start > sequence.prompt_len
            and state.in_place
            and sequence.epoch == self._ledger.epoch
            and start not in state.exports
            and (state.anchor is None or state.anchor.end != start)
        )

    def plan(
        self,
        running: Collection[Sequence],
        decode: list[Sequence],
        rows: list[Row],
        due: list[int],
    ) -> None:
        """When all rows have their slots: what is left goes to the states that are to stay.

        `rows` belong to `decode`; those of `due` read such a state and get another output.
        """
        pool = self._ledger.pool
        self._kept = None
        for index in due:
            sequence, row = decode[index], rows[index]
            if self._is_due(sequence, row.start) and self._has_room(sequence, running):
                rows[index] = replace(row, state_out=sequence.state.keep_input(pool))

    def plan_live(
        self,
        running: Collection[Sequence],
        verify: list[Sequence],
        rows: list[VerifyRow],
        due: list[int],
    ) -> None:
        """The same for verify rows: one reads such a state, or exports it from what it folds."""
        pool = self._ledger.pool
        self._kept = None
        for index in due:
            sequence, row = verify[index], rows[index]
            inside = self.next_after(row.start)
            if self._is_due(sequence, row.start):
                if self._has_room(sequence, running):
                    rows[index] = replace(row, state_out=sequence.state.keep_input(pool))
            elif (
                inside is not None
                and inside < row.end
                and sequence.epoch == self._ledger.epoch
                and self._has_room(sequence, running)
            ):
                export = Export(inside, sequence.state.plan_export(pool, inside))
                rows[index] = replace(row, export=export)

    def _has_room(self, sequence: Sequence, running: Collection[Sequence]) -> bool:
        """Have a slot free: any, or that of its older anchor, or the least wanted checkpoint's.

        At most half of what checkpoints may hold is taken from those that can be found already.
        """
        pool, state = self._ledger.pool, sequence.state
        if not pool.num_free:
            state.drop_anchor(pool)
        if not pool.num_free:
            if self._kept is None:
                self._kept = sum(other.state.anchor is not None for other in running)
            if self._kept < self._ledger.settings.checkpoint_budget // 2:
                self._kept += self._ledger.evict_slot()
        if not pool.num_free:
            self._skip("no_slot")
        return pool.num_free > 0

    def _skip(self, why: str) -> None:
        self._ledger.counters.checkpoints_skipped[why] += 1

    # Making room.

    def give_up_one(self, running: Iterable[Sequence]) -> bool:
        """Free the slot of one kept state, of the first sequence that has any to give."""
        for sequence in running:
            if sequence.state.anchor is not None:
                sequence.state.drop_anchor(self._ledger.pool)
                self._skip("given_up")
                return True
        return False

    def forget(self, running: Iterable[Sequence]) -> None:
        """What was kept so far must not be found any more."""
        for sequence in running:
            sequence.state.drop_anchor(self._ledger.pool)

    # At commit.

    def committed(self, sequence: Sequence, row: VerifyRow, exported: Iterable[Exported]) -> None:
        """The anchor among what a verify row folded, if the report says it was written."""
        found = tuple(exported)
        if row.export is not None and row.export.end <= sequence.folded and not found:
            self._skip("unwritten")
        for export in found:
            if sequence.epoch == self._ledger.epoch:
                sequence.state.keep(self._ledger.pool, export)
            else:
                self._ledger.pool.release(export.lease)

    def publish(self, sequence: Sequence) -> None:
        """The sample ends: the next turn may start from its newest anchor.

        Not from its last state while a step in flight writes that: it goes on to tokens that the
        sample may not have.
        """
        ledger, state, end = self._ledger, sequence.state, sequence.folded
        if not self._step or sequence.epoch != ledger.epoch:
            return
        at_anchor = end > sequence.prompt_len and end % self._step == 0
        if at_anchor and state.slot is not None and not state.in_flight:
            ledger.publish(sequence, end, state.publish(ledger.pool), AnchorKind.DECODE)
            return
        anchor = state.take_anchor()
        if anchor is not None:
            ledger.publish(sequence, anchor.end, anchor.lease, AnchorKind.DECODE)
