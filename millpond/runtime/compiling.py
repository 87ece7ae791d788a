"""Many kernels compiled at a time: a pass over steps in which Triton launches nothing.

Knows how Triton is asked to compile without launching; does not know which kernels there are. What
kernels would have written is zero, so that torch's own operations go on with valid numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from millpond.errors import Refused

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
    cost nothing. Raises `Refused`, naming it, for a kernel that this version of Triton cannot
    compile.
    """
    triton = import_module("triton")
    kernel = import_module("triton.runtime.jit").JITFunction
    launch = kernel.run
    begun: dict[Future[Any], str] = {}

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        made = launch(self, *args, grid=grid, warmup=True, **options)
        future = getattr(made, "future", None)
        if future is not None:
            begun[future] = f"{self.__module__}.{self.__name__}"
        return made

    pool = ThreadPoolExecutor(min(threads, MOST_THREADS), "millpond-compile")
    # What fails is raised below, with its name.
    with pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        kernel.run = compile_only
        try:
            with zeros():
                yield
        finally:
            kernel.run = launch
        for done, future in enumerate(as_completed(begun), 1):
            progress(done, len(begun))
            error = future.exception()
            if error is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                raise Refused(
                    f"kernel {begun[future]} cannot be compiled by Triton {triton.__version__}:"
                    f" {type(error).__name__}: {error}"
                ) from error
