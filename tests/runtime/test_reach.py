"""What the bytes of slots and pages are called: other GPUs and compilers make others."""

from __future__ import annotations

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
