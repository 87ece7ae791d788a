"""One step on one rank: a plan is staged, run, sampled and reported.

Knows the order of things on the device and what a step must report; knows neither requests nor
leases, and holds no state besides the seats' tables. Launching a step never waits for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
import torch

from millpond.errors import Broken, StepFailed
from millpond.memory.arena import Arenas
from millpond.memory.host_ring import Landing
from millpond.models.base import Model
from millpond.nn.batch import NONE, Staging
from millpond.ops.batch import ForwardBatch
from millpond.plan.step import (
    FanOut,
    SeatLoad,
    SeatMask,
    StepPlan,
    StepResult,
    VerifyRow,
    Written,
)
from millpond.runtime.going import Going, after_known, after_verify
from millpond.runtime.graphs import Capturer, CudaCapturer, num_graphs
from millpond.runtime.outcome import Asked, outcome, prompt_scores
from millpond.runtime.propose import DraftModel, Proposer
from millpond.runtime.report import Layout, pack
from millpond.runtime.steady import Progress, SteadySteps, is_steady
from millpond.runtime.verify import Drafted, Drawn, Verifier, Wanted, wanted
from millpond.state.lease import SlotId

log = logging.getLogger(__name__)

Finish = Callable[[], StepResult]

Rest = Callable[[StepPlan], Finish]
"""Launches what follows a forward (draws, drafts, the report), given the plan with its masks."""

Masks = tuple[SeatMask, ...]

Target = tuple[SlotId, int]
"""A slot that a row is to write, and where the row starts."""


class InFlight:
    """A step that was launched. `rest` launches its draws, where these wait for masks."""

    __slots__ = ("_finish", "_rest", "_step")

    def __init__(
        self, step: int, finish: Finish, rest: Callable[[Masks], Finish] | None = None
    ) -> None:
        self._step = step
        self._finish = finish
        self._rest = rest

    def draw(self, masks: Masks) -> None:
        """Launch the draws, unless the forward could not be launched or they were before."""
        rest, self._rest = self._rest, None
        if rest is not None:
            self._finish = rest(masks)

    def result(self) -> StepResult:
        """Wait for the step's end. Raises `StepFailed`, with the cause. To be called once."""
        try:
            return self._finish()
        except Exception as cause:
            log.exception("step %d failed", self._step)
            raise StepFailed(f"step {self._step}: {type(cause).__name__}: {cause}") from cause


