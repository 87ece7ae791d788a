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

PUBLISHED = ("kda:bfloat16", "gdn:bfloat16")
SMALL = ("small-kda:bfloat16", "small-gdn:bfloat16", "small-kda:float32")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[str]]:
    """What is told of each kernel; in a process without the interpreter, which compiles nothing."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.triton.compile_rows", *PUBLISHED, *SMALL],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {(line[0], line[1]): line[2:] for line in lines}


@pytest.mark.interpreter
@pytest.mark.parametrize("size", [*PUBLISHED, *SMALL])
def test_plain_decode_and_verify_sum_in_the_same_order(
    size: str, compiled: dict[tuple[str, str], list[str]]
) -> None:
    """Or they would not give the same bytes, which the interpreter's own sums cannot show."""
    for one, other in (("ready.ready_decode", "ready.ready_verify"),
                       ("steps._fold_decode", "steps._fold_verify")):  # fmt: skip
        assert "tensor<" in compiled[size, one][4]
        assert compiled[size, one][4] == compiled[size, other][4]


@pytest.mark.interpreter
def test_a_state_is_held_in_registers_and_moved_sixteen_bytes_at_a_time(
    compiled: dict[tuple[str, str], list[str]],
) -> None:
    found = {name: told for name, told in compiled.items() if name[0] in PUBLISHED}
    assert len(found) == 8
    per_thread = TILE // (32 * DEFAULT.tokens.warps)
    for (_, kernel), (registers, stack, loads, stores, _) in found.items():
        # A few places and counters may go to the stack, no part of a state.
        assert int(stack) <= 24, found
        if "_fold_" in kernel:
            # Room for twelve warps and more at once.
            most = DEFAULT.tokens.verify_registers if kernel.endswith("_verify") else 168
            assert per_thread <= int(registers) <= most, found
            assert per_thread // 4 <= int(loads) <= per_thread // 4 + 3, found
            assert int(stores) == 2 * (per_thread // 4), found  # the row's own, its export's
        else:
            assert int(registers) <= 96, found
