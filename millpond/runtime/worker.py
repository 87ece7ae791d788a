"""One rank: a device, a model on it, its arenas, and the calls a rank answers.

Knows how a model directory becomes something that runs plans; does not know who sends them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

from millpond.config import ModelFacts
from millpond.errors import Refused, StepFailed
from millpond.memory.arena import Arenas
from millpond.memory.host_ring import HostRing
from millpond.memory.layout import ModelLayout
from millpond.models.base import Description, Model, describe
from millpond.models.base import load as load_model
from millpond.nn.batch import Staging
from millpond.ops.bind import AUTO, Bound, bind
from millpond.plan.counts import DeviceCounts
from millpond.plan.step import PAGE_SIZE, Capabilities, Launched, SeatMask, StepPlan, StepResult
from millpond.runtime.checks import check_drafts, check_weights, delta_backend
from millpond.runtime.compiled import COMPILATIONS
from millpond.runtime.compiling import compiling
from millpond.runtime.graphs import capturer_of
from millpond.runtime.place import Place, choose_device, choose_dtype, place_of
from millpond.runtime.propose import DraftModel
from millpond.runtime.reach import made, memory_of
from millpond.runtime.runner import ModelRunner
from millpond.runtime.seats import SeatSampling
from millpond.runtime.sizing import Meter, Peaks, activation_bytes, graph_bytes
from millpond.runtime.verify import Verifier
from millpond.runtime.warmup import PAGES, SEATS, SLOTS, every_kind, few_kinds
from millpond.store.memory import RankMemory

log = logging.getLogger(__name__)

SMALL_MODEL_BYTES = 64 << 20
"""Weights below this run on one CPU thread. Their products are too small to share: a second thread
gains little on an idle machine, and on a busy one all wait for it at every product (measured with
2 M parameters on two busy cores: 10 to 40 times slower)."""

Progress = Callable[[int, int], None]
"""Told how many of how many are done."""

Kinds = Callable[[Capabilities], Iterable[StepPlan]]


def ignore(done: int, of: int) -> None:
    """Nobody is told."""


class _There:
    """A step in flight whose device is made the current one for all that is still to be done."""

    __slots__ = ("_launched", "_place")

    def __init__(self, place: Place, launched: Launched) -> None:
        self._place, self._launched = place, launched

    def draw(self, masks: tuple[SeatMask, ...]) -> None:
        """Tell what seats may draw."""
        with self._place():
            self._launched.draw(masks)

    def result(self) -> StepResult:
        """Wait for the step's end. Raises `StepFailed`."""
        with self._place():
            return self._launched.result()


