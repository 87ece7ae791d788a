"""No request asks for a kernel that warming up did not; by Triton's own keys, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def asked(kind: str, drafts: int, kinds: str = "every") -> list[str]:
    """What the process has to say: late kernels, then numbers."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.asked_kernels", kind, str(drafts), kinds],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.interpreter
@pytest.mark.parametrize(("kind", "drafts"), [("qwen", 0), ("glm", 3)])
def test_no_request_makes_a_kernel_compile_that_warming_up_did_not(kind: str, drafts: int) -> None:
    *late, last = asked(kind, drafts)
    assert late == []
    _, number, _, beyond = last.split()
    assert int(number) > 25
    assert int(beyond) == 0


@pytest.mark.interpreter
def test_a_warm_up_that_leaves_kinds_out_is_found_out_by_name() -> None:
    *late, last = asked("glm", 0, "one")
    assert any("ops.triton." in line and "was compiled while" in line for line in late)
    assert int(last.split()[-1]) > 0


@pytest.mark.slow
def test_every_kernel_that_a_start_asks_for_compiles_for_a_gpu(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "bench.ops.start", "--models", "tiny-g8", "--drafts", "1"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("steps._fold_verify", "latent._singles", "moe._up", "sampling._cuts"):
        assert kernel in done.stdout
