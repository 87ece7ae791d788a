"""Checkpoints along an answer: each sequence keeps its newest, in a slot that nobody needs.

Knows sequences and the ledger; does not know the order of queues. A checkpoint here costs nobody
anything: it is made from what is free when all rows have their slots, given up for whoever lacks
one, and published when its sample ends, for the next turn of the conversation.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from millpond.engine.ledger import Ledger
from millpond.engine.planned import LiveRow
from millpond.engine.request import Sequence
from millpond.errors import Exhausted
from millpond.plan.step import Export, Row
from millpond.state.checkpoint import AnchorKind
from millpond.state.lease import SlotId
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
        self, decode: list[Sequence], rows: list[Row], due: list[int], verify: list[LiveRow]
    ) -> None:
        """When all rows have their slots: what is left goes to the states that are to stay.

        `rows` belong to `decode`; those of `due` read such a state and get another output. A row
        with drafts reads one, or exports one from among what it folds.
        """
        for index in due:
            slot = self._keep_input(decode[index])
            if slot is not None:
                rows[index] = replace(rows[index], state_out=slot)
        for live in verify:
            if self.is_due(live.sequence):
                slot = self._keep_input(live.sequence)
                live.state_out = live.state_out if slot is None else slot
            else:
                live.export = self._export(live.sequence)

    def _keep_input(self, sequence: Sequence) -> SlotId | None:
        try:
            return sequence.state.keep_input(self._ledger.pool)
        except Exhausted:
            self._skip("no_slot")
            return None

    def _export(self, sequence: Sequence) -> Export | None:
        pool, state, step = self._ledger.pool, sequence.state, self._step
        if not step or sequence.epoch != self._ledger.epoch:
            return None
        end = (sequence.folded // step + 1) * step
        if end >= len(sequence.tokens):
            return None
        if not pool.num_free:
            state.drop_anchor(pool)  # the older one
        if not pool.num_free:
            self._skip("no_slot")
            return None
        return Export(end, state.plan_export(pool, end))

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
