"""One step on one rank: a plan is staged, run, sampled and reported.

Knows the order of things on the device and what a step must report; knows neither requests nor
leases, and holds no state besides the seats' tables.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from millpond.errors import Broken, StepFailed
from millpond.memory.arena import Arenas
from millpond.models.base import Model
from millpond.nn.batch import Staging
from millpond.nn.counters import Counters
from millpond.ops.batch import ForwardBatch, WriteLog
from millpond.plan.step import (
    FanOut,
    RowLogprobs,
    SeatLoad,
    StepPlan,
    StepResult,
    Written,
)
from millpond.runtime.propose import Live, Proposer
from millpond.runtime.verify import Drafted, Drawn, Verifier, Wanted, wanted
from millpond.state.lease import SlotId

log = logging.getLogger(__name__)


class ModelRunner:
    """Runs plans against one model and its arenas, one at a time.

    Without a `proposer` no step drafts, and no plan may hold verify rows.
    """

    def __init__(
        self,
        model: Model,
        arenas: Arenas,
        staging: Staging,
        verifier: Verifier,
        proposer: Proposer | None = None,
    ) -> None:
        self.model = model
        self.arenas = arenas
        self.staging = staging
        self.verifier = verifier
        self.proposer = proposer

    def execute(self, plan: StepPlan) -> StepResult:
        """Run `plan` to its end. Raises `StepFailed`, with the cause; the next plan may still run.

        After a failure the seats of the plan's rows hold nothing anyone may rely on; requests come
        back with a seat load of their own.
        """
        try:
            with torch.inference_mode():
                return self._execute(plan)
        except Exception as cause:
            log.exception("step %d failed", plan.step)
            raise StepFailed(f"step {plan.step}: {type(cause).__name__}: {cause}") from cause

    def _execute(self, plan: StepPlan) -> StepResult:
        self.arenas.slots.fill_nan(plan.poison_slots)
        self.arenas.pages.fill_nan(plan.poison_pages)
        self._load_seats(plan.seat_loads)
        self.staging.update(plan.page_updates)
        if not (plan.prefill or plan.decode or plan.verify):
            return StepResult(step=plan.step)
        if plan.verify and self.proposer is None:
            raise Broken(f"step {plan.step} verifies drafts, and there is nobody who makes them")
        want = wanted(plan, self.staging.num_drafts + 1)
        batch = self.staging.batch(plan, want.at)
        hidden = self.model.forward(batch, self.arenas)
        drawn, scores = self._sample(plan, want, hidden, batch)
        self._fan_out(plan.fan_outs)
        if drawn is None:
            return StepResult(step=plan.step, written=_report(plan, batch), prompt_logprobs=scores)
        if self.proposer is not None:
            drafts = self._propose(self.proposer, plan, want, hidden, batch, drawn)
            if plan.tell_drafts:
                drawn = drawn.telling(plan.tell_drafts, drafts)
        outcome = self.verifier.report(drawn)
        return StepResult(
            step=plan.step,
            emitted=outcome.emitted,
            verified=outcome.verified,
            written=_report(plan, batch, outcome.bases),
            prompt_logprobs=scores,
            drafts=outcome.drafts,
        )

    def _sample(
        self, plan: StepPlan, want: Wanted, hidden: torch.Tensor, batch: ForwardBatch
    ) -> tuple[Drawn | None, tuple[RowLogprobs, ...]]:
        if not want.at:
            return None, ()
        rows = hidden.index_select(0, batch.logits_at)
        drawn_from, scored = rows[: want.num_drawn], rows[want.num_drawn :]
        drawn = None
        if want.num_drawn:
            drafted = Drafted.of(plan, batch)
            drawn = self.verifier.draw(
                want.draws, self.model.logits(drawn_from), drafted, plan.masks
            )
        return drawn, self.verifier.score_prompts(want.scored, scored, self.model.logits)

    def _propose(
        self,
        proposer: Proposer,
        plan: StepPlan,
        want: Wanted,
        hidden: torch.Tensor,
        batch: ForwardBatch,
        drawn: Drawn,
    ) -> torch.Tensor:
        """Draft for every seat that drew, and set its counters. -> the drafts [n, K] int64."""
        numbers = [(d.seat, d.position, want.at[d.row]) for d in want.draws]
        seat, base, last = self.verifier.seats.tensor(numbers).reshape(-1, 3).unbind(1)
        pending = torch.zeros_like(base)
        parity = torch.zeros_like(base)
        ends = [d.position + 1 for d in want.draws]
        if batch.verify is not None:
            rows = batch.verify
            row = torch.arange(rows.num_rows, device=base.device) * rows.width
            seat = torch.cat((seat, rows.seats))
            base = torch.cat((base, rows.base + rows.pending + 1))
            pending = torch.cat((pending, drawn.accepted))
            parity = torch.cat((parity, 1 - rows.parity))
            last = torch.cat((last, batch.first_verify_token + row + drawn.accepted))
            ends += [row.end + row.num_drafts + 1 for row in plan.verify]
        drafts = proposer.propose(
            Live(
                seats=drawn.known + drawn.verify,
                seat=seat,
                token=drawn.last,
                position=base + pending,
                hidden=hidden.index_select(0, last),
                ends=tuple(ends),
            )
        )
        self.staging.counters.put(
            seat,
            Counters(
                base=base,
                pending=pending,
                first=drawn.last,
                num_drafts=torch.full_like(base, drafts.shape[1]),
                parity=parity,
                drafts=drafts,
            ),
        )
        return drafts

    def _load_seats(self, loads: Sequence[SeatLoad]) -> None:
        seats = [load.seat for load in loads]
        self.staging.empty(seats)
        self.arenas.seats.fill_nan(seats)
        self.verifier.load(loads)

    def _fan_out(self, fan_outs: Sequence[FanOut]) -> None:
        self.arenas.seats.copy([f.source for f in fan_outs], [f.target for f in fan_outs])
        partial = [
            (f.source_page, f.target_page)
            for f in fan_outs
            if f.source_page is not None and f.target_page is not None
        ]
        self.arenas.pages.copy([source for source, _ in partial], [target for _, target in partial])


def _report(plan: StepPlan, batch: ForwardBatch, bases: Sequence[int] = ()) -> tuple[Written, ...]:
    """What all layers wrote, as (slot, end), in the order of the plan's rows.

    `bases`: where the input slots of the verify rows really ended.
    """
    written = [
        found
        for rows, slots in ((plan.prefill, batch.prefill), (plan.decode, batch.decode))
        for found in _written(
            {
                slot: row.start
                for row in rows
                for slot in (row.state_out, *(export.slot for export in row.exports))
            },
            slots.written,
        )
    ]
    if batch.verify is not None:
        starts: dict[SlotId, int] = {}
        for verifying, base in zip(plan.verify, bases, strict=True):
            starts[verifying.state_out] = base
            if verifying.export is not None:
                starts[verifying.export.slot] = base
        written += _written(starts, batch.verify.written)
    return tuple(written)


def _written(start_of: Mapping[SlotId, int], log: WriteLog) -> list[Written]:
    """`start_of` the rows that name each slot as an output."""
    agreed = sorted(log.agreed())
    strange = [slot for slot, _ in agreed if slot not in start_of]
    if strange:
        raise Broken(f"slots {strange} were written, the plan names no such outputs")
    return [Written(SlotId(slot), start_of[SlotId(slot)] + folded) for slot, folded in agreed]
