"""How attention's kernels deal out what their matrix products sum, compiled for a GPU that need not
be here.

python -m tests.ops.triton.compile_attention [--capability 90]

A sum's order follows from layouts that Triton chooses by what stands around a product. So latent
attention must be one kernel whether a token selects or not, and what a loop over unmasked tiles
sums must be dealt out as what the loop over masked tiles sums.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.ops.compile import Compiled, NoDriver
from millpond.ops.triton import attention, latent
from tests.ops.triton.layers import mixed_batch

BATCH = mixed_batch([(0, 30)], [(70, 1)], tables=[[1, -1], [1, 2]])
SUMS = re.compile(r"= (?:\"?tt\.(?:dot|reduce)|ttng\.warp_group_dot)\b(?!_wait)")


def loops(kernel: Any) -> list[list[str]]:
    """Of each loop over tiles: the layouts of its products and sums, in order."""
    found: list[list[str]] = []
    in_reduction = False
    for line in kernel.asm["ttgir"].splitlines():
        line = re.sub(r" loc\(.*", "", line)
        if "scf.for" in line:
            found.append([])
        elif found and SUMS.search(line):
            in_reduction = "tt.reduce" in line
            if not in_reduction:
                found[-1].append(layouts(line))
        elif in_reduction and line.lstrip().startswith("})"):
            found[-1].append(layouts(line))
            in_reduction = False
    return [sums for sums in found if sums]


def layouts(line: str) -> str:
    """What a line says of types, without the names of values."""
    return re.sub(r", mutable|\s+", "", line[line.index(" : ") :])


def main(arguments: list[str]) -> int:
    """Exit 1 where forms differ that must not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--capability", type=int, default=90)
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    driver.set_active(NoDriver(chosen.capability))
    wrong = 0
    for dtype in (torch.float32, torch.bfloat16):
        compiled = Compiled()
        compiled.install()
        tokens = len(BATCH.positions)
        q, keys = torch.zeros(tokens, 4, 32, dtype=dtype), torch.zeros(4, 2, 64, 32, dtype=dtype)
        attention.paged_gqa(q, keys, keys.clone(), batch=BATCH, scale=0.1)
        for selected in (None, torch.zeros(tokens, 128).bool()):
            latent.paged_mla(q, keys[:, 0], batch=BATCH, scale=0.1, selected=selected)
        JITFunction.run = compiled.launch
        for label, kernels in compiled.kernels.items():
            name = label.removeprefix("millpond.ops.triton.")
            if "latent" in name and len(kernels) > 1:
                print(f"{name}, {dtype}: {len(kernels)} forms of one kernel")
                wrong += 1
            of_tiles = loops(kernels[0]) if name.startswith(("attention.", "latent.")) else []
            print(f"{name}, {dtype}: {len(of_tiles)} loops, {sum(map(len, of_tiles))} sums")
            if any(sums != of_tiles[0] for sums in of_tiles):
                print(*of_tiles, sep="\n")
                wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
