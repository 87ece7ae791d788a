"""Compiles every kernel that the start of a model asks for, for a GPU that need not be here.

python -m bench.ops.start [--models q4,g8] [--drafts 0,3] [--capability 90] [--threads 2]

Steps of every kind are run as a server runs them before it is ready, at the model's own sizes;
weights are never touched, products are left out, and Triton compiles without launching. Prints
registers, spills and shared memory of each kernel; exits 1 when one does not compile, naming it.
What this does not show: that a kernel is right, or fast.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime import driver
from triton.runtime._async_compile import FutureKernel
from triton.runtime.jit import JITFunction

from bench.engine.models import CONFIGS, write
from bench.ops.compile import NoDriver, usage
from millpond.errors import Refused
from millpond.models.weights import Weights
from millpond.ops import bind as binding
from millpond.ops.bind import Bound
from millpond.ops.reference import linear as products
from millpond.ops.triton import layer_choices
from millpond.ops.triton.backend import BACKEND
from millpond.runtime import worker as runtime
from millpond.runtime.compiled import COMPILATIONS
from millpond.runtime.compiling import compiling
from millpond.runtime.graphs import CallAgain
from millpond.runtime.warmup import PAGES, SEATS, SLOTS, every_kind


def bind(device: torch.device, **_: Any) -> Bound:
    """The ops of a GPU, though the device is none."""
    known = [b for b in binding.backends() if b.name != BACKEND.name]
    able = replace(BACKEND, unusable=lambda device: None)
    return binding.bind(device, among=[able, *known], quiet=True)


def no_product(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    """Zeros of a product's shape."""
    return x.new_zeros((*x.shape[:-1], weight.shape[0]))


def no_product_by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Zeros of a product's shape, head by head."""
    return x.new_zeros((*x.shape[:2], weight.shape[2]))


def main(arguments: list[str]) -> int:
    """Exit 1 when a kernel does not compile."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default="q4,g8", help=", ".join(CONFIGS))
    parser.add_argument("--drafts", default="0,3")
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args(arguments)
    driver.set_active(NoDriver(chosen.capability))
    layer_choices._hopper.cache_clear()  # there is such a function
    layer_choices._hopper = lambda device: True
    Weights._copy = lambda self, target, name: None  # memory that nobody touches takes none
    products.linear, products.linear_by_head = no_product, no_product_by_head
    runtime.bind = bind
    COMPILATIONS.watch()
    failed = 0
    for model in chosen.models.split(","):
        for drafts in map(int, chosen.drafts.split(",")):
            began = time.perf_counter()
            found: dict[str, list[Any]] = {}
            try:
                start(model, drafts, chosen.threads, found)
            except Refused as error:
                print(error)
                failed += 1
            took = time.perf_counter() - began
            count = sum(map(len, found.values()))
            print(
                f"{model}, {drafts} drafts, sm_{chosen.capability}, Triton {triton.__version__}:"
                f" {count} kernels in {took:.0f} s"
            )
            for name, kernels in sorted(found.items()):
                for kernel in kernels:
                    registers, stack = usage(kernel)
                    meta = kernel.metadata
                    print(
                        f"  {name:<32} {registers:4d} registers {stack:5d} B spilled"
                        f" {meta.shared:7d} B shared  {meta.num_warps} warps"
                    )
    return 1 if failed else 0


def start(model: str, drafts: int, threads: int, found: dict[str, list[Any]]) -> None:
    """Ask for all kernels of a model; `found` gets those that compiled, by name."""
    with tempfile.TemporaryDirectory() as folder:
        worker = runtime.load(
            write(model, Path(folder)), device="cpu", dtype="bfloat16", load_format="dummy",
            num_draft_tokens=drafts, num_slots=1, num_pages=1, num_seats=1,
        )  # fmt: skip
    spare = worker._like_this(num_slots=SLOTS, num_pages=PAGES, num_seats=SEATS, runs_ahead=True)
    asked: dict[str, list[Any]] = {}
    launch = JITFunction.run

    def noting(kernel: Any, *args: Any, **options: Any) -> Any:
        made = launch(kernel, *args, **options)
        several = asked.setdefault(f"{kernel.__module__.split('.')[-1]}.{kernel.__name__}", [])
        if not any(made is one for one in several):
            several.append(made)
        return made

    JITFunction.run = noting
    try:
        with compiling(threads):
            for plan in every_kind(spare.capabilities):
                spare.launch(plan)
            spare.runner.capture(capturer=CallAgain())
    finally:
        JITFunction.run = launch
        for name, several in asked.items():
            made = (m.kernel if isinstance(m, FutureKernel) else m for m in several)
            kernels = {id(k): k for k in made if k is not None}
            if kernels:
                found[name] = list(kernels.values())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
