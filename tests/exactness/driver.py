"""Runs sequences by hand, in any order and cut, without a scheduler; owns slots, pages, seats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from millpond.plan.sampling import SamplingParams
from millpond.plan.step import (
    PAGE_SIZE,
    Export,
    FanOut,
    PageUpdate,
    Row,
    SeatLoad,
    StepPlan,
    StepResult,
)
from millpond.state.lease import PageId, Seat, SlotId
from tests.support.recording import RecordingExecutor


@dataclass(eq=False)
class Saved:
    """A state that was written at `end`, and the pages up to it; it stays until the driver ends."""

    tokens: tuple[int, ...]
    end: int
    slot: int
    pages: list[int]


@dataclass(eq=False)
class Run:
    """One live sequence."""

    name: str
    prompt: tuple[int, ...]
    seat: int
    tokens: list[int]  # known: the prompt, then what was drawn
    folded: int
    slot: int | None  # its current state
    shared: bool  # whether somebody else may still read that slot
    pages: list[int]
    sent: int = 0
    load: SeatLoad | None = None

    @property
    def in_prompt(self) -> bool:
        """Whether prompt tokens are left to fold."""
        return self.folded < len(self.prompt)

    @property
    def text(self) -> tuple[int, ...]:
        """Tokens drawn."""
        return tuple(self.tokens[len(self.prompt) :])


@dataclass(eq=False)
class Driver:
    """Sequences of one executor. Freed slots and pages are poisoned in the next step."""

    executor: RecordingExecutor
    step_number: int = 0
    saved: list[Saved] = field(default_factory=list)
    num_runs: int = 0

    def __post_init__(self) -> None:
        facts = self.executor.capabilities
        self.free_slots = list(range(facts.num_slots))
        self.free_pages = list(range(facts.num_pages))
        self.free_seats = list(range(facts.num_seats))
        self._poison: tuple[list[int], list[int]] = ([], [])

    def start(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        *,
        resume: Saved | None = None,
        generated: tuple[int, ...] = (),
        sample_index: int = 0,
    ) -> Run:
        """A sequence that begins cold or at a saved state; `generated` tokens are known already."""
        if resume is not None:
            assert resume.tokens == prompt[: resume.end]
        self.num_runs += 1
        run = Run(
            name=f"run {self.num_runs}",
            prompt=prompt,
            seat=self.free_seats.pop(),
            tokens=[*prompt, *generated],
            folded=0 if resume is None else resume.end,
            slot=None if resume is None else resume.slot,
            shared=resume is not None,
            pages=[] if resume is None else list(resume.pages),
        )
        run.load = SeatLoad(
            seat=Seat(run.seat),
            request=run.name,
            sample_index=sample_index,
            params=params,
            tokens=tuple(run.tokens),
            prompt_len=len(prompt),
        )
        return run

    def finish(self, run: Run) -> None:
        """Give back what no saved state holds."""
        kept = {p for s in self.saved for p in s.pages}
        pages = [p for p in run.pages if p not in kept]
        self.free_pages += pages
        self._poison[1].extend(pages)
        if run.slot is not None and not run.shared:
            self._release_slot(run.slot)
        self.free_seats.insert(0, run.seat)

    def step(self, wishes: Iterable[tuple[Run, int, Sequence[int]]]) -> None:
        """One forward. A wish is (run, new end, exports); an export or end on the grid is saved."""
        prefill: list[Row] = []
        decode: list[Row] = []
        loads: list[SeatLoad] = []
        updates: list[PageUpdate] = []
        after: list[tuple[Run, Row, list[Saved]]] = []
        for run, end, exports in wishes:
            if run.load is not None:
                loads.append(run.load)
                run.load = None
            updates += self._extend(run, end)
            state_out = run.slot if run.slot is not None and not run.shared else self._take_slot()
            row = Row(
                request=run.name,
                seat=Seat(run.seat),
                start=run.folded,
                tokens=tuple(run.tokens[run.folded : end]),
                state_in=None if run.slot is None else SlotId(run.slot),
                state_out=SlotId(state_out),
                exports=tuple(Export(e, SlotId(self._take_slot())) for e in exports),
                emit_seats=(Seat(run.seat),) if end == len(run.tokens) else (),
            )
            saves = [self._saved(run, e.end, e.slot) for e in row.exports]
            (prefill if run.in_prompt else decode).append(row)
            after.append((run, row, saves))
        result = self._execute(
            prefill=tuple(prefill),
            decode=tuple(decode),
            seat_loads=tuple(loads),
            page_updates=tuple(updates),
        )
        drawn = {e.seat: e for e in result.emitted}
        for run, row, saves in after:
            run.folded, run.slot, run.shared = row.end, row.state_out, False
            self.saved += saves
            if run.folded % PAGE_SIZE == 0 and run.folded <= len(run.prompt):
                self.saved.append(self._saved(run, run.folded, row.state_out))
                run.shared = True
            if row.emit_seats:
                emitted = drawn[Seat(run.seat)]
                assert emitted.finite, f"{run.name} at {run.folded}"
                run.tokens.append(emitted.token)

    def fan_out(self, run: Run, params: SamplingParams, n: int) -> list[Run]:
        """Fold the rest of a prompt for `n` samples at once; all of them, the first included."""
        others = [self.start(run.prompt, params, sample_index=i) for i in range(1, n)]
        whole = len(run.prompt) // PAGE_SIZE
        end = len(run.prompt)
        loads = [run.load] if run.load is not None else []
        updates = self._extend(run, end)
        fans: list[FanOut] = []
        for other in others:
            loads.append(other.load)
            other.pages = run.pages[:whole]
            partial = run.pages[whole] if end % PAGE_SIZE else None
            updates += self._extend(other, end)
            target = other.pages[whole] if partial is not None else None
            fans.append(
                FanOut(
                    Seat(run.seat),
                    Seat(other.seat),
                    None if partial is None else PageId(partial),
                    None if target is None else PageId(target),
                )
            )
        out = run.slot if run.slot is not None and not run.shared else self._take_slot()
        row = Row(
            request=run.name,
            seat=Seat(run.seat),
            start=run.folded,
            tokens=tuple(run.prompt[run.folded :]),
            state_in=None if run.slot is None else SlotId(run.slot),
            state_out=SlotId(out),
            emit_seats=tuple(Seat(r.seat) for r in (run, *others)),
        )
        result = self._execute(
            prefill=(row,),
            seat_loads=tuple(load for load in loads if load is not None),
            page_updates=tuple(updates),
            fan_outs=tuple(fans),
        )
        drawn = {e.seat: e.token for e in result.emitted}
        for one in (run, *others):
            one.load = None
            one.folded, one.slot, one.shared = end, out, True
            one.tokens.append(drawn[Seat(one.seat)])
        return [run, *others]

    def decode(self, runs: Sequence[Run], count: int) -> None:
        """Draw until every run has `count` tokens; several known ones are folded in one row."""
        while live := [r for r in runs if len(r.text) < count]:
            self.step((r, len(r.tokens), ()) for r in live)

    def _saved(self, run: Run, end: int, slot: int) -> Saved:
        return Saved(run.prompt[:end], end, slot, run.pages[: end // PAGE_SIZE])

    def _extend(self, run: Run, end: int) -> list[PageUpdate]:
        """Take the pages up to `end`; the seat is told of all it does not know yet."""
        while len(run.pages) * PAGE_SIZE < end:
            run.pages.append(self.free_pages.pop(0))
        new = tuple(PageId(p) for p in run.pages[run.sent :])
        update = PageUpdate(Seat(run.seat), run.sent, new)
        run.sent = len(run.pages)
        return [update] if new else []

    def _take_slot(self) -> int:
        return self.free_slots.pop(0)

    def _release_slot(self, slot: int) -> None:
        self.free_slots.append(slot)
        self._poison[0].append(slot)

    def _execute(self, **parts: Any) -> StepResult:
        slots, pages = self._poison
        self._poison = ([], [])
        self.step_number += 1
        plan = StepPlan(
            step=self.step_number,
            poison_slots=tuple(SlotId(s) for s in slots),
            poison_pages=tuple(PageId(p) for p in pages),
            **parts,
        )
        return self.executor.launch(plan).result()
