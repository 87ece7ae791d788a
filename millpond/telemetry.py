"""Loggers of the package; knows no engine. Nothing touches the root logger."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def logger(name: str) -> logging.Logger:
    """The logger `millpond.<name>`."""
    return logging.getLogger(f"millpond.{name}")


REQUESTS = logger("requests")
"""One line for each request, at DEBUG: at INFO those of a busy server would drown all others."""


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what standard error is at that moment, not what it was at the start."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """Standard error."""
        return sys.stderr


def log_to_stderr(level: str, *, requests: bool = False) -> None:
    """Send the package's log to standard error, once, from `level` on.

    With `requests` also the lines of `REQUESTS`, whatever the level. An application that has given
    the package's logger a handler of its own keeps it.
    """
    package = logging.getLogger("millpond")
    package.setLevel(level.upper())
    REQUESTS.setLevel(logging.DEBUG if requests else logging.NOTSET)
    if not package.handlers:
        handler = _Stderr()
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
        )
        package.addHandler(handler)
        package.propagate = False
