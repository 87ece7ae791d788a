"""Attention's sums are dealt out alike wherever the same bytes are promised."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.interpreter
def test_whoever_selects_and_whatever_a_tile_is_sums_have_one_order(tmp_path: Path) -> None:
    """In a process without the interpreter, which compiles nothing."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.triton.compile_attention"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for dtype in ("float32", "bfloat16"):
        for kernel in ("attention._chunk", "latent._singles"):
            assert f"{kernel}, torch.{dtype}: 1 loops" in done.stdout
