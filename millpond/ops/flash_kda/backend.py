"""The optional FlashKDA backend: one op, and only when it is asked for by name.

Knows how to tell whether the library is here and whether it is the one the adapter was written for.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch

from millpond.ops.bind import Backend
from millpond.ops.flash_kda.adapter import delta_prefill

ARGUMENTS = (
    "q",
    "k",
    "v",
    "g",
    "beta",
    "scale",
    "out",
    "workspace",
    "A_log",
    "dt_bias",
    "lower_bound",
    "initial_state",
    "final_state",
    "cu_seqlens",
    "checkpoint_state",
    "checkpoint_offsets",
)
"""Of `torch.ops.flash_kda.fwd` in FlashKDA ee0be888cd0e972f9409bf53756f8c38c6652173."""

FIRST_CAPABILITY = (9, 0)


def obstacle() -> str | None:
    """What is wrong with the installed library, or None: absent, broken, or of another ABI."""
    if find_spec("flash_kda") is None:
        return "FlashKDA is not installed"
    try:
        import_module("flash_kda")
    except (ImportError, OSError) as error:  # built for another torch, or for another CUDA
        return f"FlashKDA is installed and cannot be imported: {error}"
    for name in ("fwd", "get_workspace_size"):
        if not hasattr(torch.ops.flash_kda, name):
            return f"FlashKDA of another ABI: there is no operator flash_kda::{name}"
    found = tuple(a.name for a in torch.ops.flash_kda.fwd.default._schema.arguments)
    if found != ARGUMENTS:
        extra = sorted(set(found) - set(ARGUMENTS))
        missing = sorted(set(ARGUMENTS) - set(found))
        return (
            "FlashKDA of another ABI: flash_kda::fwd"
            f" lacks {', '.join(missing) or 'nothing'}, adds {', '.join(extra) or 'nothing'};"
            f" wanted ({', '.join(ARGUMENTS)})"
        )
    return None


def unusable(device: torch.device) -> str | None:
    """Why FlashKDA cannot serve on `device`, or None."""
    if (reason := obstacle()) is not None:
        return reason
    if device.type != "cuda":
        return "needs CUDA"
    capability = torch.cuda.get_device_capability(device)
    if capability < FIRST_CAPABILITY:
        return f"needs compute capability 9.0, this GPU has {'.'.join(map(str, capability))}"
    return None


BACKEND = Backend(
    name="flash_kda",
    rank=-1,  # below torch: never chosen unless named
    unusable=unusable,
    export_granularity=64,
    ops={"delta_prefill": delta_prefill},
)
