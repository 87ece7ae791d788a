"""Kernels launched by `quick`: the compiled one Triton would choose, and Triton itself where asked.

Triton's own choice is what its binder says; for launches a driver stands in that notes them.
"""

from __future__ import annotations

import gc
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime import driver, jit  # noqa: E402

from millpond.ops import triton as package  # noqa: E402
from millpond.ops.triton import launch  # noqa: E402
from millpond.ops.triton.shared import LAUNCH  # noqa: E402
from millpond.runtime.compiled import Compilations  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
CPU = -1
"""What torch calls the device of a tensor on the CPU, which stands for a GPU here."""

DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool)


def _kernel(x, y, z, n, m, k, f, A: tl.constexpr, B: tl.constexpr):
    if n > 0:
        tl.store(x, A + m)


LIVE = {"do_not_specialize": ["y", "m"], "do_not_specialize_on_alignment": ["m", "z", "k"]}


def made() -> Any:
    """A kernel with arguments of every kind: looked at in full, in part, and not at all."""
    return launch.Kernel(jit.JITFunction(_kernel, **LIVE))


KERNEL = jit.JITFunction(_kernel, **LIVE)
BINDER = jit.create_function_from_signature(KERNEL.signature, KERNEL.params, make_backend(HOPPER))


def chosen(args: tuple[Any, ...]) -> list[Any]:
    """By what Triton chooses a compiled kernel."""
    _, specialization, _ = BINDER(*args, A=1, B=2)
    return list(specialization)


MEMORY = torch.zeros(256, dtype=torch.uint8)
START = -MEMORY.data_ptr() % 64

tensors = st.builds(
    lambda dtype, at: MEMORY[START + 8 * at :][:8].view(dtype),
    st.sampled_from(DTYPES),
    st.integers(0, 4),
)
integers = st.one_of(
    st.integers(-2, 2),
    st.sampled_from([16, 17, 32, 2**31 - 1, -(2**31)]),
    st.integers(-(2**31), 2**31 - 1),
)
arguments = st.tuples(
    tensors, tensors, tensors, integers, integers, integers, st.one_of(st.floats(), integers)
)


class Launcher:
    """As Triton's, with what it holds inside: the launcher that is compiled."""

    def __init__(self, launched: list[tuple[Any, ...]], source: Any, metadata: Any) -> None:
        self.launched, self.metadata = launched, metadata
        self.constants = {path[0] for path in source.constants}

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *told: Any) -> None:
        options = self.metadata.launch_cooperative_grid, self.metadata.launch_pdl
        self.launch(x, y, z, stream, function, *options, None, None, *told)

    def launch(self, *told: Any) -> None:
        *where, scratch, profile, _, _, enter, leave = told[:13]
        assert scratch is profile is None
        for hook in (enter, leave):
            if hook is not None:
                hook(self.metadata)
        given = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in told[13:]]
        held = tuple(None if i in self.constants else x for i, x in enumerate(given))
        self.launched.append((*where, *held))


