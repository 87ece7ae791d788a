"""Bytes from one view to another without holding the interpreter; knows nothing of stores."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def octets(view: memoryview) -> npt.NDArray[np.uint8]:
    """The bytes of a contiguous view of any format, shared with it. `ValueError` if it has none."""
    if not view.contiguous or not view.nbytes:
        raise ValueError("a store needs contiguous bytes, at least one")
    return np.frombuffer(view, dtype=np.uint8)


def copy(into: memoryview, source: memoryview) -> None:
    """Copy all bytes. A plain slice assignment would stop every other thread meanwhile."""
    np.copyto(octets(into), octets(source))
