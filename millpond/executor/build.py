"""Chooses the executor a configuration names, or refuses it by name, and brings it up in phases.

Knows the order: weights, warm-up, profiling, memory, graphs; does not know how memory is split.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from millpond.config import Resolved
from millpond.errors import Refused
from millpond.executor.uni import UniExecutor
from millpond.models.progress import CountBar
from millpond.plan.step import Executor
from millpond.runtime.compiled import COMPILATIONS
from millpond.runtime.sizing import CudaMeter, Meter, Peaks, fitting
from millpond.runtime.warmup import PAGES, SEATS, SLOTS
from millpond.runtime.worker import Loaded, Worker, load_weights
from millpond.units import human

log = logging.getLogger(__name__)

TRIES = 3
"""How often memory is split at most, each time with more left for graphs, until the graphs fit."""

Resize = Callable[[int], Resolved]
"""The numbers anew, for so many bytes that slots, pages and seats may share. Raises `Refused`."""


@dataclass(frozen=True, slots=True)
class Built:
    """An executor, and the numbers it was built with."""

    executor: Executor
    resolved: Resolved


def build_executor(
    model_dir: Path,
    resolved: Resolved,
    name: str = "uni",
    *,
    warm: bool = False,
    resize: Resize | None = None,
    on_phase: Callable[[str], object] = lambda name: None,
) -> Built:
    """The executor called `name`, with the model of `model_dir` loaded. Raises `Refused`.

    On a GPU, memory is measured once the weights are there, and `resize` says how it is split
    (None: as `resolved` says). `warm` runs steps of every kind before any request does; a GPU
    always does.
    """
    if name != "uni":
        raise Refused(f"executor {name!r} is not supported yet, use 'uni'")
    on_phase("loading")
    loaded = load_weights(
        model_dir,
        dtype=resolved.dtype,
        device=resolved.device,
        session_len=resolved.session_len,
        load_format=resolved.load_format,
        kda_prefill_backend=resolved.kda_prefill_backend,
        num_draft_tokens=resolved.num_draft_tokens,
    )
    if loaded.device.type == "cuda":
        return bring_up(loaded, resolved, CudaMeter(loaded.device), resize, on_phase)
    worker = _worker(loaded, resolved)
    log.info(
        "%s on %s: %d slots, %d pages, %d seats, %s",
        model_dir.name,
        loaded.device,
        resolved.num_slots,
        resolved.num_pages,
        resolved.num_seats,
        human(worker.runner.arenas.num_bytes),
    )
    if warm:
        on_phase("warm-up")
        worker.warm_up()
    return Built(UniExecutor(worker), resolved)


def bring_up(
    loaded: Loaded,
    resolved: Resolved,
    meter: Meter,
    resize: Resize | None,
    on_phase: Callable[[str], object] = lambda name: None,
) -> Built:
    """A worker whose memory was measured: warm-up and profiling on a spare one, then its own."""
    on_phase("warm-up")
    with fitting("memory to warm up", meter):
        spare = loaded.worker(
            num_slots=SLOTS,
            num_pages=PAGES,
            num_seats=max(SEATS, resolved.num_seats),
            session_len=resolved.session_len,
        )
        with CountBar("warm-up") as bar:
            spare.run_through(bar)
    on_phase("profiling")
    peaks = spare.measure(resolved.num_seats, resolved.max_prefill_tokens, meter)
    del spare
    on_phase("capture")
    worker, resolved, graphs = _own(loaded, resolved, peaks, meter, resize)
    peaks = replace(peaks, graphs=graphs)
    log.info("%s", split_line(loaded, resolved, worker, peaks, meter.free()))
    COMPILATIONS.ready()
    return Built(UniExecutor(worker), resolved)


def _own(
    loaded: Loaded,
    resolved: Resolved,
    peaks: Peaks,
    meter: Meter,
    resize: Resize | None,
    tries: int = TRIES,
) -> tuple[Worker, Resolved, int]:
    """A worker with its graphs, its numbers, and the bytes that the graphs take."""
    if resize is not None:
        resolved = resize(peaks.left(meter.free()))
    with fitting(f"{human(resolved.cache_bytes)} of slots, pages and seats", meter):
        worker = _worker(loaded, resolved)
    before = meter.free()
    try:
        with CountBar("capture") as bar, fitting("memory for graphs", meter):
            worker.capture(bar)
        return worker, resolved, max(0, before - meter.free())
    except Refused:
        if resize is None or tries == 1:
            raise
    del worker  # and with it what it holds
    peaks = peaks.with_more_for_graphs()
    log.warning("graphs take more than was measured: %s are left for them", human(peaks.graphs))
    return _own(loaded, resolved, peaks, meter, resize, tries - 1)


def split_line(loaded: Loaded, resolved: Resolved, worker: Worker, peaks: Peaks, free: int) -> str:
    """Where the memory of a device went, in one line."""
    r, arenas = resolved, worker.runner.arenas
    slots, pages, seats = (
        human(arena.storage.numel()) for arena in (arenas.slots, arenas.pages, arenas.seats)
    )
    return (
        f"memory of {loaded.device}: weights {human(loaded.num_bytes)}, activations"
        f" {human(peaks.activations)}, graphs {human(peaks.graphs)}, {r.num_slots} slots {slots}"
        f" ({r.num_slots - r.checkpoint_budget} to run, {r.checkpoint_budget} checkpoints),"
        f" {r.num_pages} pages {pages}, {r.num_seats} seats {seats}; {human(free)} free"
    )


def _worker(loaded: Loaded, resolved: Resolved) -> Worker:
    return loaded.worker(
        num_slots=resolved.num_slots,
        num_pages=resolved.num_pages,
        num_seats=resolved.num_seats,
        session_len=resolved.session_len,
        debug_poison=resolved.debug_poison,
    )
