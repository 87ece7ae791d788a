"""Many kernels compiled at a time: a pass over steps in which Triton launches nothing.

Knows how Triton is asked to compile without launching; does not know which kernels there are. What
kernels would have written is zero, so that torch's own operations go on with valid numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Progress = Callable[[int, int], None]

MOST_THREADS = 16
"""Compilations under way at once; a part of each holds Python's lock."""

_EMPTY: MappingProxyType[Callable[..., Any], Callable[..., Any]] = MappingProxyType(
    {
        torch.empty: torch.zeros,
        torch.empty_like: torch.zeros_like,
        torch.Tensor.new_empty: torch.Tensor.new_zeros,
    }
)


class zeros(TorchFunctionMode):
    """Within, memory begins as zeros instead of whatever was there."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        return _EMPTY.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def compiling(threads: int, progress: Progress = lambda done, of: None) -> Iterator[None]:
    """Within, kernels that are called are compiled by `threads` threads, and not launched.

    All are ready when it is left; `progress` hears how many are. Kernels that are there already
    cost nothing.
    """
    triton = import_module("triton")
    kernel = import_module("triton.runtime.jit").JITFunction
    launch = kernel.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        return launch(self, *args, grid=grid, warmup=True, **options)

    pool = ThreadPoolExecutor(min(threads, MOST_THREADS), "millpond-compile")
    mode = triton.AsyncCompileMode(pool)
    with pool, mode:
        kernel.run = compile_only
        try:
            with zeros():
                yield
        finally:
            kernel.run = launch
        begun = tuple(mode.raw_futures)
        for done, _ in enumerate(as_completed(begun), 1):
            progress(done, len(begun))
