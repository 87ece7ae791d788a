"""Runs an op of the Triton backend on a device and its reference on the CPU, on equal inputs."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from millpond.ops.batch import WriteLog
from millpond.ops.triton.backend import BACKEND
from tests.ops.batches import strided_bank

NAN = float("nan")


def moved(x: object, device: torch.device) -> object:
    """The same thing on another device; tensors keep their strides, rows get a log of their own."""
    if isinstance(x, torch.Tensor):
        if device.type == "cpu":
            return x
        storage = torch.empty(0, dtype=x.dtype, device=device)
        storage = torch.as_strided(x, (x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
        return storage.to(device).as_strided(x.shape, x.stride(), x.storage_offset())
    if isinstance(x, tuple):
        return tuple(moved(part, device) for part in x)
    if hasattr(x, "__dataclass_fields__"):
        changed = {
            f.name: moved(getattr(x, f.name), device) for f in fields(x) if f.name != "written"
        }
        if hasattr(x, "written"):
            changed["written"] = WriteLog()
        return replace(x, **changed)
    return x


def bank_copy(bank: torch.Tensor) -> torch.Tensor:
    """A bank of the same bytes and strides in storage of its own."""
    copy = strided_bank(bank.shape[0], tuple(bank.shape[1:]), bank.dtype)
    copy.copy_(bank)
    return copy


def run(name: str, device: torch.device, *args: object, **named: object) -> object:
    """Call the Triton op with everything on `device`; what it returns, on the CPU.

    Banks and rings among `named` are changed in place, also on the CPU.
    """
    there = {key: moved(value, device) for key, value in named.items()}
    found = BACKEND.ops[name](*(moved(a, device) for a in args), **there)
    for key, value in named.items():
        if isinstance(value, torch.Tensor) and value is not there[key]:
            value.copy_(there[key])
        if hasattr(value, "written"):
            value.written.entries = [(s.cpu(), n.cpu()) for s, n in there[key].written.entries]
    if isinstance(found, tuple):
        return tuple(x.cpu() for x in found)
    return found.cpu() if isinstance(found, torch.Tensor) else found


def equal_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """A zero has a sign, and a NaN equals itself."""
    kind = {2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
