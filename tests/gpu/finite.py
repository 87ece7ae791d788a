"""Looks at the bytes of every state that a step of any worker of this process has left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from millpond.memory.arena import Arena
from millpond.plan.step import Launched, StepPlan, StepResult
from millpond.runtime.worker import Worker


@dataclass
class States:
    """How many were looked at, exports among them, and which were not finite."""

    count: int = 0
    exports: int = 0
    broken: list[str] = field(default_factory=list)

    def look(self, plan: StepPlan, result: StepResult, slots: Arena) -> None:
        """At what a step says it has written."""
        written = sorted({w.slot for w in result.written})
        rows = plan.prefill + plan.decode
        exported = {e.slot for row in rows for e in row.exports}
        exported |= {row.export.slot for row in plan.verify if row.export is not None}
        self.count += len(written)
        self.exports += len(exported.intersection(written))
        for name in not_finite(slots, written):
            self.broken.append(f"step {plan.step}: {name}")


def not_finite(arena: Arena, entries: Sequence[int]) -> list[str]:
    """Tensors of `entries` that hold a NaN or an infinity."""
    if not entries:
        return []
    at = torch.tensor(entries, device=arena.storage.device)
    names, sound = [], []
    for tensor in arena.spec.tensors:
        if tensor.dtype.is_floating_point:
            names.append(f"{tensor.name} of layer {tensor.layer}")
            sound.append(arena.view(tensor.layer, tensor.name)[at].isfinite().all())
    return [name for name, ok in zip(names, torch.stack(sound).tolist(), strict=True) if not ok]


class _Looked:
    """A step in flight whose states are looked at when it has ended."""

    def __init__(self, inner: Launched, plan: StepPlan, worker: Worker, states: States) -> None:
        self._inner, self._plan, self._worker, self._states = inner, plan, worker, states

    def result(self) -> StepResult:
        """What the step came to. A step launched after it has written its own by now, or will."""
        result = self._inner.result()
        with torch.inference_mode():
            self._states.look(self._plan, result, self._worker.runner.arenas.slots)
        return result


@contextmanager
def states_looked_at() -> Iterator[States]:
    """While active, every state is looked at, in every engine of this process."""
    states, launch = States(), Worker.launch

    def looked(worker: Worker, plan: StepPlan) -> Launched:
        return _Looked(launch(worker, plan), plan, worker, states)

    Worker.launch = looked  # type: ignore[method-assign, assignment]
    try:
        yield states
    finally:
        Worker.launch = launch  # type: ignore[method-assign]
