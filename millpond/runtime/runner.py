"""One step on one rank: a plan is staged, run, sampled and reported.

Knows the order of things on the device and what a step must report; knows neither requests nor
leases, and holds no state besides the seats' tables.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from millpond.errors import Broken, StepFailed
from millpond.memory.arena import Arenas
from millpond.models.base import Model
from millpond.nn.batch import Staging
from millpond.ops.batch import ForwardBatch, RowSlots
from millpond.plan.step import (
    Emitted,
    FanOut,
    Row,
    RowLogprobs,
    SeatLoad,
    StepPlan,
    StepResult,
    Written,
)
from millpond.runtime.verify import Verifier, Wanted, wanted
from millpond.state.lease import SlotId

log = logging.getLogger(__name__)


class ModelRunner:
    """Runs plans against one model and its arenas, one at a time."""

    def __init__(self, model: Model, arenas: Arenas, staging: Staging, verifier: Verifier) -> None:
        self.model = model
        self.arenas = arenas
        self.staging = staging
        self.verifier = verifier

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
        if not (plan.prefill or plan.decode):
            return StepResult(step=plan.step)
        want = wanted(plan)
        batch = self.staging.batch(plan, want.at)
        hidden = self.model.forward(batch, self.arenas)
        emitted, scores = self._sample(want, hidden, batch)
        self._fan_out(plan.fan_outs)
        return StepResult(
            step=plan.step,
            emitted=emitted,
            written=_report(plan, batch),
            prompt_logprobs=scores,
        )

    def _sample(
        self, want: Wanted, hidden: torch.Tensor, batch: ForwardBatch
    ) -> tuple[tuple[Emitted, ...], tuple[RowLogprobs, ...]]:
        if not want.at:
            return (), ()
        rows = hidden.index_select(0, batch.logits_at)
        drawn, scored = rows[: want.num_drawn], rows[want.num_drawn :]
        emitted = self.verifier.draw(want.draws, self.model.logits(drawn)) if want.draws else ()
        return emitted, self.verifier.score_prompts(want.scored, scored, self.model.logits)

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


def _report(plan: StepPlan, batch: ForwardBatch) -> tuple[Written, ...]:
    """What all layers wrote, as (slot, end), in the order of the plan's rows."""
    return (*_written(plan.prefill, batch.prefill), *_written(plan.decode, batch.decode))


def _written(rows: Sequence[Row], slots: RowSlots) -> list[Written]:
    start_of = {
        slot: row.start for row in rows for slot in (row.state_out, *(e.slot for e in row.exports))
    }
    agreed = sorted(slots.written.agreed())
    strange = [slot for slot, _ in agreed if slot not in start_of]
    if strange:
        raise Broken(f"slots {strange} were written, the plan names no such outputs")
    return [Written(SlotId(slot), start_of[SlotId(slot)] + folded) for slot, folded in agreed]
