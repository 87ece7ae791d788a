"""An executor that keeps the bytes of every state and page a step leaves, named by their tokens.

Two runs that fold the same tokens in the same form must leave the same bytes, whatever else
differed: the batch, the cut of the prompt, where it resumed, which slots it was given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from millpond.errors import StepFailed
from millpond.executor.uni import UniExecutor
from millpond.memory.arena import Arena, Arenas
from millpond.memory.layout import EntrySpec
from millpond.plan.step import (
    PAGE_SIZE,
    Capabilities,
    Ended,
    Export,
    Launched,
    Row,
    StepPlan,
    StepResult,
    VerifyRow,
)
from millpond.runtime.worker import Worker
from millpond.state.lease import SlotId
from tests.support.counting import CountWrites, changed_entries, snapshot, unchanged

Key = tuple[str, int, tuple[int, ...]]
"""What holds bytes (state or page), how many tokens of it are a prompt's, and all tokens folded."""


@dataclass
class Truth:
    """Bytes by key, of all runs that share it, and where two of them differ."""

    digests: dict[Key, tuple[bytes, str]] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    num_compared: int = 0

    def note(self, key: Key, entry: torch.Tensor, where: str) -> None:
        """One run left `entry` under `key`."""
        digest = hashlib.sha256(entry.numpy().tobytes()).digest()
        known, first = self.digests.setdefault(key, (digest, where))
        self.num_compared += first != where
        if known != digest:
            what, prompt, tokens = key
            self.differences.append(
                f"{what} at {len(tokens)} ({prompt} of them prompt): {where} differs from {first}"
            )


class Later:
    """A plan that runs when its result is asked for."""

    def __init__(self, run: Callable[[StepPlan], StepResult], plan: StepPlan) -> None:
        self._run, self._plan = run, plan

    def result(self) -> StepResult:
        """Run it now."""
        return self._run(self._plan)