class Worker:
    """Runs plans on one device. Making one allocates all its memory for state and KV.

    `layout` is that of `num_draft_tokens`. `num_threads` bounds the CPU threads of a step (None: as
    many as torch uses by itself). With `runs_ahead` live sequences verify, also no drafts (None: on
    a GPU, where a step is launched while the one before runs). Whatever thread calls, and whichever
    device is current there, all work goes to `device`.
    """

    def __init__(
        self,
        model: Model,
        layout: ModelLayout,
        *,
        device: torch.device,
        num_slots: int,
        num_pages: int,
        num_seats: int,
        vocab_size: int,
        max_position: int,
        ops: Bound,
        num_draft_tokens: int = 0,
        eos_token_ids: tuple[int, ...] = (),
        debug_poison: bool = False,
        num_threads: int | None = None,
        runs_ahead: bool | None = None,
    ) -> None:
        self.device = device
        self.num_threads = num_threads
        self._like_this = partial(
            Worker, model, layout, device=device, vocab_size=vocab_size, max_position=max_position,
            ops=ops, num_draft_tokens=num_draft_tokens, eos_token_ids=eos_token_ids,
            num_threads=num_threads, runs_ahead=runs_ahead,
        )  # fmt: skip
        self.capabilities = Capabilities(
            num_slots=num_slots,
            num_pages=num_pages,
            num_seats=num_seats,
            export_granularity=ops.export_granularity,
            vocab_size=vocab_size,
            max_position=max_position,
            num_draft_tokens=num_draft_tokens,
            runs_ahead=device.type == "cuda" if runs_ahead is None else runs_ahead,
        )
        self._place = place_of(device)
        with self._place():
            ring = HostRing(device)
            arenas = Arenas.allocate(
                layout, num_slots=num_slots, num_pages=num_pages, num_seats=num_seats,
                device=device, ring=ring,
            )  # fmt: skip
            if debug_poison:
                for arena in (arenas.slots, arenas.pages, arenas.seats):
                    arena.fill_nan(range(arena.count))
            staging = Staging(
                num_seats, -(-max_position // PAGE_SIZE), device, num_draft_tokens, ring, ops
            )
            seats = SeatSampling(num_seats, vocab_size, device, ops, eos_token_ids, ring)
            proposer = DraftModel(model, arenas, staging, seats) if num_draft_tokens else None
            self.runner = ModelRunner(model, arenas, staging, Verifier(seats, ops), proposer)
        self.made = made(layout, ops, device)

    def warm_up(self, progress: Progress = ignore) -> None:
        """Run steps of every kind, so that no request waits for a kernel, and capture graphs.

        On memory of its own: slots, pages, seats and counters stay as they are. Raises `Refused`
        when the model does not run.
        """
        other = self._like_this(num_slots=SLOTS, num_pages=PAGES, num_seats=SEATS)
        other.run_through(progress)
        self.capture(progress)
        COMPILATIONS.ready()

    def run_through(self, progress: Progress = ignore, kinds: Kinds | None = None) -> None:
        """Run `kinds` of steps (None: every one on a GPU, a few elsewhere), over whatever is there.

        Takes the first `SLOTS`, `PAGES` and `SEATS`. Raises `Refused` when the model does not run.
        """
        if kinds is None:
            kinds = every_kind if self.device.type == "cuda" else few_kinds
        plans = tuple(kinds(self.capabilities))
        if self.device.type == "cuda":
            with self._place(), compiling(os.cpu_count() or 1, progress):
                for plan in plans:
                    self.launch(plan)  # nothing comes of it
        for done, plan in enumerate(plans):
            progress(done, len(plans))
            try:
                result = self.execute(plan)
            except StepFailed as error:
                if isinstance(error.__cause__, torch.OutOfMemoryError):
                    raise
                raise Refused(f"the model does not run: {error}") from error
            if not all(emitted.finite for emitted in result.emitted):
                raise Refused(
                    f"the model does not run: the logits of step {plan.step} are not finite"
                )
        progress(len(plans), len(plans))

    def measure(self, num_seats: int, prefill_tokens: int, meter: Meter) -> Peaks:
        """What the largest steps of so many seats take, over what is there, and their graphs.

        `prefill_tokens`: the most that one step folds of prompts. Raises `Refused`.
        """
        c = msgspec.structs.replace(self.capabilities, num_seats=num_seats)
        pages = -(-c.max_position // PAGE_SIZE)
        with self._place():
            activations = activation_bytes(self.execute, c, prefill_tokens, meter)
            graphs, capturer = 0, capturer_of(self.device)
            if capturer is not None:
                record = partial(self.runner.capture, None)
                graphs = graph_bytes(record, capturer, meter, rows=num_seats, pages=pages)
        return Peaks(activations=activations, graphs=graphs)

    def capture(self, progress: Progress = ignore) -> None:
        """Record the steady steps of a GPU as graphs; elsewhere there is nothing to record."""
        with self._place():
            self.runner.capture(progress, capturer_of(self.device))

    def counts(self) -> DeviceCounts:
        """Kernels and graphs."""
        return DeviceCounts(
            compiles=COMPILATIONS.at_start,
            late_compiles=COMPILATIONS.late,
            graph_captures=self.runner.num_captures,
            graph_replays=self.runner.num_replays,
        )

    def memory(self, staging_bytes: int | None = None) -> RankMemory:
        """Slots and pages, as a store may reach them; see `memory_of`. Raises `Refused`."""
        with self._place():
            return memory_of(self.runner.arenas, staging_bytes)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan to its end. Raises `StepFailed`."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> Launched:
        """Hand one plan to the device; what goes wrong with it is raised by its result."""
        with self._place():
            return _There(self._place, self._launch(plan))

    def _launch(self, plan: StepPlan) -> Launched:
        before = torch.get_num_threads()
        if self.num_threads is None or self.num_threads >= before:
            return self.runner.launch(plan)
        torch.set_num_threads(self.num_threads)
        try:
            return self.runner.launch(plan)
        finally:
            torch.set_num_threads(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model on its device, and all that a worker needs besides memory for slots and pages."""

    description: Description
    model: Model
    device: torch.device
    dtype: torch.dtype
    ops: Bound
    num_bytes: int  # of the weights
    num_draft_tokens: int
    num_threads: int | None

    def worker(
        self,
        *,
        num_slots: int,
        num_pages: int,
        num_seats: int,
        session_len: int | None = None,
        debug_poison: bool = False,
    ) -> Worker:
        """One with memory of this size, for sequences of `session_len` tokens."""
        config = self.description.config
        return Worker(
            self.model,
            self.description.layout(self.dtype, self.num_draft_tokens),
            device=self.device,
            num_slots=num_slots,
            num_pages=num_pages,
            num_seats=num_seats,
            vocab_size=config.vocab_size,
            max_position=session_len or config.max_position,
            ops=self.ops,
            num_draft_tokens=self.num_draft_tokens,
            eos_token_ids=self.description.eos_token_ids,
            debug_poison=debug_poison,
            num_threads=self.num_threads,
        )


def load(
    model_dir: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    num_slots: int,
    num_pages: int,
    num_seats: int,
    session_len: int | None = None,
    load_format: str = "auto",
    kda_prefill_backend: str = AUTO,
    num_draft_tokens: int = 0,
    debug_poison: bool = False,
) -> Worker:
    """Build the model of a directory in the Hugging Face layout, ready to run plans.

    `session_len` bounds the tokens of a sequence (None: the model's own limit). With
    `num_draft_tokens` the model's own draft layer guesses that many tokens a step. Raises `Refused`
    for what the model, the device or a backend cannot do, before weights are read where possible.
    """
    loaded = load_weights(
        model_dir,
        dtype=dtype,
        device=device,
        session_len=session_len,
        load_format=load_format,
        kda_prefill_backend=kda_prefill_backend,
        num_draft_tokens=num_draft_tokens,
    )
    worker = loaded.worker(
        num_slots=num_slots,
        num_pages=num_pages,
        num_seats=num_seats,
        session_len=session_len,
        debug_poison=debug_poison,
    )
    log.info(
        "%s (%s) on %s in %s: %d slots, %d pages, %d seats, %.1f MiB",
        model_dir.name,
        loaded.description.model_type,
        loaded.device,
        str(loaded.dtype).removeprefix("torch."),
        num_slots,
        num_pages,
        num_seats,
        worker.runner.arenas.num_bytes / 2**20,
    )
    return worker


def load_weights(
    model_dir: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    session_len: int | None = None,
    load_format: str = "auto",
    kda_prefill_backend: str = AUTO,
    num_draft_tokens: int = 0,
) -> Loaded:
    """As `load`, but for the memory of slots, pages and seats. Raises `Refused`."""
    place = choose_device(device)
    computing = choose_dtype(dtype, place)
    description = describe(model_dir)
    prefill = delta_backend(description, kda_prefill_backend, computing)
    ops = bind(place, delta_prefill_backend=prefill)
    check_drafts(description, num_draft_tokens)
    limit = description.config.max_position
    if session_len is not None and session_len > limit:
        raise Refused(f"session_len={session_len} is more than the model's {limit} positions")
    num_bytes = description.weight_bytes(computing, ops)
    if place.type == "cuda":
        COMPILATIONS.starting()
        COMPILATIONS.watch()
        check_weights(model_dir.name, num_bytes, torch.cuda.mem_get_info(place)[0])
    with place_of(place)():
        model = load_model(description, ops, dtype=computing, device=place, load_format=load_format)
    return Loaded(
        description=description,
        model=model,
        device=place,
        dtype=computing,
        ops=ops,
        num_bytes=num_bytes,
        num_draft_tokens=num_draft_tokens,
        num_threads=1 if place.type == "cpu" and num_bytes < SMALL_MODEL_BYTES else None,
    )


def model_facts(
    description: Description, *, dtype: str, device: str, num_draft_tokens: int = 0
) -> ModelFacts:
    """What the memory plan must know, without reading weights. Raises `Refused`."""
    check_drafts(description, num_draft_tokens)
    place = choose_device(device)
    computing = choose_dtype(dtype, place)
    layout = description.layout(computing, num_draft_tokens)
    return ModelFacts(
        name=description.model_dir.name,
        slot_bytes=layout.slot.num_bytes,
        page_bytes=layout.page.num_bytes,
        seat_bytes=layout.seat.num_bytes,
        weight_bytes=description.weight_bytes(computing, bind(place, quiet=True)),
        max_position=description.config.max_position,
    )
