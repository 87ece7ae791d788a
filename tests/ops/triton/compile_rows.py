"""Compiles the kernels of decode and verify rows at a published size for a GPU that is not here.

Prints a line for each: registers a thread, bytes of its stack, 16-byte loads and stores.
"""

from __future__ import annotations

import re
import sys
import warnings

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.ops import cases
from bench.ops.compile import Compiled, NoDriver, usage
from millpond.ops.triton.backend import BACKEND

CPU, DTYPE, MOST = torch.device("cpu"), torch.bfloat16, 3


def main(shapes: list[str]) -> None:
    warnings.simplefilter("ignore")
    driver.set_active(NoDriver(90))
    for name in shapes:
        where = (cases.SHAPES[name], CPU, DTYPE)
        compiled = Compiled()
        compiled.install()
        for case in (
            cases.mix_decode(*where, [1], []),
            cases.mix_verify(*where, 1, MOST, 2),
        ):
            case.call(BACKEND.ops[case.op])
        JITFunction.run = compiled.launch
        for kernel, (made, *_) in compiled.kernels.items():
            registers, stack = usage(made)
            code = made.asm["ptx"]
            wide = [len(re.findall(rf"{x}\.global\S*\.v4", code)) for x in ("ld", "st")]
            print(name, kernel.removeprefix("millpond.ops.triton."), registers, stack, *wide)


if __name__ == "__main__":
    main(sys.argv[1:])
