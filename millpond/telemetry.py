"""Loggers of the package; knows no engine. Nothing touches the root logger."""

from __future__ import annotations

import logging
import sys

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def logger(name: str) -> logging.Logger:
    """The logger `millpond.<name>`."""
    return logging.getLogger(f"millpond.{name}")


def log_to_stderr(level: str) -> None:
    """Send the package's log to standard error, once, from `level` on.

    An application that has given the package's logger a handler of its own keeps it.
    """
    package = logging.getLogger("millpond")
    package.setLevel(level.upper())
    if not package.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
        )
        package.addHandler(handler)
        package.propagate = False
