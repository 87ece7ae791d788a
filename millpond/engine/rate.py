"""How fast this engine computes prompts, measured as it runs. Knows steps as numbers only."""

from __future__ import annotations

FADE = 0.95
"""What a measured step still weighs after the next one: the last 20 or so count."""

NOMINAL = 1000.0
"""Tokens per second before anything was measured."""

DRIFT = 1.25
"""The rate in force follows the measured one when they differ by more than this factor."""


class PrefillRate:
    """Prompt tokens per second, without the time of decoding beside them.

    A step that only decodes tells what decoding costs per row; of a step that does both, the rest
    is the prompts', half of it at least. What is kept in seconds uses the rate in force, which
    stands still while the measured one wavers.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0  # of prompts, fading
        self._rows = self._row_seconds = 0.0  # of decoding, fading
        self.in_force = NOMINAL

    @property
    def measured(self) -> float:
        """Of the last steps, in tokens per second; nominal until there is one."""
        return self._tokens / self._seconds if self._seconds > 0 else NOMINAL

    def observe(self, tokens: int, rows: int, seconds: float) -> float:
        """A step folded `tokens` tokens of prompts beside `rows` decoding rows in `seconds`.

        Returns the factor by which the rate in force fell: what it made dearer. 1.0: it stands.
        """
        if tokens == 0:
            self._rows = self._rows * FADE + rows
            self._row_seconds = self._row_seconds * FADE + seconds
            return 1.0
        if self._rows > 0:
            seconds -= min(rows * self._row_seconds / self._rows, seconds / 2)
        self._tokens = self._tokens * FADE + tokens
        self._seconds = self._seconds * FADE + seconds
        before, now = self.in_force, self.measured
        if before / DRIFT <= now <= before * DRIFT:
            return 1.0
        self.in_force = now
        return before / now

    def seconds(self, start: int, end: int) -> float:
        """Time to compute tokens start .. end, at the rate in force."""
        return (end - start) / self.in_force
