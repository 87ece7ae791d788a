"""Put and get rates of every store, beside what memory itself and a checksum do.

    python -m bench.store [--trials 5] [--directory DIR] [--only host,file,mooncake]

One call moves 64 slots of millpond-tiny-glm, or one slot of 141 MiB. Every trial puts under new
keys, gets into other memory, and checks what came. The Mooncake Store is a real one on loopback:
its objects lie in this process (embedded) or in another one (remote, over TCP).
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from millpond.store.backend import Backend
from millpond.store.copying import copy
from millpond.store.file import FileStore
from millpond.store.host import HostStore
from millpond.store.mooncake import MooncakeStore
from millpond.units import GIB, KIB, MIB
from tests.store.backends.mooncakes import Master, Owner

TINY, LARGE = int(103.2 * KIB), 141 * MIB
CASES = {f"64 x {TINY / KIB:.1f} KiB": (64, TINY), "141 MiB": (1, LARGE)}
_keys = itertools.count()


class Memory:
    """What is put, and where it is got into."""

    def __init__(self) -> None:
        self.source = np.frombuffer(os.urandom(LARGE), dtype=np.uint8).copy()
        self.target = np.ones(LARGE, dtype=np.uint8)

    def views(self, which: np.ndarray, count: int, size: int) -> list[memoryview]:
        return [which.data[i * size : (i + 1) * size] for i in range(count)]


def timed(call: object) -> float:
    begin = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - begin


def rates(store: Backend, memory: Memory, trials: int, count: int, size: int) -> tuple[str, str]:
    """GiB/s of put and get: the median, and the span of all trials but the first, a warm-up."""
    puts, gets = [], []
    source = memory.views(memory.source, count, size)
    target = memory.views(memory.target, count, size)
    for _ in range(trials + 1):
        names = [f"bench/{next(_keys)}" for _ in range(count)]
        memory.target[:] = 0
        puts.append(timed(lambda n=names: _all(store.put(list(zip(n, source, strict=True))))))
        gets.append(timed(lambda n=names: _all(store.get(list(zip(n, target, strict=True))))))
        if memory.target[: count * size].tobytes() != memory.source[: count * size].tobytes():
            raise SystemExit("what came back is not what was put")
        if not isinstance(store, HostStore):  # which is measured full: room is made as ever
            store.remove(names)
    return _rate(puts[1:], count * size), _rate(gets[1:], count * size)


def _all(done: list[bool]) -> None:
    if not all(done):
        raise SystemExit("the store refused or lost an object")


def _rate(seconds: list[float], size: int) -> str:
    found = sorted(size / s / GIB for s in seconds)
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


@contextmanager
def stores(folder: Path, only: str) -> Iterator[Iterator[tuple[str, Backend]]]:
    """Every store asked for, one after another, each closed before the next opens."""
    master = None

    def each() -> Iterator[tuple[str, Backend]]:
        nonlocal master
        if "host" in only:
            yield "host", HostStore(2 * LARGE)
        if "file" in only:
            yield "file", FileStore(folder / "store", 4 * GIB)
        if "mooncake" in only:
            master = Master(folder).start()
            yield "mooncake, embedded", MooncakeStore(master.config(lend=GIB))
            owner = Owner(master, GIB)
            yield "mooncake, remote", MooncakeStore(master.config())
            owner.kill()

    try:
        yield each()
    finally:
        if master is not None:
            master.kill()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--directory", help="where the file store lies; default: a temporary one")
    parser.add_argument("--only", default="host,file,mooncake")
    args = parser.parse_args()
    memory, folder = Memory(), Path(tempfile.mkdtemp(dir=args.directory))
    whole = memory.source.data
    copies = [timed(lambda: copy(memory.target.data, whole)) for _ in range(args.trials)]
    sums = [timed(lambda: zlib.crc32(whole)) for _ in range(args.trials)]
    print(f"copy of 141 MiB in memory: {_rate(copies, LARGE)} GiB/s")
    print(f"crc32 of 141 MiB: {_rate(sums, LARGE)} GiB/s")
    print("\n| GiB/s: median (worst to best) | " + " | ".join(f"put {c} | get {c}" for c in CASES))
    print("|---" * (1 + 2 * len(CASES)) + "|")
    try:
        with stores(folder, args.only) as each:
            for name, store in each:
                store.register(memory.source.data)
                store.register(memory.target.data)
                cells = [
                    c for case in CASES.values() for c in rates(store, memory, args.trials, *case)
                ]
                print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
                store.close()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
