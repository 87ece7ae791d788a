"""Times how long the host takes to launch a step with a prompt, and lists its kernels.

python -m bench.engine.launching [--model q4] [--tokens 128,512,2048] [--layers N] [--drafts 0]
                                 [--names] [--profile 30]

One row of a prompt goes through the model runner; weights are drawn at random. On a GPU: time until
the step is launched and until it has ended, and whether states and pages have the same bytes when
Triton itself launches every kernel. Without a GPU: a tiny model with as many layers, and Triton's
launcher on a libcuda that does nothing (compiled by `cc`); kernels are not compiled and matrix
products not computed. The time is the least processor time of the thread over many steps then, and
contains neither the driver's part of a launch, nor cuBLAS, nor the GPU.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.compiler
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from bench.engine.models import CONFIGS, write
from millpond.ops import bind as binding
from millpond.ops.bind import Bound
from millpond.ops.reference import linear as products
from millpond.ops.triton import layer_choices
from millpond.ops.triton.backend import BACKEND
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import PAGE_SIZE, PageUpdate, Row, SeatLoad, StepPlan
from millpond.runtime import worker as runtime
from millpond.state.lease import PageId, Seat, SlotId

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
SEAT = Seat(0)
WARM, TRIALS = 3, 30


class Driver(nvidia.CudaDriver):
    """Triton's driver for a device that torch calls -1: tensors are on the CPU."""

    def __init__(self) -> None:
        self.utils = nvidia.CudaUtils()
        self.launcher_cls = nvidia.CudaLauncher
        self.get_device_capability = lambda device=0: (9, 0)
        self.get_current_device = lambda: -1
        self.get_current_stream = lambda device: 0
        self.set_current_device = lambda device: None


def without_gpu(folder: Path) -> None:
    """From here on in this process, launch on a libcuda that does nothing."""
    library = folder / "libcuda.so.1"
    code = Path(__file__).with_name("no_cuda.c")
    name = f"-Wl,-soname,{library.name}"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-w", name, "-o", library, code], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    nvidia.library_dirs = lambda: [nvidia.libdevice_dir, str(folder)]
    driver.set_active(Driver())
    made = 0

    def compiled(source: Any, target: Any = None, options: Any = None, **_: Any) -> Any:
        nonlocal made
        made += 1
        backend = triton.compiler.make_backend(target or driver.active.get_current_target())
        asked = backend.parse_options(dict(options or {}, **source.parse_options()))
        metadata = vars(asked) | dict(
            name=source.name, hash="", target=dict(backend="cuda", arch=90, warp_size=32),
            tensordesc_meta=[], shared=1024, tmem_size=0, global_scratch_size=0, warp_size=32,
            global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
        )  # fmt: skip
        own = folder / str(made)
        own.mkdir()
        (own / f"{source.name}.json").write_text(json.dumps(metadata, default=str))
        (own / f"{source.name}.cubin").write_bytes(b"none")
        files = {file.name: str(file) for file in own.iterdir()}
        return triton.compiler.CompiledKernel(source, files, "")

    triton.compiler.compile = compiled
    runtime.bind = bind
    layer_choices._hopper = lambda device: True
    products.linear = no_product
    products.linear_by_head = no_product_by_head


def bind(device: torch.device, **_: Any) -> Bound:
    """The ops that an engine on a GPU has, whatever the device."""
    known = [b for b in binding.backends() if b.name != BACKEND.name]
    able = replace(BACKEND, unusable=lambda device: None)
    return binding.bind(device, among=[able, *known], quiet=True)


