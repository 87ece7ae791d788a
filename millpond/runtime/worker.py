"""One rank: a device, a model on it, its arenas, and the calls a rank answers.

Knows how a model directory becomes something that runs plans; does not know who sends them.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from millpond.config import ModelFacts
from millpond.errors import Refused
from millpond.memory.arena import Arenas
from millpond.memory.layout import ModelLayout
from millpond.models.base import Description, Model, describe
from millpond.models.base import load as load_model
from millpond.nn.batch import Staging
from millpond.ops.bind import AUTO, Bound, bind
from millpond.plan.step import PAGE_SIZE, Capabilities, StepPlan, StepResult
from millpond.runtime.propose import DraftModel
from millpond.runtime.reach import made, memory_of
from millpond.runtime.runner import ModelRunner
from millpond.runtime.seats import SeatSampling
from millpond.runtime.verify import Verifier
from millpond.store.memory import RankMemory

log = logging.getLogger(__name__)

SMALL_MODEL_BYTES = 64 << 20
"""Weights below this run on one CPU thread. Their products are too small to share: a second thread
gains little on an idle machine, and on a busy one all wait for it at every product (measured with
2 M parameters on two busy cores: 10 to 40 times slower)."""

MAX_DRAFT_TOKENS = 7
"""A verify row then takes eight places; more drafts than that are hardly ever accepted."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Worker:
    """Runs plans on one device. Making one allocates all its memory for state and KV.

    `layout` is that of `num_draft_tokens`. `num_threads` bounds the CPU threads of a step (None: as
    many as torch uses by itself).
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
    ) -> None:
        self.num_threads = num_threads
        self.capabilities = Capabilities(
            num_slots=num_slots,
            num_pages=num_pages,
            num_seats=num_seats,
            export_granularity=ops.export_granularity,
            vocab_size=vocab_size,
            max_position=max_position,
            num_draft_tokens=num_draft_tokens,
        )
        arenas = Arenas.allocate(
            layout, num_slots=num_slots, num_pages=num_pages, num_seats=num_seats, device=device
        )
        if debug_poison:
            for arena in (arenas.slots, arenas.pages, arenas.seats):
                arena.fill_nan(range(arena.count))
        staging = Staging(num_seats, -(-max_position // PAGE_SIZE), device, num_draft_tokens)
        seats = SeatSampling(num_seats, vocab_size, device, ops, eos_token_ids)
        proposer = DraftModel(model, arenas, staging, seats) if num_draft_tokens else None
        self.runner = ModelRunner(model, arenas, staging, Verifier(seats, ops), proposer)
        self.made = made(layout, ops, device)

    def memory(self) -> RankMemory:
        """Slots and pages, as a store may reach them. Raises `Refused`."""
        return memory_of(self.runner.arenas)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan to its end. Raises `StepFailed`."""
        before = torch.get_num_threads()
        if self.num_threads is None or self.num_threads >= before:
            return self.runner.execute(plan)
        torch.set_num_threads(self.num_threads)
        try:
            return self.runner.execute(plan)
        finally:
            torch.set_num_threads(before)


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
    place = choose_device(device)
    computing = choose_dtype(dtype, place)
    description = describe(model_dir)
    delta_backend = _delta_backend(description, kda_prefill_backend, computing)
    ops = bind(place, delta_prefill_backend=delta_backend)
    check_drafts(description, num_draft_tokens)
    limit = description.config.max_position
    if session_len is not None and session_len > limit:
        raise Refused(f"session_len={session_len} is more than the model's {limit} positions")
    is_small = description.weight_bytes(computing, ops) < SMALL_MODEL_BYTES
    worker = Worker(
        load_model(description, ops, dtype=computing, device=place, load_format=load_format),
        description.layout(computing, num_draft_tokens),
        device=place,
        num_slots=num_slots,
        num_pages=num_pages,
        num_seats=num_seats,
        vocab_size=description.config.vocab_size,
        max_position=session_len or limit,
        ops=ops,
        num_draft_tokens=num_draft_tokens,
        eos_token_ids=description.eos_token_ids,
        debug_poison=debug_poison,
        num_threads=1 if place.type == "cpu" and is_small else None,
    )
    log.info(
        "%s (%s) on %s in %s: %d slots, %d pages, %d seats, %.1f MiB",
        model_dir.name,
        description.model_type,
        place,
        str(computing).removeprefix("torch."),
        num_slots,
        num_pages,
        num_seats,
        worker.runner.arenas.num_bytes / 2**20,
    )
    return worker


def _delta_backend(description: Description, kda_prefill_backend: str, dtype: torch.dtype) -> str:
    """The backend of `delta_prefill`; what the model has no use for, or cannot have, is refused."""
    if kda_prefill_backend != AUTO and description.config.delta_rule != "kda":
        raise Refused(
            f"kda_prefill_backend={kda_prefill_backend!r} is for models with KDA layers;"
            f" {description.model_type} has none"
        )
    if kda_prefill_backend == "flash_kda" and dtype != torch.bfloat16:
        found = str(dtype).removeprefix("torch.")
        raise Refused(f"kda_prefill_backend='flash_kda' computes in bfloat16 only, not in {found}")
    return kda_prefill_backend


def check_drafts(description: Description, num_draft_tokens: int) -> None:
    """Raise `Refused` for a number of drafts that is not served, or that no layer could make."""
    if not 0 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise Refused(
            f"{num_draft_tokens} draft tokens are not supported, use 0 to {MAX_DRAFT_TOKENS}"
        )
    if num_draft_tokens and not description.config.num_draft_layers:
        raise Refused(
            f"{description.model_dir} has no draft layer to make {num_draft_tokens} draft tokens"
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


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is some, the CPU elsewhere; what is named is used or refused."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as cause:
        raise Refused(f"device {name!r} is not known: {cause}") from cause
    if device.type not in ("cpu", "cuda"):
        raise Refused(f"device {name!r} is not supported: use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Refused(f"device {name!r} was asked for, and torch {torch.__version__} finds no CUDA")
    if device.index is not None and device.type == "cuda":
        count = torch.cuda.device_count()
        if device.index >= count:
            raise Refused(f"device {name!r} was asked for, there are {count} CUDA devices")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on the CPU and bfloat16 elsewhere; what is named is used as asked."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise Refused(f"dtype {name!r} is not supported: use auto, {', '.join(DTYPES)}")
    return DTYPES[name]
