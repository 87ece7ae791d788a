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
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

log = logging.getLogger(__name__)

Launch = Callable[..., None]
"""(grid, *arguments), constants and options being settled."""

_HOME = JITFunction.__module__
"""Whoever puts something from elsewhere in the place of `JITFunction.run` wants to see launches."""

_DIRECT = getattr(nvidia, "_BASE_ARGS_FORMAT", None) == "iiiKKppOOOOOO"
"""Whether the compiled launcher inside Triton's launcher object takes what is known here."""

_HEAD = (
    "cooperative, pdl, None, None, metadata, None, None, None"
    if _DIRECT
    else ("metadata, None, None, None")
)
"""What stands between function and arguments: no scratch memory, hooks, nor anything for them."""

_CODE = """
def launch(grid, {arguments}):
    active, runtime = driver.active, knobs.runtime
    device, key = active.get_current_device(), None
    try:
        {addresses}
        if {checks}:
            key = (device, {key},)
    except AttributeError:  # no tensor where there was one
        pass
    found = None if key is None else ready.get(key)
    if (
        found is None
        or JITFunction.run.__module__ != home
        or runtime.launch_enter_hook.calls
        or runtime.launch_exit_hook.calls
    ):
        return new(key, grid, {arguments})
    x, y, z = (*grid, 1, 1)[:3]
    _, call, function, metadata, cooperative, pdl = found
    call(x, y, z, active.get_current_stream(device), function, {head}, {given})
"""


class Kernel:
    """A kernel of Triton's, launched as those are: kernel[grid](*arguments, **constants).

    All that is no constant goes by position; options are among the constants, and those that come
    from outside a launch are as they were at the first one. Whatever else the kernel has is found
    here, too.
    """

    __slots__ = ("_bound", "jit")

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self._bound: dict[Any, Bound] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jit, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        # What compares equal, as 1 and True, is one constant to Triton, too.
        key = (tuple(constants), tuple(constants.values()))
        found = self._bound.get(key)
        if found is None:
            found = self._bound[key] = Bound(self.jit, constants)
        found.launch(grid, *args)


class Bound:
    """A kernel with constants and options: `launch` takes grid and arguments."""

    __slots__ = ("_constants", "_jit", "_ready", "launch")

    launch: Launch

    def __init__(self, jit: Any, constants: dict[str, Any]) -> None:
        self._jit, self._constants = jit, constants
        self._ready: dict[Any, tuple[Any, ...]] = {}
        self.launch = self._first if isinstance(jit, JITFunction) and _AS_KNOWN else self._plain

    def _plain(self, grid: tuple[int, ...], *args: Any) -> Any:
        """By Triton."""
        return self._jit[grid](*args, **self._constants)

    def _first(self, grid: tuple[int, ...], *args: Any) -> None:
        """What comes later has arguments of the same types, or is left to Triton."""
        code = source(self._jit, tuple(map(type, args)), frozenset(self._constants))
        if code is None:
            self.launch = self._plain
        else:
            space = {
                "driver": driver, "knobs": knobs, "JITFunction": JITFunction, "home": _HOME,
                "ready": self._ready, "new": self._new,
            }  # fmt: skip
            exec(code, space)
            self.launch = space["launch"]
        self.launch(grid, *args)

    def _new(self, key: Any, grid: tuple[int, ...], *args: Any) -> None:
        """By Triton; what it launched is remembered under `key`, if there is one."""
        made = self._plain(grid, *args)
        if key is None or JITFunction.run.__module__ != _HOME or type(made) is not CompiledKernel:
            return
        run, metadata = made.run, made.metadata
        options = metadata.launch_cooperative_grid, metadata.launch_pdl
        call = run.launch if _DIRECT else run
        if not metadata.global_scratch_size and not metadata.profile_scratch_size:
            # The kernel itself is kept as well: its end unloads the function.
            self._ready[key] = (made, call, made.function, made.packed_metadata, *options)


def source(jit: Any, types: tuple[type, ...], constants: frozenset[str]) -> str | None:
    """Code of a launch with arguments of these types; None where Triton must do it all.

    Where two calls have one key, Triton chooses one compiled kernel. Arguments that are not all on
    the current device have none, nor have integers beyond 32 bits.
    """
    runtime, rest = jit.params[: len(types)], jit.params[len(types) :]
    if (
        not set(types) <= {torch.Tensor, int, float}
        or torch.Tensor not in types
        or any(p.is_constexpr or p.annotation for p in runtime)
        or not all(p.is_constexpr and p.name in constants for p in rest)
    ):
        return None
    addresses, checks, key, given = list[str](), list[str](), list[str](), list[str]()
    for place, (kind, param) in enumerate(zip(types, runtime, strict=True)):
        arg, at = f"a{place}", f"p{place}"
        valued = not param.do_not_specialize
        aligned = valued and not param.do_not_specialize_on_alignment
        if kind is torch.Tensor:
            addresses.append(f"{at} = {arg}.data_ptr()")
            checks.append(f"{arg}.get_device() == device")
            key += [f"{arg}.dtype", *[f"{at} % 16 == 0"] * aligned]
            given.append(at)
            continue
        checks.append(f"{arg}.__class__ is {kind.__name__}")
        given.append(arg)
        if kind is int:
            checks.append(f"-{2**31} <= {arg} < {2**31}")
            key += [f"{arg} == 1"] * valued + [f"{arg} % 16 == 0"] * aligned
    return _CODE.format(
        arguments=", ".join(f"a{place}" for place in range(len(types))),
        addresses="; ".join(addresses),
        checks=" and ".join(checks),
        key=", ".join(key),
        head=_HEAD,
        given=", ".join((*given, *["None"] * len(rest))),  # nobody looks at a constant's place
    )


def quick(jit: Any) -> Any:
    """What `triton.jit` made, to be launched with less ado; what is interpreted stays as it is."""
    return Kernel(jit) if isinstance(jit, JITFunction) else jit


def bound(kernel: Any, **constants: Any) -> Bound:
    """A kernel, quick or not, with constants and options. To be kept by whoever launches it."""
    return Bound(kernel.jit if isinstance(kernel, Kernel) else kernel, constants)


def _as_known() -> bool:
    """Whether this version of Triton launches as the ones known here; if not, the log says so."""
    arguments = list(inspect.signature(nvidia.CudaLauncher.__call__).parameters)[1:6]
    if (
        arguments == ["gridX", "gridY", "gridZ", "stream", "function"]
        and hasattr(knobs.runtime.launch_enter_hook, "calls")
        and hasattr(CompiledKernel, "run")
    ):
        return True
    log.warning("Triton %s launches its kernels itself, not as fast", triton.__version__)
    return False


_AS_KNOWN = _as_known()
