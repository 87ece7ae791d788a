"""A loaded model with the memory that some workloads need, and engines on it, one at a time."""

from __future__ import annotations

import gc
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.engine.drive import Recorder, Watched
from bench.engine.forced import Forced, repeat_newest
from bench.engine.models import CONFIGS, Sizes, write
from bench.engine.timed import Timed
from millpond.engine.loop import Engine, EngineSettings
from millpond.engine.outbox import Sink
from millpond.errors import Refused
from millpond.executor.uni import UniExecutor
from millpond.models.base import describe
from millpond.plan.step import PAGE_SIZE
from millpond.runtime.place import choose_device, choose_dtype
from millpond.runtime.propose import DraftModel
from millpond.runtime.worker import Worker, load
from millpond.units import human

RESERVE = 14 << 30
"""Bytes of a GPU that are left for activations, captured graphs and its own bookkeeping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What some workloads need: sequences at once, tokens of one, tokens of all, checkpoints."""

    seats: int
    session: int
    tokens: int
    checkpoints: int
    drafts: int = 0

    def with_(self, other: Need) -> Need:
        """Enough for both, of the same number of drafts."""
        return Need(
            seats=max(self.seats, other.seats),
            session=max(self.session, other.session),
            tokens=max(self.tokens, other.tokens),
            checkpoints=max(self.checkpoints, other.checkpoints),
            drafts=self.drafts,
        )


@dataclass(slots=True)
class Tower:
    """One worker, which outlives the engines on it. Each engine begins with empty pools."""

    worker: Worker
    device: torch.device
    facts: dict[str, Any]  # sizes and times of the start, for a header
    forced: Forced | None = None

    def engine(self, sink: Sink | None = None, **settings: Any) -> Watched:
        """An engine with these settings; whoever asked closes it before asking again.

        With a `sink` nothing is recorded.
        """
        recorder = Recorder()
        timed = Timed(UniExecutor(self.worker), self.device)
        engine = Engine(EngineSettings(**settings), timed, sink or recorder)
        return Watched(engine, recorder, timed)


def build(
    model: str | Path,
    need: Need,
    *,
    device: str = "auto",
    forced: bool = False,
    debug_poison: bool = False,
) -> Tower:
    """Load a model of `bench.engine.models`, or of a directory, for what is needed.

    `forced`: drafts are accepted as the tower's `forced` is told. On a GPU there are as many pages
    as fit, where that is less than needed.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        published = model in CONFIGS
        model_dir = write(str(model), Path(folder)) if published else Path(model)
        place = choose_device(device)
        sizes = Sizes.of(describe(model_dir), choose_dtype("auto", place))
        slots, pages = room(need, sizes, place)
        worker = load(
            model_dir,
            device=device,
            load_format="dummy" if published else "auto",
            num_slots=slots,
            num_pages=pages,
            num_seats=need.seats,
            session_len=need.session,
            num_draft_tokens=need.drafts,
            debug_poison=debug_poison,
        )
    loaded = time.perf_counter()
    print(f"{model}: loaded in {loaded - began:.1f} s, {slots} slots, {pages} pages", flush=True)
    proposer = None
    if forced:
        repeat_newest(worker.runner.model)
        if isinstance(worker.runner.proposer, DraftModel):
            vocab = worker.capabilities.vocab_size
            proposer = worker.runner.proposer = Forced(worker.runner.proposer, vocab, place)
    worker.warm_up()
    facts = {
        "model": str(model),
        "dtype": str(choose_dtype("auto", place)).removeprefix("torch."),
        "drafts": need.drafts,
        "num_slots": slots,
        "num_pages": pages,
        "num_seats": need.seats,
        "session_len": need.session,
        "weight_gb": sizes.weights / 1e9,
        "slot_mb": sizes.slot / 1e6,
        "page_mb": sizes.page / 1e6,
        "seat_mb": worker.runner.arenas.seats.spec.num_bytes / 1e6,
        "load_s": loaded - began,
        "warm_up_s": time.perf_counter() - loaded,
    }
    return Tower(worker, place, facts, proposer)


def room(need: Need, sizes: Sizes, place: torch.device) -> tuple[int, int]:
    """Slots and pages. Raises `Refused` where a GPU has no room for one sequence."""
    slots = need.seats + need.checkpoints + 8
    pages = -(-need.tokens // PAGE_SIZE) + need.seats + 1
    if place.type == "cuda":
        free = torch.cuda.mem_get_info(place)[0]
        left = free - sizes.weights - slots * sizes.slot - RESERVE
        pages = min(pages, left // sizes.page)
        if pages * PAGE_SIZE < need.session:
            raise Refused(
                f"{human(free)} are free: beside weights of {human(sizes.weights)} and {slots}"
                f" slots there is no room for {need.session} tokens"
            )
    return slots, pages


def give_back() -> None:
    """Give memory that nobody holds any more back to the device, for the next tower."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
