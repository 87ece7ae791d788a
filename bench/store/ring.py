"""The ring between a GPU's slots and pages and a store: its rate beside a plain pinned copy.

    python -m bench.store.ring [--trials 9]

A record of one slot of 141 MiB and 64 pages of 1 MiB is read out of the arenas and written back,
as a put and a get do without the store; its bytes are compared. Needs a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from millpond.memory.arena import Arena
from millpond.memory.layout import EntrySpec, TensorSpec
from millpond.runtime.staged import StagedMemory
from millpond.state.lease import PageId, SlotId
from millpond.store.memory import Parts, batches
from millpond.units import GIB, MIB

SLOT, PAGE, PAGES = 141 * MIB, MIB, 64


def arena(size: int, count: int) -> Arena:
    """Random bytes on the GPU."""
    spec = EntrySpec((TensorSpec(0, "recurrent", (size // 4,), torch.float32),))
    made = Arena(spec, count, torch.device("cuda"))
    made.storage.random_(0, 256)
    return made


def rate(call: Callable[[], object], size: int, trials: int) -> str:
    """GiB/s: the median, and the span of all trials but the first."""
    seconds = []
    for _ in range(trials + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    found = sorted(size / s / GIB for s in seconds[1:])
    return f"{statistics.median(found):.1f} ({found[0]:.1f} to {found[-1]:.1f})"


def main() -> int:
    """Print one small table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=9)
    trials = parser.parse_args().trials
    if not torch.cuda.is_available():
        print("ring: not run, because there is no GPU")
        return 1
    slots, pages = arena(SLOT, 3), arena(PAGE, 4 * PAGES)
    memory = StagedMemory(slots, pages)
    scattered = torch.randperm(pages.count, generator=torch.Generator().manual_seed(1))[:PAGES]
    parts = Parts(SlotId(1), tuple(PageId(page) for page in scattered.tolist()))
    size = SLOT + PAGES * PAGE

    def put() -> None:
        for batch in batches(memory, parts):
            with memory.reading(batch):
                pass

    def get() -> None:
        for batch in batches(memory, parts):
            with memory.writing(batch):
                pass

    expected = slots.storage[1].clone()
    with memory.reading(Parts(SlotId(1), ())) as lent:
        kept = bytes(lent[0])
    with memory.writing(Parts(SlotId(2), ())) as views:
        views[0][:] = kept
    if not torch.equal(slots.storage[2], expected):
        print("ring: not shown, because what came back is not what was read")
        return 1
    pinned = torch.empty(SLOT, dtype=torch.uint8, pin_memory=True)
    out = rate(lambda: pinned.copy_(slots.storage[0], non_blocking=True), SLOT, trials)
    back = rate(lambda: slots.storage[0].copy_(pinned, non_blocking=True), SLOT, trials)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| GiB/s: median (worst to best) | off the GPU | onto the GPU |\n|---|---|---|")
    print(f"| one pinned copy of 141 MiB | {out} | {back} |")
    print(f"| a record through the ring | {rate(put, size, trials)} | {rate(get, size, trials)} |")
    print("\nWhat this does not show: the store itself, forwards at the same time, several GPUs.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