class Driver:
    """Loads anything, and notes what is launched instead of launching it."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.stream = 7
        self.utils = SimpleNamespace(
            load_binary=lambda name, *_: (object(), hash(name), 1, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 1 << 18},
            unload_module=lambda module: None,
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Launcher:
        return Launcher(self.launched, source, metadata)

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return CPU

    def get_current_stream(self, device: int) -> int:
        assert device == CPU
        return self.stream


class Keyed(launch.Bound):
    """Told of what is new, it keeps the key."""

    key: Any

    def _new(self, key: Any, grid: tuple[int, ...], *args: Any) -> None:
        self.key = key

    def _plain(self, grid: tuple[int, ...], *args: Any) -> None:
        self.key = None


def keyed(args: tuple[Any, ...], before: tuple[Any, ...] | None = None) -> Any:
    """The key of a launch; `before`: of an earlier one, for whose types the code was made."""
    kernel = Keyed(KERNEL, {"A": 1, "B": 2})
    if before is not None:
        kernel.launch((1,), *before)
    kernel.launch((1,), *args)
    return kernel.key


@pytest.fixture(autouse=True, scope="module")
def stand_in() -> Iterator[Driver]:
    there = Driver()
    driver.set_active(there)
    yield there
    gc.collect()  # kernels unload what they loaded
    driver.set_active(None)


@pytest.fixture
def launched(stand_in: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[Any]:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    stand_in.launched.clear()
    return stand_in.launched


@settings(max_examples=300)
@given(arguments, st.data())
def test_keys_differ_where_triton_would_choose_another_kernel_and_nowhere_else(
    args: tuple[Any, ...], data: st.DataObject
) -> None:
    """Of a kernel whose arguments are looked at in full, in part, and not at all."""
    place = data.draw(st.integers(0, 6))
    other = list(args)
    other[place] = data.draw(tensors if place < 3 else integers)
    one, two = keyed(args), keyed(tuple(other))
    if type(args[place]) is type(other[place]):
        assert (one == two) == (chosen(args) == chosen(tuple(other)))


PARAMETER = torch.nn.Parameter(MEMORY[:8].float())


@pytest.mark.parametrize(
    "place, value",
    [
        (0, None),
        (3, True),
        (3, 2**31),
        (5, 2**63),
        (4, -(2**31) - 1),
        (6, "x"),
        (1, PARAMETER),
    ],
)
def test_what_is_not_plain_has_no_key(place: int, value: Any) -> None:
    plain = (MEMORY, MEMORY, MEMORY, 4, 5, 6, 0.5)
    other = (*plain[:place], value, *plain[place + 1 :])
    assert keyed(plain) is not None
    assert keyed(other) is None
    if value is not PARAMETER:  # which is a tensor as good as any
        assert keyed(other, before=plain) is None


def test_a_tensor_elsewhere_has_no_key(stand_in: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "get_current_device", lambda: 0)
    assert keyed((MEMORY, MEMORY, MEMORY, 4, 5, 6, 0.5)) is None


def test_every_kernel_of_the_package_can_be_launched_so() -> None:
    """Arguments that vary come first, constants after them."""
    kernels = [
        found
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
        for found in vars(import_module(module.name)).values()
        if isinstance(found, launch.Kernel)
    ]
    if not knobs.runtime.interpret:
        assert len(kernels) > 20
    for kernel in kernels:
        constants = [p.is_constexpr for p in kernel.params]
        assert constants == sorted(constants), kernel
        assert not any(p.annotation for p in kernel.params if not p.is_constexpr), kernel


ARGS = (MEMORY[START:], MEMORY, MEMORY, 4, 5, 6, 0.5)


@pytest.mark.skipif(knobs.runtime.interpret, reason="a kernel cannot be compiled here")
class TestLaunch:
    def test_the_second_is_as_the_first_without_triton(
        self, launched: list[Any], stand_in: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kernel, counted, ran = made(), Compilations(), list[str]()
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
        counted.watch(knobs.runtime)
        monkeypatch.setattr(kernel.jit, "pre_run_hooks", [lambda *a, **k: ran.append("")])
        for stream in (7, 8):
            stand_in.stream = stream
            kernel[(3, 2)](*ARGS, A=1, B=2, num_warps=2, launch_pdl=True, **LAUNCH)
        first, second = launched
        assert first[:4] == (3, 2, 1, 7)
        assert second == (3, 2, 1, 8, *first[4:])
        assert len(ran) == 1
        assert counted.at_start == 1

    def test_other_constants_options_and_alignments_are_other_kernels(
        self, launched: list[Any]
    ) -> None:
        kernel = made()
        for _ in range(2):
            kernel[(1,)](*ARGS, A=1, B=2, **LAUNCH)
            kernel[(1,)](*ARGS, B=1, A=2, **LAUNCH)
            kernel[(1,)](*ARGS, A=1, B=2, num_warps=8, **LAUNCH)
            kernel[(1,)](MEMORY[START + 8 :], *ARGS[1:], A=1, B=2, **LAUNCH)
        count = len(launched) // 2
        assert launched[:count] == launched[count:]
        compiled = {id(made) for one in kernel._bound.values() for made, *_ in one._ready.values()}
        assert len(compiled) == count == 4

    def test_whoever_watches_sees_every_launch(
        self, launched: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kernel, seen = made(), list[str]()
        kernel[(1,)](*ARGS, A=1, B=2, **LAUNCH)
        with monkeypatch.context() as patch:
            patch.setattr(jit.JITFunction, "run", lambda *a, **k: seen.append("run"))
            kernel[(1,)](*ARGS, A=1, B=2, **LAUNCH)
        hook = lambda metadata: seen.append("hook")  # noqa: E731
        knobs.runtime.launch_exit_hook.add(hook)
        kernel[(1,)](*ARGS, A=1, B=2, **LAUNCH)
        knobs.runtime.launch_exit_hook.remove(hook)
        kernel[(1,)](*ARGS, A=1, B=2, **LAUNCH)
        assert seen == ["run", "hook"]
        assert len(launched) == 3


def test_a_version_that_launches_otherwise_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = SimpleNamespace(__call__=lambda self, x, y: None)
    monkeypatch.setattr(launch, "nvidia", SimpleNamespace(CudaLauncher=other))
    assert not launch._as_known()
    assert caplog.text.count("launches its kernels itself") == 1
    monkeypatch.setattr(launch, "_AS_KNOWN", False)
    assert keyed((MEMORY, MEMORY, MEMORY, 4, 5, 6, 0.5)) is None
