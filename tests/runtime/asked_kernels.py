"""Which kernels, keys included, a warm-up asks for, and which ones serving asks for beyond them.

Run in a process without Triton's interpreter. Each op does two things: Triton's version is called,
but compiles and launches nothing; the reference then computes what is served. So a GPU is not
needed, and keys are Triton's own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import triton.compiler
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import millpond
from bench.ops.compile import NoDriver
from millpond.executor.uni import UniExecutor
from millpond.ops import bind as binding
from millpond.ops.batch import WriteLog
from millpond.ops.bind import OP_NAMES, Bound
from millpond.ops.triton import layer_choices
from millpond.ops.triton.backend import BACKEND
from millpond.runtime import worker as runtime
from millpond.runtime.compiled import COMPILATIONS
from millpond.runtime.compiling import zeros
from millpond.runtime.graphs import CallAgain
from millpond.runtime.warmup import PAGES, SEATS, SLOTS, every_kind
from tests.runtime.test_warmup import serve

BUNDLED = Path(millpond.__file__).parent / "bundled"


def logs(values: Iterable[object]) -> Iterator[WriteLog]:
    """Where an op records what it wrote."""
    for value in values:
        for part in (value, *(getattr(value, n, None) for n in ("prefill", "decode", "verify"))):
            if hasattr(part, "written"):
                yield part.written


def both(name: str, right: Callable[..., Any]) -> Callable[..., Any]:
    """Ask for the op's kernels, forget what came of that, and compute."""
    asked = BACKEND.ops[name]

    def called(*args: Any, **named: Any) -> Any:
        found = [(log, len(log.entries)) for log in logs((*args, *named.values()))]
        with zeros():
            asked(*args, **named)
        for log, count in found:
            del log.entries[count:]
        return right(*args, **named)

    return called


def bind(device: torch.device, **_: Any) -> Bound:
    """The ops of the reference, each with its kernels."""
    reference = binding.bind(device, quiet=True)
    kernels = [name for name in OP_NAMES if name in BACKEND.ops]
    return replace(reference, **{name: both(name, getattr(reference, name)) for name in kernels})


def main(kind: str, drafts: int, kinds: str) -> None:
    """Print how many kernels warming up asked for, and how many serving did beyond them."""
    launch = JITFunction.run

    def ask(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **options)

    JITFunction.run = ask
    triton.compiler.compile = lambda *_, **__: object()
    driver.set_active(NoDriver(90))
    layer_choices._hopper.cache_clear()  # there is such a function
    layer_choices._hopper = lambda device: True
    runtime.bind = bind
    COMPILATIONS.watch()
    worker = runtime.load(
        BUNDLED / f"millpond-tiny-{kind}", device="cpu", dtype="bfloat16", num_draft_tokens=drafts,
        num_slots=1, num_pages=1, num_seats=1,
    )  # fmt: skip
    other = worker._like_this(num_slots=SLOTS, num_pages=PAGES, num_seats=SEATS, runs_ahead=True)
    every = partial(every_kind, most_tokens=600)
    other.run_through(kinds=every if kinds == "every" else lambda c: islice(every(c), 1))
    served = worker._like_this(num_slots=12, num_pages=160, num_seats=4, runs_ahead=True)
    served.runner.capture(capturer=CallAgain())
    COMPILATIONS.ready()
    serve(UniExecutor(served))
    assert served.counts().graph_replays
    print("asked", COMPILATIONS.at_start, "late", COMPILATIONS.late)


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
