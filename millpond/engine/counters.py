"""What the engine counts since it started; every event is counted in one place, when it happens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Sums for `EngineStats`, in the unit of their name."""

    steps: int = 0
    steps_failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_tokens: Counter[str] = field(default_factory=Counter)
    checkpoints_published: Counter[str] = field(default_factory=Counter)
    checkpoints_skipped: int = 0
    checkpoints_evicted: int = 0
    preemptions: int = 0
    nonfinite: int = 0
    finished: Counter[str] = field(default_factory=Counter)
