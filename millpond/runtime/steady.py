"""Steps of live rows alone, as recordings: a forward, and a tail that draws, accepts and drafts.

Knows which addresses they read; does not know how they are recorded. A recording is of a number of
rows of up to so many pages: fewer are filled up with rows of no seat, which read and write nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from millpond.errors import Broken
from millpond.memory.arena import Arenas
from millpond.models.base import Model
from millpond.nn.batch import LIVE_FIELDS, Staging, pack_live
from millpond.ops.batch import VerifyRows
from millpond.ops.bind import Bound
from millpond.plan.step import PAGE_SIZE, StepPlan, VerifyRow
from millpond.runtime.going import after_verify
from millpond.runtime.graphs import (
    Capturer,
    Recorded,
    Tensors,
    bucket_sizes,
    least_with_room,
    reach_sizes,
)
from millpond.runtime.propose import DraftModel
from millpond.runtime.report import Layout, pack
from millpond.runtime.seats import SeatSampling
from millpond.runtime.verify import drawn_positions

log = logging.getLogger(__name__)

ROW_TENSORS = (
    "state_in",
    "state_out",
    "base",
    "pending",
    "num_drafts",
    "parity",
    "seats",
    "export_end",
    "export_slot",
)
"""The tensors of `VerifyRows`, [B] each."""

Progress = Callable[[int, int], None]
"""Told how many recordings are made, of how many."""


def is_steady(plan: StepPlan) -> bool:
    """Whether a plan holds live rows, and nothing that needs more than their numbers and pages."""
    return bool(plan.verify) and not (
        plan.prefill or plan.decode or plan.seat_loads or plan.fan_outs
    )


@dataclass(frozen=True, slots=True)
class Forwarded:
    """Live rows after their forward."""

    rows: VerifyRows
    tokens: torch.Tensor  # [B, K + 1] int64: the certain token, then drafts
    hidden: torch.Tensor  # [B * (K + 1), hidden]
    written: torch.Tensor  # [2, 2 B] int64, see `WriteLog.common`

    def first(self, count: int) -> Forwarded:
        """Of the first `count` rows alone."""
        changes = {name: getattr(self.rows, name)[:count] for name in ROW_TENSORS}
        written = self.written.view(2, 2, -1)[:, :, :count]
        return Forwarded(
            rows=replace(self.rows, **changes),
            tokens=self.tokens[:count],
            hidden=self.hidden[: count * self.rows.width],
            written=written.flatten(1),
        )


@dataclass(frozen=True, slots=True)
class Bucket:
    """The recordings for a number of rows of up to so many pages, and what they share."""

    numbers: torch.Tensor  # [6, B] int64, read by the forward
    forward: Recorded
    forwarded: Forwarded
    tail: Recorded
    layout: Layout  # of the report that the tail leaves


class SteadySteps:
    """Records steps of live rows, and repeats them.

    `proposer` is None where no step drafts. Nothing is recorded until `capture` is called.
    """

    def __init__(
        self,
        model: Model,
        arenas: Arenas,
        staging: Staging,
        seats: SeatSampling,
        ops: Bound,
        proposer: DraftModel | None,
        capturer: Capturer,
    ) -> None:
        self.num_captures = 0
        self.num_replays = 0
        self.proposer = proposer
        self._model = model
        self._arenas = arenas
        self._staging = staging
        self._seats = seats
        self._ops = ops
        self._capturer = capturer
        self._buckets: dict[tuple[int, int], Bucket] = {}
        self._sizes: tuple[int, ...] = ()
        self._reaches: tuple[int, ...] = ()

    @torch.inference_mode()
    def capture(self, most: int, progress: Progress) -> None:
        """Record every bucket of up to `most` rows, the largest first: the others need no more
        memory than it does.
        """
        began, before = time.monotonic(), self._capturer.reserved_bytes()
        device, fields = self._staging.device, len(LIVE_FIELDS)
        sizes, reaches = bucket_sizes(most), reach_sizes(self._staging.page_table.shape[1])
        inputs = torch.empty(fields * most, dtype=torch.int64, device=device)
        kinds = [(size, reach) for size in reversed(sizes) for reach in reversed(reaches)]
        for done, (size, reach) in enumerate(kinds):
            progress(done, len(kinds))
            numbers = inputs[: fields * size].view(fields, size)
            self._buckets[size, reach] = self._record(numbers, reach)
        progress(len(kinds), len(kinds))
        self._sizes, self._reaches = sizes, reaches
        log.info(
            "captured %d graphs for up to %d rows in %.1f s, %.2f GiB",
            self.num_captures,
            most,
            time.monotonic() - began,
            (self._capturer.reserved_bytes() - before) / 2**30,
        )

    def _record(self, numbers: torch.Tensor, most: int) -> Bucket:
        """Both recordings, made on rows of no seat."""
        width = self._staging.num_drafts + 1
        nobody = pack_live((), numbers.shape[1])
        self._staging.ring.fill(numbers, nobody)
        forward = self._capturer.capture(lambda: self._forward(numbers, most))
        hidden, tokens, written, *counters = forward.outputs
        seats, state_in, state_out, _, export_end, export_slot = numbers.unbind()
        base, pending, num_drafts, parity = counters
        forwarded = Forwarded(
            rows=VerifyRows(
                width=width,
                state_in=state_in,
                state_out=state_out,
                base=base,
                pending=pending,
                num_drafts=num_drafts,
                parity=parity,
                seats=seats,
                export_end=export_end,
                export_slot=export_slot,
            ),
            tokens=tokens,
            hidden=hidden,
            written=written,
        )
        forward.replay()  # what the tail reads while it is recorded
        layouts: list[Layout] = []
        tail = self._capturer.capture(lambda: self._tail(forwarded, most, layouts))
        self.num_captures += 2
        return Bucket(numbers, forward, forwarded, tail, layouts[-1])

    def _forward(self, numbers: torch.Tensor, most: int) -> Tensors:
        """From staged numbers to hidden vectors; beside them what `Forwarded` is made of."""
        batch = self._staging.live(numbers, most)
        rows = batch.verify
        if rows is None:
            raise Broken("a batch of live rows has none")
        hidden = self._model.forward(batch, self._arenas)
        tokens = batch.token_ids.view(-1, rows.width)
        counters = (rows.base, rows.pending, rows.num_drafts, rows.parity)
        return (hidden, tokens, rows.written.common(), *counters)

    def _tail(self, after: Forwarded, most: int, layouts: list[Layout]) -> Tensors:
        """Draw, accept, draft, count: every row by noise and filters alone. -> the report."""
        rows = after.rows
        logits = self._model.logits(after.hidden)
        of_place = self._seats.plain_rows(rows.seats.repeat_interleave(rows.width))
        position = drawn_positions(rows).flatten()
        sampled = self._seats.choose(logits, of_place, position, None)
        settled = self._ops.settle(sampled, after.tokens, rows)
        going = after_verify((), (), rows.seats, settled, after.hidden)
        drafts = after.tokens[:, :0]
        if self.proposer is not None:
            drafts = self.proposer.propose_plain(going.live, most)
        self._staging.counters.put(rows.seats, going.counters(drafts))
        accepted = settled.accepted
        parts = (sampled.token, sampled.finite, accepted, rows.num_drafts, rows.base, after.written)
        layouts.append(Layout.of(parts))
        return (pack(parts),)

    def forward(self, rows: Sequence[VerifyRow]) -> Bucket | None:
        """Run the forward of these rows: what came of it is `forwarded` of their bucket, until the
        next one runs. None where no recording has room. Raises `Broken` as `Staging.batch` does.
        """
        size = least_with_room(len(rows), self._sizes)
        if size is None:
            return None
        # The drafts that the tail makes reach beyond what the forward does.
        end = self._staging.check_live(rows) + self._staging.num_drafts + 1
        reach = least_with_room(-(-end // PAGE_SIZE), self._reaches) or self._reaches[-1]
        bucket = self._buckets[size, reach]
        self._staging.ring.fill(bucket.numbers, pack_live(rows, size))
        self._replay(bucket.forward)
        return bucket

    def tail(self, bucket: Bucket) -> torch.Tensor:
        """Draw, accept and draft for the rows of that forward. -> the report, laid out as
        `bucket.layout` says: what a `Drawn` has without scores and drafts, then what was written.
        """
        self._replay(bucket.tail)
        return bucket.tail.outputs[0]

    def _replay(self, recorded: Recorded) -> None:
        recorded.replay()
        self.num_replays += 1
