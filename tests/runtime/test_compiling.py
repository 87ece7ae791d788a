"""Kernels are compiled several at a time, without being launched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

COMPILING = """
import threading
import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from bench.ops.compile import NoDriver
from millpond.errors import Refused
from millpond.ops.triton.elementwise import sigmoid_gate, swiglu
from millpond.runtime.compiled import Compilations
from millpond.runtime.compiling import compiling

driver.set_active(NoDriver(90))
counted, names, told, run = Compilations(), set(), [], JITFunction.run
counted.watch()
x = torch.ones(4, 64, dtype=torch.bfloat16)
for _ in range(2):
    with compiling(2, lambda done, of: told.append((done, of))):
        outs = [sigmoid_gate(x, x), swiglu(x, x), sigmoid_gate(x, x), swiglu(x, x, 3.0)]
        names |= {t.name.split("_")[0] for t in threading.enumerate()}
        assert x.new_empty(3).tolist() == [0, 0, 0]
        assert torch.empty(2, dtype=torch.int64).tolist() == [0, 0]
    assert all(not out.any() for out in outs), "a kernel was launched"
    print("counted", counted.at_start)
assert JITFunction.run is run
try:
    with compiling(2):
        1 / 0
except ZeroDivisionError:
    pass
assert JITFunction.run is run
sigmoid_gate.__globals__["_sigmoid_gate"].jit.compile = lambda *_, **__: 1 / 0
try:
    with compiling(2):
        sigmoid_gate(x.float(), x.float())
except Refused as error:
    print(error)
print("threads", "millpond-compile" in names, told)
"""


@pytest.mark.interpreter
def test_kernels_are_compiled_by_threads_once_each_and_none_is_launched(tmp_path: Path) -> None:
    """In a process without the interpreter, and for a GPU that is not here."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILING],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    counted, again, refused, threads = done.stdout.splitlines()
    assert "elementwise._sigmoid_gate cannot be compiled by Triton 3." in refused
    assert "ZeroDivisionError" in refused
    assert [counted, again, threads] == [
        "counted 3",
        "counted 3",
        "threads True [(1, 3), (2, 3), (3, 3)]",
    ]
