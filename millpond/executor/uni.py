"""The executor of one process: plans are launched on the thread that brings them."""

from __future__ import annotations

from millpond.errors import Broken
from millpond.plan.counts import DeviceCounts
from millpond.plan.step import Capabilities, Launched, StepPlan
from millpond.runtime.reach import Made
from millpond.runtime.worker import Worker
from millpond.store.memory import RankMemory


class UniExecutor:
    """Satisfies `plan.step.Executor` with a single rank."""

    def __init__(self, worker: Worker) -> None:
        self._worker: Worker | None = worker
        self._capabilities = worker.capabilities

    @property
    def capabilities(self) -> Capabilities:
        """Fixed facts about the device tower."""
        return self._capabilities

    def memories(self, staging_bytes: int | None = None) -> tuple[RankMemory, ...]:
        """The slots and pages of each rank, as a store may reach them. Raises `Refused`.

        On a device by way of `staging_bytes` of host memory each (None: as many as are of use).
        """
        if self._worker is None:
            raise Broken("a closed executor has no memory")
        return (self._worker.memory(staging_bytes),)

    @property
    def makes(self) -> Made:
        """What shapes the bytes in its slots and pages, besides tokens and weights."""
        if self._worker is None:
            raise Broken("a closed executor makes nothing")
        return self._worker.made

    def launch(self, plan: StepPlan) -> Launched:
        """Hand a plan to the rank; its result raises what went wrong."""
        if self._worker is None:
            raise Broken(f"step {plan.step} was sent to a closed executor")
        return self._worker.launch(plan)

    def counts(self) -> DeviceCounts:
        """Kernels and graphs, since the start."""
        return DeviceCounts() if self._worker is None else self._worker.counts()

    def close(self) -> None:
        """Give back model and arenas. Closing twice is closing once."""
        self._worker = None
