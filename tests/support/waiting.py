"""Finds calls that would make the host wait for a device, on a machine that has none.

Ops of a backend are left alone: the reference is for the CPU and asks it freely, those of a GPU are
looked at there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from millpond.ops.bind import OP_NAMES, Bound

ASKING = {
    torch.ops.aten._local_scalar_dense.default: "reads a number",
    torch.ops.aten.nonzero.default: "counts what is true",
    torch.ops.aten.masked_select.default: "counts what is true",
    torch.ops.aten.repeat_interleave.Tensor: "sums what it repeats",
    torch.ops.aten.equal.default: "compares",
}
"""Each needs the device's answer, or sends it memory that is not staged."""

INDEXING = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten.index_put.default,
)


class Waiting(TorchDispatchMode):
    """While active, notes every call of these that is not made by an op."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._within = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not self._within:
            if func in ASKING:
                self.found.append(f"{func} {ASKING[func]}")
            if func is torch.ops.aten.lift_fresh.default and args[0].ndim:
                self.found.append(f"{func} makes a tensor of Python's numbers")
            if func in INDEXING[1:] and not args[2].ndim:
                self.found.append(f"{func} sends a number")
            if func in INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1]):
                self.found.append(f"{func} counts what is true")
        return func(*args, **(kwargs or {}))

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What is called within is not looked at."""
        self._within += 1
        try:
            yield
        finally:
            self._within -= 1

    def leave_alone(self, ops: Bound) -> Bound:
        """The same ops; what they call is not looked at."""

        def free(op: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(op)
            def call(*args: Any, **kwargs: Any) -> Any:
                with self.elsewhere():
                    return op(*args, **kwargs)

            return call

        return replace(ops, **{name: free(getattr(ops, name)) for name in OP_NAMES})
