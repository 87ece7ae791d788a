"""Kernels that are compiled are counted; those that come after the start are warned of by name."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millpond.runtime.compiled import Compilations

ROOT = Path(__file__).resolve().parents[2]


def told(name: str, x: str = "*bf16") -> dict[str, Any]:
    """What Triton says of a kernel of x [count], 64 at a time."""
    return {
        "key": "opaque",
        "compile": {
            "signature": {"x": x, "count": "i32", "BLOCK": "constexpr"},
            "constants": {(2,): 64},
            "configs": [{(0,): [["tt.divisibility", 16]]}],
            "num_warps": 4,
        },
        "fn": SimpleNamespace(module="millpond.ops.triton.tokens", name=name),
        "is_manual_warmup": False,
    }


def test_kernels_are_counted_and_each_late_one_is_a_warning_with_kernel_and_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    knobs = SimpleNamespace(jit_post_compile_hook=None)
    counted = Compilations()
    counted.watch(knobs)
    with caplog.at_level(logging.WARNING):
        knobs.jit_post_compile_hook(**told("_decode"))
        counted.ready()
        assert caplog.messages == []
        knobs.jit_post_compile_hook(**told("_verify", "*fp32"))
    assert (counted.at_start, counted.late) == (1, 1)
    (message,) = caplog.messages
    assert "millpond.ops.triton.tokens._verify" in message
    assert "(x: *fp32/16, count: i32, BLOCK=64), 4 warps" in message
    counted.starting()
    knobs.jit_post_compile_hook(**told("_decode"))
    assert (counted.at_start, counted.late) == (2, 1)


def test_a_hook_that_was_there_before_goes_on_being_called_and_watching_twice_counts_once() -> None:
    heard: list[str] = []
    knobs = SimpleNamespace(jit_post_compile_hook=lambda **said: heard.append(said["fn"].name))
    counted = Compilations()
    counted.watch(knobs)
    counted.watch(knobs)
    knobs.jit_post_compile_hook(**told("_decode"))
    assert heard == ["_decode"]
    assert counted.at_start == 1


COMPILING = """
import logging, sys
import torch
from triton.runtime import driver
from bench.ops.compile import NoDriver
from millpond.ops.triton.elementwise import _sigmoid_gate
from millpond.runtime.compiled import Compilations

logging.basicConfig(stream=sys.stdout, format="%(message)s")
driver.set_active(NoDriver(90))
counted = Compilations()
counted.watch()

def compile_for(dtype):
    x = torch.zeros(4, 64, dtype=dtype)
    _sigmoid_gate.run(x, x, x, 64, 64, SIZE=64, BLOCK=64, grid=(4, 1), warmup=True, num_warps=4)

compile_for(torch.bfloat16)
counted.ready()
compile_for(torch.bfloat16)
print("counted", counted.at_start, counted.late)
compile_for(torch.float32)
print("counted", counted.at_start, counted.late)
"""


@pytest.mark.interpreter
def test_triton_tells_of_every_kernel_it_compiles_and_of_none_twice(tmp_path: Path) -> None:
    """In a process without the interpreter, which compiles nothing."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    for _ in range(2):  # the second time from the cache: to load a kernel takes time as well
        done = subprocess.run(
            [sys.executable, "-c", COMPILING],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        first, warning, second = done.stdout.splitlines()
        assert (first, second) == ("counted 1 0", "counted 1 1")
        assert "elementwise._sigmoid_gate" in warning
        assert "x: *fp32" in warning
        assert "SIZE=64" in warning
