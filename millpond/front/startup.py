"""How far the start of an engine has come, and how long its phases took; knows no engine."""

from __future__ import annotations

import time

from millpond.telemetry import logger

log = logger("start")
READY = "ready"


class Startup:
    """Phases in order, each until the next begins; `ready` is the last."""

    def __init__(self, begin: float | None = None, phase: str = "planning") -> None:
        self.phase = phase
        self.seconds: dict[str, float] = {}  # of the phases that are over
        self._begin = self._entered = time.perf_counter() if begin is None else begin

    @classmethod
    def over(cls) -> Startup:
        """Of something that was ready from the first."""
        return cls(phase=READY)

    @property
    def ready(self) -> bool:
        """Whether the last phase has been reached."""
        return self.phase == READY

    @property
    def elapsed(self) -> float:
        """Seconds from the beginning to the end, or to now."""
        return (self._entered if self.ready else time.perf_counter()) - self._begin

    @property
    def summary(self) -> str:
        """How long it took, in one line."""
        parts = [f"{name} {seconds:.1f}" for name, seconds in self.seconds.items()]
        return f"ready after {self.elapsed:.1f} s: {', '.join(parts)}"

    def enter(self, phase: str) -> None:
        """The phase so far is over, and `phase` begins."""
        now = time.perf_counter()
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._entered
        self.phase, self._entered = phase, now
        if phase == READY:
            log.info("%s", self.summary)
