"""Compiles the kernels of decode and verify rows at a published size for a GPU that is not here.

Prints a line for each: registers a thread, bytes of its stack, 16-byte loads and stores; then how
what it sums lies in its threads, which decides the order of sums.
"""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.ops import cases
from bench.ops.compile import Compiled, NoDriver, usage
from millpond.ops.triton.backend import BACKEND

CPU, MOST = torch.device("cpu"), 3


def summed(made: Any) -> str:
    """The tensors that a kernel sums, with their layouts, each once."""
    code = made.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<\{.*\}>)$", code, re.MULTILINE))
    operands = re.findall(r"\}\) : \((tensor<[^)]*>)\) ->", code)
    found = {re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), one) for one in operands}
    return " and ".join(sorted(found)).replace(" ", "")


def main(arguments: list[str]) -> None:
    """Each argument is a shape and a dtype: kda:bfloat16."""
    warnings.simplefilter("ignore")
    driver.set_active(NoDriver(90))
    for name in arguments:
        shape, dtype = name.split(":")
        where = (cases.SHAPES[shape], CPU, getattr(torch, dtype))
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
            kernel = kernel.removeprefix("millpond.ops.triton.")
            print(name, kernel, registers, stack, *wide, summed(made))


if __name__ == "__main__":
    main(sys.argv[1:])
