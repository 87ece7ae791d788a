"""Decode and verify rows as machine code: what a published layer's kernels need of a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from millpond.ops.triton.choices import DEFAULT

ROOT = Path(__file__).resolve().parents[3]
TILE = 128 * DEFAULT.tokens.values  # elements of a state that a program holds


@pytest.mark.interpreter
def test_a_state_is_held_in_registers_and_moved_sixteen_bytes_at_a_time(tmp_path: Path) -> None:
    """In a process without the interpreter, which compiles nothing."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.triton.compile_rows", "kda", "gdn"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = {tuple(line.split()[:2]): line.split()[2:] for line in done.stdout.splitlines()}
    assert len(found) == 8
    per_thread = TILE // (32 * DEFAULT.tokens.warps)
    for (_, kernel), (registers, stack, loads, stores) in found.items():
        # A few bytes of counters may go to the stack, no part of a state.
        assert int(stack) <= 16, done.stdout
        if "_fold_" in kernel:
            # Room for twelve warps and more at once.
            assert per_thread <= int(registers) <= 168, done.stdout
            assert per_thread // 4 <= int(loads) <= per_thread // 4 + 3, done.stdout
            assert int(stores) == 2 * (per_thread // 4), done.stdout  # the row's own, its export's
        else:
            assert int(registers) <= 96, done.stdout
