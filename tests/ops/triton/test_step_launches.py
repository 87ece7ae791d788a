"""What a step with a prompt launches, seen without a GPU: how many kernels, and by whom."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

WARM = """
import sys
from collections import Counter
from bench.engine import launching
from millpond.ops.triton.launch import Bound

by_triton, plain = [], Bound._plain

def noted(self, grid, *args):
    by_triton.append(self._jit.__name__)
    return plain(self, grid, *args)

Bound._plain = noted
worker = launching.load(sys.argv[1], 192, layers=int(sys.argv[2]))

def step(tokens):
    by_triton.clear()
    worker.launch(launching.plan(0, tokens)).result()
    return Counter(by_triton)

print("first", sum(step(64).values()))
print("again", dict(step(64)))
step(130)
print("another length", dict(step(131)))
names = launching.names_of(lambda: step(64))
print("launched", len(names))
"""


@pytest.mark.interpreter
@pytest.mark.skipif(find_spec("triton") is None or shutil.which("cc") is None, reason="needs both")
@pytest.mark.parametrize("model, layers, most", [("q4", 4, 40), ("g8", 8, 167)])
def test_a_warm_step_launches_no_more_than_it_must_and_nothing_by_triton(
    model: str, layers: int, most: int, tmp_path: Path
) -> None:
    """In a process without the interpreter. Three delta layers and one that attends of Qwen; of
    GLM eight layers. Each kernel more is some 10 us of a short prompt's time, on both sides."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", WARM, model, str(layers)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    first, again, other, launched = done.stdout.splitlines()
    assert int(first.split()[-1]) > 10
    assert again == "again {}"
    assert other == "another length {}"
    assert int(launched.split()[-1]) <= most
