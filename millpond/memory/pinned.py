"""Allocates page-locked host memory, with which a GPU copies asynchronously, or says why it cannot.

Does not know what the memory is for.
"""

from __future__ import annotations

import os
import resource

import torch

from millpond.errors import Refused
from millpond.units import human


def page_locked(num_bytes: int, what: str, remedy: str) -> torch.Tensor:
    """Page-locked memory, uint8 [num_bytes], not initialised.

    Raises `Refused` where the host gives none: with what was wanted for `what`, what there is, and
    the `remedy` that needs less.
    """
    try:
        return _allocate(num_bytes)
    except RuntimeError as error:
        raise Refused(
            f"{human(num_bytes)} of page-locked host memory for {what} cannot be had"
            f" ({_first_line(error)}): {_available()}; {remedy}"
        ) from error


def _allocate(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _first_line(error: RuntimeError) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _available() -> str:
    """What the host has, and what this process may lock of it."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    may = "any of it" if limit == resource.RLIM_INFINITY else f"{human(limit)} (ulimit -l)"
    return f"the host has {human(free)} free, this process may lock {may}"