def no_product(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    """A tensor of the product's shape, not computed."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def no_product_by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape of a product head by head, not computed."""
    return x.new_empty((*x.shape[:2], weight.shape[2]))


def load(model: str, most: int, *, layers: int | None = None, drafts: int = 0) -> runtime.Worker:
    """The model, or a tiny one where there is no GPU, ready for prompts of up to `most` tokens."""
    gpu, folder = torch.cuda.is_available(), Path(tempfile.mkdtemp())
    if not gpu:
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        torch.set_num_threads(1)
        without_gpu(folder)
    name = model if gpu else f"tiny-{model}"
    CONFIGS[name]["num_hidden_layers"] = layers or CONFIGS[model]["num_hidden_layers"]
    return runtime.load(
        write(name, folder), device="cuda" if gpu else "cpu", dtype="bfloat16",
        load_format="dummy", num_draft_tokens=drafts, num_slots=2,
        num_pages=-(-most // PAGE_SIZE) + 1, num_seats=2, session_len=most + 8,
    )  # fmt: skip


def plan(step: int, tokens: int) -> StepPlan:
    """One prompt, from nothing to its first token."""
    row = Row(
        request="r", seat=SEAT, start=0, tokens=tuple(i % 512 for i in range(tokens)),
        state_in=None, state_out=SlotId(0), exports=(), emit_seats=(SEAT,), prompt_logprobs=None,
    )  # fmt: skip
    load = SeatLoad(
        seat=SEAT, request="r", sample_index=0, params=GREEDY, tokens=(0, 0), prompt_len=1
    )
    pages = tuple(map(PageId, range(-(-tokens // PAGE_SIZE))))
    return StepPlan(
        step=step, prefill=(row,), seat_loads=(load,), page_updates=(PageUpdate(SEAT, 0, pages),)
    )


def names_of(launch: Any) -> list[str]:
    """The kernels of a step, in order: Triton's hook sees all that Triton launches."""
    found: list[str] = []
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(note := lambda metadata: found.append(metadata.get()["name"]))
    launch()
    hook.remove(note)
    return found


def same_bytes(worker: runtime.Worker, tokens: int) -> bool:
    """Whether a step leaves the same states and pages when Triton itself launches all its kernels,
    as it does while there is a launch hook.
    """
    hook, kept = triton.knobs.runtime.launch_enter_hook, []
    for watch in (False, True):
        if watch:
            hook.add(nothing := lambda metadata: None)
        worker.launch(plan(0, tokens)).result()
        arenas = worker.runner.arenas
        kept.append((arenas.slots.storage.clone(), arenas.pages.storage.clone()))
    hook.remove(nothing)
    return all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def main(arguments: list[str]) -> int:
    """Print a line for each number of tokens."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="q4", help="q4 or g8")
    parser.add_argument("--tokens", default="128,512,2048")
    parser.add_argument("--layers", type=int, help="of q4; 32 is the model's own number")
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--names", action="store_true", help="which kernels, and how often")
    parser.add_argument("--profile", type=int, default=0, help="so many places, by their own time")
    chosen = parser.parse_args(arguments)
    gpu = torch.cuda.is_available()
    sizes = [int(n) for n in chosen.tokens.split(",")]
    worker = load(chosen.model, max(sizes), layers=chosen.layers, drafts=chosen.drafts)
    clock = time.perf_counter if gpu else time.thread_time
    for tokens in sizes:
        for step in range(WARM):
            worker.launch(plan(step, tokens)).result()
        if chosen.names:
            found = names_of(lambda n=tokens: worker.launch(plan(0, n)).result())
            print(f"{tokens} tokens, {len(found)} kernels: {dict(Counter(found))}")
            print(" ".join(found))
            continue
        host, whole = [], []
        for step in range(chosen.trials):
            one = plan(step, tokens)
            began = clock()
            flight = worker.launch(one)
            host.append(clock() - began)
            flight.result()
            whole.append(clock() - began)
        print(
            f"{chosen.model}, {tokens} tokens, {chosen.drafts} drafts: launched in"
            f" {1e3 * min(host):.2f} ms (median {1e3 * statistics.median(host):.2f}), over after"
            f" {1e3 * min(whole):.2f} (median {1e3 * statistics.median(whole):.2f});"
            f" Triton {triton.__version__}"
            + (f"; launched by Triton, same bytes: {same_bytes(worker, tokens)}" if gpu else "")
        )
        if chosen.profile:
            profile = cProfile.Profile(clock)
            plans = [plan(step, tokens) for step in range(10)]
            profile.enable()
            for one in plans:
                worker.launch(one).result()
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(chosen.profile)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
