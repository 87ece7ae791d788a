"""Counts the bytes that torch operations write into one arena, and compares its entries."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
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


@cache
def _mutated(func: Any) -> tuple[int, ...]:
    """Places of the arguments that an operation writes to; most have none."""
    aliases = (argument.alias_info for argument in func._schema.arguments)
    return tuple(i for i, alias in enumerate(aliases) if alias is not None and alias.is_write)


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
        for place in _mutated(func):
            if place >= len(args) or not self._is_ours(value := args[place]):
                continue
            if func in INDEXED:
                values = args[INDEXED[func]]
                self.num_bytes += self._indexed_bytes(func, value, args, values)
            else:
                self.num_bytes += value.numel() * value.element_size()
        return func(*args, **kwargs) if kwargs else func(*args)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here; to be ready for that would double the cost of every call."""
        return False

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
    changed = (_words(arena.storage) != _words(before)).any(1).nonzero().flatten().tolist()
    return {i: int((arena.storage[i] != before[i]).sum()) for i in changed}


def unchanged(arena: Arena, before: torch.Tensor) -> bool:
    """Whether every byte is that of an earlier `snapshot`."""
    return torch.equal(_words(arena.storage), _words(before))


def _words(storage: torch.Tensor) -> torch.Tensor:
    """Bytes [entries, bytes] by eights where they can be: what is compared is the same, sooner."""
    return storage if storage.shape[1] % 8 else storage.view(torch.int64)


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
