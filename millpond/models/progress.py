"""Says how far something has come that takes long; knows bytes, counts and time."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

PATIENCE = 3.0
"""Seconds before anything is shown."""


class _Bar:
    """A bar on stderr, `PATIENCE` seconds in."""

    def __init__(
        self,
        title: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
    ) -> None:
        self._title = title
        self._clock = clock
        self._console = console
        self._begin = 0.0
        self._bar: Progress | None = None

    @property
    def shown(self) -> bool:
        """Whether it took long enough to be shown."""
        return self._bar is not None

    def __enter__(self) -> Self:
        self._begin = self._clock()
        return self

    def _columns(self) -> tuple[ProgressColumn, ...]:
        """What is shown beside title and bar."""
        return (MofNCompleteColumn(), TimeRemainingColumn())

    def _tell(self, done: int, total: int) -> None:
        if self._bar is None and self._clock() - self._begin > PATIENCE:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                *self._columns(),
                console=self._console or Console(stderr=True),
            )
            self._bar.add_task(self._title, total=max(total, done))
            self._bar.start()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=max(total, done))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


class LoadBar(_Bar):
    """Enter it, then call it with the bytes of each tensor."""

    def __init__(
        self,
        title: str,
        total_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
    ) -> None:
        super().__init__(title, clock=clock, console=console)
        self._total = total_bytes
        self._done = 0

    def _columns(self) -> tuple[ProgressColumn, ...]:
        return (DownloadColumn(binary_units=True), TransferSpeedColumn())

    def __call__(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._tell(self._done, self._total)


class CountBar(_Bar):
    """Enter it, then call it with how many of how many are done."""

    def __call__(self, done: int, of: int) -> None:
        self._tell(done, of)
