"""Counts the bytes that torch operations write into one arena, and compares its entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from millpond.memory.arena import Arena

INDEXED = {
    torch.ops.aten.index_put_.default: 2,
    torch.ops.aten._index_put_impl_.default: 2,
    torch.ops.aten.index_copy_.default: 3,
    torch.ops.aten.index_fill_.int_Scalar: 2,
}
"""Operations that write only what they are given: which argument holds it, or says where."""


class CountWrites(TorchDispatchMode):
    """While active, sums the bytes written to `arena`: by whom does not matter, nor what for.

    Operations that write by index count the bytes of their values, any other mutation all bytes of
    the view it mutates.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._storage = arena.storage.untyped_storage().data_ptr()
        self.num_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            if not self._is_ours(value):
                continue
            if func in INDEXED:
                values = args[INDEXED[func]]
                self.num_bytes += self._indexed_bytes(func, value, args, values)
            else:
                self.num_bytes += value.numel() * value.element_size()
        return func(*args, **kwargs)

    def _is_ours(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == self._storage
        )

    def _indexed_bytes(
        self, func: Any, target: torch.Tensor, args: tuple[Any, ...], values: torch.Tensor
    ) -> int:
        if func is torch.ops.aten.index_copy_.default:
            return values.numel() * values.element_size()
        if func is torch.ops.aten.index_fill_.int_Scalar:  # along the first axis
            return values.numel() * target[0].numel() * target.element_size()
        # A scalar is spread over everything indexed.
        selected = torch.broadcast_shapes(*(i.shape for i in args[1] if i is not None))
        rest = target.shape[len(args[1]) :]
        kept = [n for n, i in zip(target.shape, args[1], strict=False) if i is None]
        count = selected.numel()
        for n in (*rest, *kept):
            count *= n
        return count * target.element_size()


def changed_entries(arena: Arena, before: torch.Tensor) -> dict[int, int]:
    """How many bytes of each entry differ from an earlier `snapshot`; unchanged ones left out."""
    differ = (arena.storage != before).sum(1)
    return {i: int(n) for i, n in enumerate(differ) if n}


def snapshot(arena: Arena) -> torch.Tensor:
    """A copy of all bytes."""
    return arena.storage.clone()


def counted(module: Any, name: str, monkeypatch: Any) -> list[int]:
    """Replace `module.name` by a counting twin; the list's length is the number of calls."""
    calls: list[int] = []
    original: Callable[..., Any] = getattr(module, name)

    def twin(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, twin)
    return calls