class ModelRunner:
    """Runs plans against one model and its arenas, in the order in which they are launched.

    Without a `proposer` no step drafts, and no plan may verify any drafts. Steps of live rows alone
    are replayed where `capture` has recorded them.
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
        self._landing = Landing(staging.device)
        self._steady: SteadySteps | None = None

    @property
    def num_graphs(self) -> int:
        """Graphs that `capture` records by itself: none where the device has no such thing."""
        if self.staging.device.type != "cuda":
            return 0
        return num_graphs(self.staging.num_seats, self.staging.page_table.shape[1])

    @property
    def num_captures(self) -> int:
        """Graphs that were recorded."""
        return 0 if self._steady is None else self._steady.num_captures

    @property
    def num_replays(self) -> int:
        """How often one of them ran."""
        return 0 if self._steady is None else self._steady.num_replays

    def capture(self, progress: Progress | None = None, capturer: Capturer | None = None) -> None:
        """Record steps of live rows, of every number of rows there are seats for.

        By `capturer`, or as the device does it; where it does not, every step stays as it is. Runs
        the model on rows of no seat: nothing in the arenas changes. Call between steps.
        """
        if capturer is None and self.staging.device.type != "cuda":
            return
        self._steady = SteadySteps(
            self.model,
            self.arenas,
            self.staging,
            self.verifier.seats,
            self.verifier.ops,
            self.proposer if isinstance(self.proposer, DraftModel) else None,
            capturer or CudaCapturer(self.staging.device),
        )
        self._steady.capture(self.staging.num_seats, progress or (lambda done, total: None))

    def execute(self, plan: StepPlan) -> StepResult:
        """Run `plan` to its end. Raises `StepFailed`; the next plan may still run."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> InFlight:
        """Hand `plan` to the device. What goes wrong, also here, is raised by its result.

        After a failure the seats of the plan's rows hold nothing anyone may rely on; requests come
        back with a seat load of their own.
        """
        try:
            with torch.inference_mode():
                rest = self._launch(plan)
        except Exception as cause:  # noqa: BLE001 -- raised where the result is asked for
            return InFlight(plan.step, partial(self._fail, cause))
        if not plan.draws_later:
            return InFlight(plan.step, self._launch_rest(rest, plan))
        untold = Broken(f"step {plan.step} was never told what it may draw")
        later = partial(self._draw, rest, plan)
        return InFlight(plan.step, partial(self._fail, untold), later)

    def _draw(self, rest: Rest, plan: StepPlan, masks: Masks) -> Finish:
        return self._launch_rest(rest, msgspec.structs.replace(plan, masks=masks))

    def _launch_rest(self, rest: Rest, plan: StepPlan) -> Finish:
        try:
            with torch.inference_mode():
                return rest(plan)
        except Exception as cause:  # noqa: BLE001 -- raised where the result is asked for
            return partial(self._fail, cause)

    def _fail(self, cause: Exception) -> StepResult:
        """Raise `cause` once the device is done with what had been queued of the step: after that
        its slots and pages are somebody else's, who may write them beside the order of steps.
        """
        self._landing.settle()
        raise cause

    def _launch(self, plan: StepPlan) -> Rest:
        """Launch all of a plan up to its forward; what is left is returned."""
        self.arenas.slots.fill_nan(plan.poison_slots)
        self.arenas.pages.fill_nan(plan.poison_pages)
        self._load_seats(plan.seat_loads)
        self.staging.update(plan.page_updates)
        if not (plan.prefill or plan.decode or plan.verify):
            return lambda plan: partial(StepResult, step=plan.step)
        if self.proposer is None and any(row.num_drafts for row in plan.verify):
            raise Broken(f"step {plan.step} verifies drafts, and there is nobody who makes them")
        if self._steady is not None and is_steady(plan):
            rest = self._launch_steady(self._steady, plan)
            if rest is not None:
                return rest
        want = wanted(plan, self.staging.num_drafts + 1)
        batch = self.staging.batch(plan, want.at)
        hidden = self.model.forward(batch, self.arenas)
        written = _logged(plan, batch)
        drafted = Drafted.of(plan, batch)
        return partial(
            self._tail,
            want=want,
            hidden=hidden,
            at=batch.logits_at,
            drafted=drafted,
            written=written,
        )

    def _launch_steady(self, steady: SteadySteps, plan: StepPlan) -> Rest | None:
        """Replay the plan, its tail only where that draws by noise and filters alone."""
        bucket = steady.forward(plan.verify)
        if bucket is None:
            return None
        seats = tuple(row.seat for row in plan.verify)
        width, count = self.staging.num_drafts + 1, len(seats)
        if (
            plan.masks
            or plan.draws_later
            or plan.tell_drafts
            or self.proposer is not steady.proposer
            or not self.verifier.seats.all_plain(plan.verify)
        ):
            after = bucket.forwarded.first(count)
            drafted = Drafted(seats, after.rows, after.tokens)
            want = wanted(plan, width)
            return partial(
                self._tail,
                want=want,
                hidden=after.hidden,
                at=None,
                drafted=drafted,
                written=[after.written],
            )
        arrival = self._landing.receive(steady.tail(bucket))

        def finish() -> StepResult:
            *drawn, written = bucket.layout.read(arrival.wait())
            found = outcome(Asked((), seats, width), tuple(drawn))
            return StepResult(
                step=plan.step,
                emitted=found.emitted,
                verified=found.verified,
                written=_of_verify(plan.verify, found.bases, written),
            )

        return lambda plan: finish

    def _tail(
        self,
        plan: StepPlan,
        *,
        want: Wanted,
        hidden: torch.Tensor,
        at: torch.Tensor | None,
        drafted: Drafted | None,
        written: Sequence[torch.Tensor],
    ) -> Finish:
        """All after the forward: hidden [T, hidden]; the wanted ones are `at`, or all of them."""
        rows = hidden if at is None else hidden.index_select(0, at)
        drawn_from, scored = rows[: want.num_drawn], rows[want.num_drawn :]
        drawn = None
        if want.num_drawn:
            logits = self.model.logits(drawn_from)
            drawn = self.verifier.draw(want.draws, logits, drafted, plan.masks)
        scores = self.verifier.score_prompts(want.scored, scored, self.model.logits)
        self._fan_out(plan.fan_outs)
        if drawn is not None:
            drafts = self._go_on(plan, want, hidden, drafted, drawn)
            if plan.tell_drafts:
                drawn = self.verifier.telling(drawn, plan.tell_drafts, drafts)
        parts = (*(() if drawn is None else drawn.parts), *scores, *written)
        layout, arrival = Layout.of(parts), self._landing.receive(pack(parts))
        asked = None if drawn is None else drawn.asked

        def finish() -> StepResult:
            numbers = layout.read(arrival.wait())
            first_written = len(numbers) - len(written)
            logs = numbers[first_written:]
            reported = _of_known(plan, logs)
            result = StepResult(step=plan.step, written=reported)
            if asked is not None:
                found = outcome(asked, numbers[: first_written - len(scores)])
                if plan.verify:
                    reported += _of_verify(plan.verify, found.bases, logs[-1])
                result = StepResult(
                    step=plan.step,
                    emitted=found.emitted,
                    verified=found.verified,
                    written=reported,
                    drafts=found.drafts,
                )
            if scores:
                of_scores = numbers[first_written - len(scores) : first_written]
                result = msgspec.structs.replace(
                    result, prompt_logprobs=prompt_scores(want.scored, of_scores)
                )
            return result

        return finish

    def _go_on(
        self,
        plan: StepPlan,
        want: Wanted,
        hidden: torch.Tensor,
        drafted: Drafted | None,
        drawn: Drawn,
    ) -> torch.Tensor:
        """Draft for every seat that drew, and set its counters. -> the drafts [n, K] int64."""
        count, parts = len(want.draws), list[Going]()
        if count:
            seats = tuple(d.seat for d in want.draws)
            numbers = self.staging.ring.integers(
                (seats, [d.position for d in want.draws], [want.at[d.row] for d in want.draws])
            )
            ends = tuple(d.position + 1 for d in want.draws)
            parts.append(after_known(seats, ends, numbers, drawn.token[:count], hidden))
        if drafted is not None and drawn.settled is not None:
            rows = drafted.rows
            ends = tuple(row.end + row.num_drafts + 1 for row in plan.verify)
            of_rows = hidden[len(hidden) - rows.num_tokens :]
            parts.append(after_verify(drafted.seats, ends, rows.seats, drawn.settled, of_rows))
        going = parts[0] if len(parts) == 1 else parts[0].then(parts[1])
        drafts = going.live.token.new_empty((len(going.live.seat), 0))
        if self.proposer is not None:
            drafts = self.proposer.propose(going.live)
        self.staging.counters.put(going.live.seat, going.counters(drafts))
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


