"""Launches compiled Triton kernels directly, without the Python work Triton does at each launch.

At every launch `JITFunction.run` binds arguments to parameters, computes the specialisation key,
finds the compiled kernel by it and calls the compiled launcher. Here a `Bound`, which is a kernel
with its constants and options, computes a shorter key that leads to the same compiled kernel, and
calls the launcher itself. Whatever it has not seen is launched by Triton, and so remembered.

**The key** mirrors Triton's specialisation: two calls with one key have one compiled kernel.

    every launch  the current device
    tensor        dtype; whether the address is a multiple of 16
    int           whether it is 1; whether it is a multiple of 16
    float         nothing: it is an fp32 whatever its value

`do_not_specialize` takes the value and the alignment out of the key, and
`do_not_specialize_on_alignment` the alignment, as in Triton. Constants and options are one `Bound`
each. There is no key, and Triton launches, for integers beyond 32 bits (another type to Triton),
for tensors elsewhere than on the current device, and for all other types of arguments. Triton also
launches while launch hooks are set or `JITFunction.run` is replaced, as by a profiler.

**The code is generated**, once for each `Bound`, from the types of its first arguments (`source`):
a loop over arguments would take the time that is to be saved. Only names such as `a0` and numbers
get into it, nothing that comes from a user.

**When Triton is upgraded**, compare with its sources:

    runtime/jit.py               what `JITFunction.run` makes the key of (`native_specialize_impl`,
                                 in C++), and what it gives to `kernel.run`
    backends/nvidia/driver.py    what the launcher takes before a kernel's own arguments (`_HEAD`),
                                 and whether `CudaLauncher.__call__` does more than pass it on
    compiler/compiler.py         `run`, `function` and `packed_metadata` of a `CompiledKernel`, and
                                 which scratch memory it may need

`_as_known` looks at some of this at import, and leaves all launches to Triton where it differs;
tests/ops/triton/test_launch.py compares keys with those of the Triton that is installed, and what
reaches a launcher. Knows no kernel.
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
"""The module `JITFunction.run` comes from, unless a profiler or a test has replaced it."""

_DIRECT = getattr(nvidia, "_BASE_ARGS_FORMAT", None) == "iiiKKppOOOOOO"
"""Whether the compiled launcher inside a `CudaLauncher` is called itself (Triton 3.6). If not, the
`CudaLauncher` is, which takes fewer arguments."""

_HEAD = (
    "cooperative, pdl, None, None, metadata, None, None, None"
    if _DIRECT
    else "metadata, None, None, None"
)
"""What the launcher takes between the function and a kernel's own arguments: metadata, and None for
scratch memory and hooks."""

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
    """A `JITFunction` with direct launches: kernel[grid](*arguments, **constants).

    It has the attributes of the `JITFunction`.
    Arguments are given by position, `tl.constexpr` parameters and options by keyword. Options that
    do not come from the call, such as those of Triton's environment, stay as at the first launch.
    """

    __slots__ = ("_bound", "jit")

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self._bound: dict[tuple[object, ...], Bound] = {}

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
        self._ready: dict[tuple[object, ...], tuple[Any, ...]] = {}
        self.launch = self._first if isinstance(jit, JITFunction) and _AS_KNOWN else self._plain

    def _plain(self, grid: tuple[int, ...], *args: Any) -> Any:
        """Launch by Triton."""
        return self._jit[grid](*args, **self._constants)

    def _first(self, grid: tuple[int, ...], *args: Any) -> None:
        """Generate the code for arguments of these types; calls with others are left to Triton."""
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

    def _new(self, key: tuple[object, ...] | None, grid: tuple[int, ...], *args: Any) -> None:
        """Launch by Triton, and remember the compiled kernel under `key`, if there is one."""
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
    """Python code of `launch` for arguments of these types; None where Triton must launch.

    That is so for parameters with type annotations, types other than tensor, int and float, and
    `tl.constexpr` parameters without a value. What the key is made of: see the module.
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
        given=", ".join((*given, *["None"] * len(rest))),  # the launcher ignores constants
    )


def quick(jit: Any) -> Any:
    """A `JITFunction` whose later launches are direct; what the interpreter runs stays as it is."""
    return Kernel(jit) if isinstance(jit, JITFunction) else jit


def bound(kernel: Any, **constants: Any) -> Bound:
    """A kernel, `quick` or not, with constants and options. Keep it: it holds the compiled ones."""
    return Bound(kernel.jit if isinstance(kernel, Kernel) else kernel, constants)


def _as_known() -> bool:
    """Whether this Triton launches as 3.6 and 3.9 do; if not, a warning says so."""
    arguments = list(inspect.signature(nvidia.CudaLauncher.__call__).parameters)[1:6]
    if (
        arguments == ["gridX", "gridY", "gridZ", "stream", "function"]
        and hasattr(knobs.runtime.launch_enter_hook, "calls")
        and hasattr(CompiledKernel, "run")
    ):
        return True
    log.warning(
        "Triton %s is not known: it launches its kernels itself, slower", triton.__version__
    )
    return False


_AS_KNOWN = _as_known()
