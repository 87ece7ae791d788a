"""Launches without what Triton works out anew at every one of them.

Knows by what Triton tells compiled kernels apart: types, constants, what addresses and integers are
multiples of. Does not know any kernel. What is new, or holds anything but tensors and numbers, is
launched by Triton; so is everything while somebody watches launches or stands in Triton's way.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

log = logging.getLogger(__name__)

Reader = Callable[..., tuple[Any, tuple[Any, ...]]]
"""Of (device, *arguments): what a kernel is chosen by, or None, and what its launch is given."""

HALF = 2**31
"""Integers beyond 32 bits are left to Triton."""

_RUN = JITFunction.run
"""Whoever puts something else in its place wants to see every launch."""


class Ready(NamedTuple):
    """A compiled kernel that has been launched before."""

    kernel: CompiledKernel  # kept, as its end unloads the function
    run: Callable[..., None]
    function: int
    metadata: Any
    constants: tuple[None, ...]  # they have places in a launch, too, which nobody looks at


class Kernel:
    """A kernel of Triton's and what it was compiled to; whatever else it has is found here, too.

    Launched as Triton's are, with all that is no constant by position, constants and options by
    name. Options that come from outside a launch are those of the first one.
    """

    __slots__ = ("_known", "jit")

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self._known: dict[Any, tuple[Reader, dict[Any, Ready]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jit, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **fixed: Any) -> None:
        # What compares equal, as 1 and True, is one constant to Triton, too.
        site = (tuple(map(type, args)), tuple(fixed), tuple(fixed.values()))
        found = self._known.get(site)
        if found is None:
            found = self._known[site] = reader(self.jit, site[0], site[1]), {}
        read, compiled = found
        active, runtime = driver.active, knobs.runtime
        device = active.get_current_device()
        key, given = read(device, *args)
        ready = compiled.get(key)
        watched = (
            JITFunction.run is not _RUN
            or runtime.launch_enter_hook.calls
            or runtime.launch_exit_hook.calls
        )
        if ready is None or watched:
            made = self.jit[grid](*args, **fixed)
            if key is not None and not watched and isinstance(made, CompiledKernel):
                places = (None,) * (len(self.jit.params) - len(args))
                compiled[key] = Ready(made, made.run, made.function, made.packed_metadata, places)
            return
        x, y, z = (*grid, 1, 1)[:3]
        _, run, function, metadata, constants = ready
        stream = active.get_current_stream(device)
        run(x, y, z, stream, function, metadata, None, None, None, *given, *constants)


def reader(jit: Any, types: tuple[type, ...], names: tuple[str, ...]) -> Reader:
    """Straight code for arguments of these types, with `names` given beside them.

    Where two calls have one key, Triton chooses one compiled kernel. There is none for arguments
    that are not all on `device`, the current one, for wide integers, and for all but tensors,
    integers and floats.
    """
    runtime, constants = jit.params[: len(types)], jit.params[len(types) :]
    if (
        not set(types) <= {torch.Tensor, int, float}
        or torch.Tensor not in types
        or any(p.is_constexpr or p.annotation for p in runtime)
        or not all(p.is_constexpr and p.name in names for p in constants)
    ):
        return lambda device, *args: (None, ())
    lines, checks, key, given = list[str](), list[str](), list[str](), list[str]()
    for place, (kind, param) in enumerate(zip(types, runtime, strict=True)):
        arg = f"a{place}"
        valued = not param.do_not_specialize
        aligned = valued and not param.do_not_specialize_on_alignment
        if kind is torch.Tensor:
            lines.append(f"p{place} = {arg}.data_ptr()")
            checks.append(f"{arg}.get_device() == device")
            key += [f"{arg}.dtype", *[f"p{place} % 16 == 0"] * aligned]
            given.append(f"p{place}")
        else:
            given.append(arg)
        if kind is int:
            checks.append(f"-HALF <= {arg} < HALF")
            key += [f"{arg} == 1"] * valued + [f"{arg} % 16 == 0"] * aligned
    code = (
        f"def read(device, {', '.join(f'a{place}' for place in range(len(types)))}):",
        *lines,
        f"if {' and '.join(checks)}: return (device, {', '.join(key)}), ({', '.join(given)},)",
        "return None, ()",
    )
    made: dict[str, Any] = {"HALF": HALF}
    exec("\n    ".join(code), made)
    found: Reader = made["read"]
    return found


def quick(jit: Any) -> Any:
    """What `triton.jit` made, to be launched with less ado; what is interpreted stays as it is."""
    return Kernel(jit) if isinstance(jit, JITFunction) and _AS_KNOWN else jit


def _as_known() -> bool:
    """Whether this version of Triton launches as the ones known here; if not, the log says so."""
    arguments = list(inspect.signature(CudaLauncher.__call__).parameters)[1:6]
    if (
        arguments == ["gridX", "gridY", "gridZ", "stream", "function"]
        and hasattr(knobs.runtime.launch_enter_hook, "calls")
        and hasattr(CompiledKernel, "run")
    ):
        return True
    log.warning("Triton %s launches its kernels itself, not as fast", triton.__version__)
    return False


_AS_KNOWN = _as_known()
