"""Compiles the kernels for a GPU that need not be here: registers, spills, shared memory.

python -m bench.ops.compile [--shapes kda,gdn] [--dtypes bfloat16,float32] [--capability 90]

Calls every op of the Triton backend with inputs on the CPU and a driver that launches nothing.
Each op is called with several live batches (one row and many, odd numbers, exports, tensors that
begin anywhere); a kernel that is compiled again for one of them is an error. What this does not
show: that a kernel is right, or fast.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.ops import cases
from millpond.ops.triton.backend import BACKEND

RESOURCES = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
CPU = torch.device("cpu")


class NoDriver:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """There is one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        del device
        return 0


class Compiled:
    """What was compiled while launches were kept from happening."""

    def __init__(self) -> None:
        self.kernels: dict[str, list[Any]] = {}
        self.launch = JITFunction.run

    def install(self) -> None:
        """Every launch becomes a compilation."""
        record = self

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            del warmup
            made = record.launch(kernel, *args, grid=grid, warmup=True, **options)
            known = record.kernels.setdefault(f"{kernel.__module__}.{kernel.__name__}", [])
            if not any(made is k for k in known):
                known.append(made)
            return made

        JITFunction.run = run


def usage(kernel: Any) -> tuple[int, int]:
    """Registers a thread, and bytes of its stack (spills), from the machine code."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        text = subprocess.run(
            [RESOURCES, "-res-usage", binary], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (-1, -1)


def off_by_one_token(case: cases.Case) -> cases.Case:
    """The same case with token tensors that begin one token later in memory."""
    moved = tuple(
        torch.cat((x[:1], x))[1:] if x.shape[0] > 1 and x.is_contiguous() else x for x in case.args
    )
    return cases.Case(case.op, case.label, case.shape, moved, case.named, case.least_bytes)


def batches(shape: cases.Shape, dtype: torch.dtype) -> Iterator[list[cases.Case]]:
    """Live batches that must share their kernels, op by op."""
    where = (shape, CPU, dtype)
    prompts = [([64], []), ([3], [(0, 3)]), ([64] * 16, [(1, 64)] * 16), ([1, 65, 0], [(1, 64)])]
    singles = [([1], []), ([1] * 16, [(0, 1)]), ([1] * 5, [])]
    verify = [(rows, 3, 2, exports) for rows, exports in ((1, 0), (16, 3), (5, 1))]
    yield [cases.prefill(*where, *p) for p in prompts]
    yield [cases.conv(*where, *p) for p in prompts]
    yield [cases.mix_decode(*where, *p) for p in singles]
    yield [cases.mix_verify(*where, *v) for v in verify]


def main(arguments: list[str]) -> int:
    """Exit 1 when a live batch made a kernel compile again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", default="kda,gdn")
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--capability", type=int, default=90)
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    driver.set_active(NoDriver(chosen.capability))
    again = 0
    for shape in chosen.shapes.split(","):
        for dtype in chosen.dtypes.split(","):
            print(f"{shape}, {dtype}, sm_{chosen.capability}, Triton {triton.__version__}")
            compiled = Compiled()
            compiled.install()
            for several in batches(cases.SHAPES[shape], getattr(torch, dtype)):
                for case in several:
                    case.call(BACKEND.ops[case.op])
                    off_by_one_token(case).call(BACKEND.ops[case.op])
            JITFunction.run = compiled.launch
            for name, kernels in compiled.kernels.items():
                registers, stack = usage(kernels[0])
                meta = kernels[0].metadata
                print(
                    f"  {name.removeprefix('millpond.ops.triton.'):<18} {registers:4d} registers"
                    f" {stack:5d} B spilled {meta.shared:7d} B shared  {meta.num_warps} warps"
                    + (f"  COMPILED {len(kernels)} TIMES" if len(kernels) > 1 else "")
                )
                again += len(kernels) - 1
    if again:
        print(f"compile: the live batch made kernels compile {again} more times")
    return 1 if again else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
