"""What the bytes of slots and pages are called: other GPUs and compilers make others."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from millpond.memory.layout import EntrySpec, ModelLayout, TensorSpec
from millpond.ops.bind import bind
from millpond.runtime import reach

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def layout(heads: int = 2) -> ModelLayout:
    slot = EntrySpec((TensorSpec(0, "recurrent", (heads, 4, 4), torch.float32),))
    page = EntrySpec((TensorSpec(1, "key", (2, 64, 8), torch.bfloat16),))
    return ModelLayout(slot, page, EntrySpec(()))


def test_equal_towers_make_equal_bytes_and_another_layout_does_not() -> None:
    ops = bind(CPU)
    assert reach.made(layout(), ops, CPU) == reach.made(layout(), ops, CPU)
    assert reach.made(layout(), ops, CPU).layout != reach.made(layout(4), ops, CPU).layout


def test_states_that_other_kernels_wrote_have_other_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a GPU a kernel that was changed and has kept its name makes other bytes all the same."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    package = tmp_path / "kernels_of_tests"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def named(source: str, file: str = "delta.py") -> str:
        (package / file).write_text(source)
        reach._sources.cache_clear()
        ops = bind(CPU)
        op = types.FunctionType((lambda: None).__code__, {"__name__": "kernels_of_tests.delta"})
        return reach.made(layout(), replace(ops, delta_prefill=op), CUDA).kernels

    before = named("x = a + b * c")
    assert named("x = a + b * c") == before
    others = {named("x = fma(b, c, a)"), named("shared = 2", "shared.py"), before}
    assert len(others) == 3
    (package / "shared.py").unlink()
    assert named("x = a + b * c") == before


def test_sources_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reach._sources.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    for _ in range(5):
        reach.made(layout(), bind(CPU), CUDA)
    assert reach._sources.cache_info().misses == 1


def test_states_of_other_gpus_and_compilers_have_other_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops, names = bind(CPU), [reach.made(layout(), bind(CPU), CPU).kernels]
    monkeypatch.setattr(reach, "find_spec", lambda name: object())
    for gpu, compiler in (("H200", "3.6.0"), ("H100", "3.6.0"), ("H200", "3.9.0")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, gpu=gpu: gpu)
        monkeypatch.setattr(reach.metadata, "version", lambda name, found=compiler: found)
        names.append(reach.made(layout(), ops, CUDA).kernels)
    assert len(set(names)) == 4