def _logged(plan: StepPlan, batch: ForwardBatch) -> list[torch.Tensor]:
    """What was written by each form of the plan that has rows, in the order of the forms."""
    logs = [
        form.written.common()
        for rows, form in ((plan.prefill, batch.prefill), (plan.decode, batch.decode))
        if rows
    ]
    return logs if batch.verify is None else [*logs, batch.verify.written.common()]


def _of_known(plan: StepPlan, logs: Sequence[np.ndarray]) -> tuple[Written, ...]:
    """What the known rows wrote, form by form: their ends, then their exports."""
    found: list[Written] = []
    for rows, log in zip((r for r in (plan.prefill, plan.decode) if r), logs, strict=False):
        targets = [(row.state_out, row.start) for row in rows]
        targets += [(export.slot, row.start) for row in rows for export in row.exports]
        found += _written(targets, log)
    return tuple(found)


def _of_verify(
    rows: Sequence[VerifyRow], bases: Sequence[int], log: np.ndarray
) -> tuple[Written, ...]:
    """What verify rows wrote. `bases`: where their input slots really ended; of the rows in `log`
    [2, 2 B], those after `rows` are nobody's.
    """
    ends, exports = np.split(log, 2, 1)
    targets = [(row.state_out, base) for row, base in zip(rows, bases, strict=True)]
    found = _written(targets, ends[:, : len(rows)])
    if not exports.size or exports[0].max() < 0:
        return tuple(found)
    conditional = [
        (SlotId(NONE) if row.export is None else row.export.slot, base)
        for row, base in zip(rows, bases, strict=True)
    ]
    return tuple(found + _written(conditional, exports[:, : len(rows)]))


def _written(targets: Sequence[Target], log: np.ndarray) -> list[Written]:
    """`log` [2, n]: by target, the slot that all layers wrote or -1, and the tokens folded."""
    found: list[Written] = []
    if not log.shape[1]:  # no layer writes slots
        return found
    for (wanted_slot, start), slot, folded in zip(targets, *log.tolist(), strict=True):
        if slot < 0:
            continue
        if slot != wanted_slot:
            raise Broken(f"slot {slot} was written, the plan names no such output")
        found.append(Written(SlotId(slot), start + folded))
    return found