class RecordingExecutor:
    """Runs plans inline; notes what each wrote, and that it wrote nothing else."""

    def __init__(
        self, worker: Worker, truth: Truth, where: str, *, count_writes: bool = False
    ) -> None:
        self.worker = worker
        self.count_writes = count_writes  # as well as comparing contents; halves the speed
        self.truth = truth
        self.where = where
        self.plans: list[StepPlan] = []
        self.bytes_beyond: list[str] = []  # writes that no row of the plan asked for
        self.during: Callable[[StepPlan], None] | None = None  # as the forward begins
        self.fail_at: int | None = None  # the number of a call that runs and is then called failed
        self.late = False  # plans run when their results are asked for
        self.slot_bytes_written = 0  # poison left out
        self.num_states = 0  # slots looked at, every published one among them
        self._left: tuple[torch.Tensor, torch.Tensor] | None = None
        self._inner = UniExecutor(worker)
        self._known: dict[int, tuple[list[int], int]] = {}  # by seat: its tokens, prompt length

    @property
    def arenas(self) -> Arenas:
        """The arenas of the one rank."""
        return self.worker.runner.arenas

    @property
    def capabilities(self) -> Capabilities:
        """Those of the executor within."""
        return self._inner.capabilities

    def close(self) -> None:
        """Nothing to give back."""

    def launch(self, plan: StepPlan) -> Launched:
        """Run, compare, note."""
        return Later(self._launch, plan) if self.late else Ended.inline(self._launch, plan)

    def _launch(self, plan: StepPlan) -> StepResult:
        self.look_between_steps()
        before = snapshot(self.arenas.slots)
        if self.during is not None:
            self.during(plan)
        result = self._run(plan)
        self._look_for_strangers(plan, result, before)
        self._left = (snapshot(self.arenas.slots), snapshot(self.arenas.pages))
        self.plans.append(plan)
        if len(self.plans) == self.fail_at:
            for failed in plan.prefill + plan.decode + plan.verify:
                self._known.pop(failed.seat, None)
            raise StepFailed("planted")
        for load in plan.seat_loads:
            self._known[load.seat] = (list(load.tokens), load.prompt_len)
        for row in plan.prefill + plan.decode:
            self._note(row, row in plan.prefill, result)
        for verifying in plan.verify:
            if verifying.seat in self._known:  # else it goes on from a step that failed
                self._note_verify(verifying, result)
        for emitted in result.emitted:
            if emitted.seat in self._known:
                self._known[emitted.seat][0].append(emitted.token)
        return result

    def look_between_steps(self) -> None:
        """Between two steps, where states are published and freed, no byte may move."""
        if self._left is None:
            return
        for arena, left in zip((self.arenas.slots, self.arenas.pages), self._left, strict=True):
            if not unchanged(arena, left):
                self.bytes_beyond.append(f"bytes moved after step {self.plans[-1].step}")

    def _run(self, plan: StepPlan) -> StepResult:
        """Every output is written once, whole, and nothing else: counted where asked for."""
        if not self.count_writes:
            return self._inner.launch(plan).result()
        with CountWrites(self.arenas.slots) as count:
            result = self._inner.launch(plan).result()
        spec = self.arenas.slots.spec
        asked = len(_outputs(plan, result)) * sum(t.num_bytes for t in spec.tensors)
        num_bytes = count.num_bytes - len(plan.poison_slots) * spec.num_bytes
        self.slot_bytes_written += num_bytes
        if num_bytes != asked:
            self.bytes_beyond.append(
                f"step {plan.step} wrote {num_bytes} bytes of slots, not {asked}"
            )
        return result

    def _look_for_strangers(self, plan: StepPlan, result: StepResult, before: torch.Tensor) -> None:
        """Slots change only where the plan says so."""
        changed = changed_entries(self.arenas.slots, before)
        for slot in set(changed) - {*_outputs(plan, result), *plan.poison_slots}:
            self.bytes_beyond.append(f"step {plan.step} changed slot {slot}, which it does not own")

    def _note(self, row: Row, chunked: bool, result: StepResult) -> None:
        tokens, _ = self._known[row.seat]
        del tokens[row.start + len(row.tokens) :]
        tokens[row.start :] = row.tokens
        self._note_row(row, row.end, row.exports, result)

    def _note_verify(self, row: VerifyRow, result: StepResult) -> None:
        end = len(self._known[row.seat][0])
        if not row.start < end <= row.end or (end < row.end and not self.capabilities.runs_ahead):
            self.bytes_beyond.append(f"{row.request} verifies from {row.end}, not from its last")
        self._note_row(row, end, () if row.export is None else (row.export,), result)

    def _note_row(
        self, row: Row | VerifyRow, row_end: int, exports: tuple[Export, ...], result: StepResult
    ) -> None:
        tokens, prompt_len = self._known[row.seat]
        written = {(w.slot, w.end) for w in result.written}
        outputs = [(row.state_out, row_end), *((e.slot, e.end) for e in exports)]
        for slot, end in outputs:
            if (slot, end) in written:
                self._note_entry("state", self.arenas.slots, slot, tokens[:end], prompt_len, row)
        table = self.worker.runner.staging.page_table[row.seat].tolist()
        for index in range(row.start // PAGE_SIZE, row_end // PAGE_SIZE):
            prefix = tokens[: (index + 1) * PAGE_SIZE]
            self._note_entry("page", self.arenas.pages, table[index], prefix, prompt_len, row)

    def _note_entry(
        self,
        what: str,
        arena: Arena,
        entry: int,
        tokens: list[int],
        prompt_len: int,
        row: Row | VerifyRow,
    ) -> None:
        prompt = min(prompt_len, len(tokens))
        where = f"{self.where}, {row.request} rows {row.start}..{row.end}"
        left = arena.storage[entry].cpu()
        if what == "state":
            self.num_states += 1
            self.bytes_beyond += [f"{where}: {name}" for name in not_finite(arena.spec, left)]
        self.truth.note((what, prompt, tuple(tokens)), left, where)

    @property
    def num_exports(self) -> int:
        """Exports of all plans so far."""
        return sum(len(r.exports) for r in self._rows())

    def _rows(self) -> Iterable[Row]:
        return (r for plan in self.plans for r in plan.prefill + plan.decode)


def not_finite(spec: EntrySpec, entry: torch.Tensor) -> list[str]:
    """Which tensors of an entry [bytes] hold a NaN or an infinity."""
    found = []
    for tensor, offset in zip(spec.tensors, spec.offsets(), strict=True):
        value = entry[offset : offset + tensor.num_bytes].view(tensor.dtype)
        if value.is_floating_point() and not value.isfinite().all():
            found.append(f"{tensor.name} of layer {tensor.layer} is not finite")
    return found


def _outputs(plan: StepPlan, result: StepResult) -> list[SlotId]:
    """All slots that the rows of a plan write: of the exports of verify rows, those they reach."""
    rows = plan.prefill + plan.decode
    reached = {w.slot for w in result.written}
    return [
        *(r.state_out for r in rows + plan.verify),
        *(e.slot for r in rows for e in r.exports),
        *(r.export.slot for r in plan.verify if r.export is not None and r.export.slot in reached),
    ]
