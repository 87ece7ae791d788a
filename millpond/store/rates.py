"""How fast a store moves bytes, measured as it does; knows transfers as numbers only."""

from __future__ import annotations

FADE = 0.9
"""What a transfer still weighs after the next one."""


class TransferRate:
    """Seconds of a transfer: a fixed part, and one for every byte. Before any, both are guessed."""

    def __init__(self, *, bytes_per_second: float = 1e9, overhead: float = 1e-3) -> None:
        self._overhead = overhead
        self._bytes, self._seconds = bytes_per_second * 1e-3, 1e-3  # weighs as a millisecond does

    @property
    def overhead(self) -> float:
        """Seconds that a call without bytes takes."""
        return self._overhead

    @property
    def bytes_per_second(self) -> float:
        """Of the last transfers, without the fixed part."""
        return self._bytes / self._seconds

    def answered(self, seconds: float) -> None:
        """A call without bytes took so long."""
        self._overhead = FADE * self._overhead + (1 - FADE) * seconds

    def moved(self, num_bytes: int, seconds: float) -> None:
        """A transfer took so long, all in all."""
        self._bytes = FADE * self._bytes + num_bytes
        self._seconds = FADE * self._seconds + max(seconds - self._overhead, seconds / 10, 1e-9)

    def seconds(self, num_bytes: int) -> float:
        """What to expect."""
        return self._overhead + num_bytes / self.bytes_per_second
