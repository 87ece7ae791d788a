"""Says how far a long load has come; knows bytes and time only. A short load stays silent."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

PATIENCE = 3.0
"""Seconds of loading before anything is shown."""


class LoadBar:
    """A bar on stderr, `PATIENCE` seconds in: enter it, call it with the bytes of each tensor."""

    def __init__(
        self,
        title: str,
        total_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
    ) -> None:
        self._title = title
        self._total = total_bytes
        self._clock = clock
        self._console = console
        self._done = 0
        self._begin = 0.0
        self._bar: Progress | None = None

    @property
    def shown(self) -> bool:
        """Whether the load took long enough to be shown."""
        return self._bar is not None

    def __enter__(self) -> LoadBar:
        self._begin = self._clock()
        return self

    def __call__(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._bar is None and self._clock() - self._begin > PATIENCE:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                console=self._console or Console(stderr=True),
            )
            self._bar.add_task(self._title, total=max(self._total, self._done))
            self._bar.start()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
