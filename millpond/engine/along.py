"""Checkpoints along an answer: each sequence keeps its newest, in a slot that no row needs.

Knows sequences and the ledger; does not know the order of queues. A checkpoint here costs no row
anything: it is made when all rows have their slots, given up for whoever lacks one, and published
when its sample ends, for the next turn of the conversation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from millpond.engine.ledger import Ledger
from millpond.engine.planned import LiveRow
from millpond.engine.request import Sequence
from millpond.plan.step import Export, Row
from millpond.state.checkpoint import AnchorKind
from millpond.state.running import Exported


class AnswerAnchors:
    """Makes, keeps, gives up and publishes the checkpoints of running answers."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._step = ledger.settings.decode_anchor_step

    # In a plan.

    def is_due(self, sequence: Sequence) -> bool:
        """Whether the planned row overwrites a state that is worth keeping."""
        start, step = sequence.folded, self._step
        return (
            step > 0
            and start % step == 0
            and start > sequence.prompt_len
            and sequence.state.in_place
            and sequence.epoch == self._ledger.epoch
        )

    def plan(
        self,
        running: Collection[Sequence],
        decode: list[Sequence],
        rows: list[Row],
        due: list[int],
        verify: list[LiveRow],
    ) -> None:
        """When all rows have their slots: what is left goes to the states that are to stay.

        `rows` belong to `decode`; those of `due` read such a state and get another output. A row
        with drafts reads one, or exports one from among what it folds.
        """
        pool = self._ledger.pool
        for index in due:
            sequence = decode[index]
            if self._has_room(sequence, running):
                rows[index] = replace(rows[index], state_out=sequence.state.keep_input(pool))
        for live in verify:
            sequence = live.sequence
            if self.is_due(sequence):
                if self._has_room(sequence, running):
                    live.state_out = sequence.state.keep_input(pool)
                continue
            end = self._inside(sequence)
            if end is not None and self._has_room(sequence, running):
                live.export = Export(end, sequence.state.plan_export(pool, end))

    def _inside(self, sequence: Sequence) -> int | None:
        """The anchor strictly between the state and the last known token, if there is one."""
        step = self._step
        if not step or sequence.epoch != self._ledger.epoch:
            return None
        end = (sequence.folded // step + 1) * step
        return end if end < len(sequence.tokens) else None

    def _has_room(self, sequence: Sequence, running: Collection[Sequence]) -> bool:
        """Have a slot free: any, or that of its older anchor, or the least wanted checkpoint's.

        At most half of what checkpoints may hold is taken from those that can be found already.
        """
        pool, state = self._ledger.pool, sequence.state
        if not pool.num_free:
            state.drop_anchor(pool)
        if not pool.num_free:
            kept = sum(other.state.anchor is not None for other in running)
            if kept < self._ledger.settings.checkpoint_budget // 2:
                self._ledger.evict_slot()
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

    def committed(self, live: LiveRow, exported: Iterable[Exported]) -> None:
        """The anchor among what a row with drafts folded, if the report says it was written."""
        found = tuple(exported)
        if live.export is not None and not found:
            self._skip("unwritten")
        for export in found:
            if live.sequence.epoch == self._ledger.epoch:
                live.sequence.state.keep(self._ledger.pool, export)
            else:
                self._ledger.pool.release(export.lease)

    def publish(self, sequence: Sequence) -> None:
        """The sample ends: the next turn may start from its newest anchor."""
        ledger, state, end = self._ledger, sequence.state, sequence.folded
        if not self._step or sequence.epoch != ledger.epoch:
            return
        if end > sequence.prompt_len and end % self._step == 0 and state.slot is not None:
            ledger.publish(sequence, end, state.publish(ledger.pool), AnchorKind.DECODE)
            return
        anchor = state.take_anchor()
        if anchor is not None:
            ledger.publish(sequence, anchor.end, anchor.lease, AnchorKind.DECODE)
