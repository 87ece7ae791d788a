"""Kernels that may be launched before the one they follow has ended (Hopper and later).

A kernel launched with `**overlap(device)` has OVERLAP among its constants. Where that is true it
must call `await_previous` before it touches anything that an earlier kernel writes or reads; before
that it may read weights. `let_next_begin` lets the kernel after it be launched, which will wait for
the whole of this one all the same.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
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


@triton.jit
def prefetch(pointers):
    """Ask for the 128 bytes at each pointer; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
