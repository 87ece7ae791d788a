"""What the engine counts since it started; every event is counted in one place, when it happens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Sums for `EngineStats`, in the unit of their name."""

    steps: int = 0
    steps_failed: int = 0
    steps_ahead: int = 0  # planned while the one before was in flight
    steps_waited: Counter[str] = field(default_factory=Counter)  # not planned ahead, by reason
    rows_wasted: int = 0  # planned ahead for sequences that had ended or failed meanwhile
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_tokens: Counter[str] = field(default_factory=Counter)
    checkpoints_published: Counter[str] = field(default_factory=Counter)
    checkpoints_skipped: Counter[str] = field(default_factory=Counter)  # by reason
    checkpoints_evicted: int = 0
    prefix_hits: Counter[str] = field(default_factory=Counter)  # requests, by anchor kind
    prefix_hit_tokens: Counter[str] = field(default_factory=Counter)
    holds: Counter[str] = field(default_factory=Counter)  # those that ended, by reason
    held_seconds: float = 0.0
    preemptions: int = 0
    nonfinite: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    drafts: int = 0  # rows that verified any draft tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)  # first draft, second ...

    def verified(self, drafted: Counter[int], accepted: Counter[int]) -> None:
        """Count the rows of a step: how many had so many drafts, and accepted so many."""
        for count, rows in drafted.items():
            if count:
                self.drafts += rows
                self.draft_tokens += count * rows
        for count, rows in accepted.items():
            self.accepted_tokens += count * rows
            for position in range(count):
                self.accepted_per_position[position] += rows
