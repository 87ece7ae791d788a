"""On which device a rank computes, in which dtype, and what makes that device the current one.

Knows names and torch's devices; does not know what runs there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from millpond.errors import Refused

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Place = Callable[[], AbstractContextManager[object]]
"""Makes a context in which one device is the current one of the calling thread. Kernels, events,
page-locked memory and recordings belong to the device that is current when they are made, whatever
tensors they are given."""


def place_of(device: torch.device) -> Place:
    """The contexts of a device; those of the CPU do nothing."""
    return partial(torch.cuda.device, device) if device.type == "cuda" else nullcontext


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is some, the CPU elsewhere; what is named is used or refused.

    A CUDA device is named with its number from here on, so that nobody has to ask which one it is.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as cause:
        raise Refused(f"device {name!r} is not known: {cause}") from cause
    if device.type not in ("cpu", "cuda"):
        raise Refused(f"device {name!r} is not supported: use cpu or cuda")
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise Refused(f"device {name!r} was asked for, and torch {torch.__version__} finds no CUDA")
    if ":" not in name:
        return torch.device("cuda", torch.cuda.current_device())
    count = torch.cuda.device_count()
    if device.index >= count:
        raise Refused(f"device {name!r} was asked for, there are {count} CUDA devices")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on the CPU and bfloat16 elsewhere; what is named is used as asked."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise Refused(f"dtype {name!r} is not supported: use auto, {', '.join(DTYPES)}")
    return DTYPES[name]
