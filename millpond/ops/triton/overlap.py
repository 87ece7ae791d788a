"""Kernels that may be launched before the one they follow has ended (Hopper and later).

A kernel launched with `**overlap(device)` has OVERLAP among its constants. Where that is true it
must call `await_previous` before it touches memory: it returns when the kernel before has ended and
all it wrote is there, and that one has waited in the same way. `let_next_begin` lets the kernel
after it be launched, which will wait for the whole of this one all the same.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FIRST_CAPABILITY = (9, 0)


@cache
def overlap(device: torch.device) -> dict[str, Any]:
    """What is said at the launch of such a kernel. Without a GPU: as when compiling for one."""
    if knobs.runtime.interpret:
        return {"OVERLAP": False}
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@triton.jit
def await_previous():
    """All that earlier kernels wrote is there from here on."""
    gdc_wait()


@triton.jit
def let_next_begin():
    """The next kernel may be launched once all programs of this one have come here."""
    gdc_launch_dependents()
