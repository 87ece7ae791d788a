"""What a device tower counts about itself, as plain data; knows no device."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec


class DeviceCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Since the start of the process: kernels compiled or loaded, graphs captured and replayed.

    `late_compiles` are kernels that a request had to wait for: none, when start-up ran them all.
    """

    compiles: int = 0
    late_compiles: int = 0
    graph_captures: int = 0
    graph_replays: int = 0


@runtime_checkable
class Counting(Protocol):
    """An executor that counts."""

    def counts(self) -> DeviceCounts:
        """As of now."""


def counts_of(executor: object) -> DeviceCounts | None:
    """What `executor` counts; None of one that does not."""
    return executor.counts() if isinstance(executor, Counting) else None
