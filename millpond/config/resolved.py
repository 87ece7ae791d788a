"""Derives every number the engine runs with from options, the model and the free memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from millpond.config.checks import check
from millpond.config.options import PAGE, PytorchEngineConfig, SpeculativeConfig, num_drafts
from millpond.config.sizes import ModelFacts, Sizes


@dataclass(frozen=True, slots=True)
class Resolved:
    """Every number the engine runs with; `notes` says which defaults were changed, and why."""

    device: str
    dtype: str
    load_format: str
    kda_prefill_backend: str
    max_batch_size: int
    session_len: int
    max_prefill_tokens: int
    num_slots: int
    checkpoint_budget: int
    num_pages: int
    num_seats: int
    prefix_caching: bool
    checkpoint_mode: Literal["interior", "split", "off"]
    prefill_save_alignment: int
    checkpoint_interval: int
    decode_checkpoint_interval: int  # 0: none along an answer
    hold_and_join: bool
    max_overtakes: int
    watchdog_timeout: float  # seconds, 0: none
    num_draft_tokens: int
    cache_budget: int  # bytes that slots, pages and seats may take
    cache_bytes: int  # bytes that they take
    debug_audit: bool
    debug_poison: bool
    notes: tuple[str, ...]


def resolve(
    config: PytorchEngineConfig,
    facts: ModelFacts,
    *,
    available: int,
    device: str = "cpu",
    speculative: SpeculativeConfig | None = None,
) -> Resolved:
    """Derive every number from the configuration, the model and the free memory in bytes.

    Defaults are clamped to what fits, and a note says so; an explicit value that does not fit
    raises `Refused` with the number that would. `device` is the one chosen ("cpu" or "cuda:0").
    """
    check(config, speculative)
    caching = config.enable_prefix_caching and config.checkpoint_mode != "off"
    mode = (config.checkpoint_mode or "interior") if config.enable_prefix_caching else "off"
    save = config.prefill_save_alignment
    along = config.decode_checkpoint_interval
    auto = "float32" if device == "cpu" else "bfloat16"
    sizes = Sizes(config, facts, available, device.startswith("cuda"), caching)
    prefill = max(PAGE, config.max_prefill_token_num // PAGE * PAGE)
    notes = list(sizes.notes)
    if prefill != config.max_prefill_token_num:
        notes.append(
            f"max_prefill_token_num {config.max_prefill_token_num} -> {prefill}, whole pages"
        )
    if caching and save >= sizes.session_len:
        notes.append(
            f"prefix caching can never hit: the smallest reusable prefix, {save} tokens, leaves no "
            f"room in session_len {sizes.session_len}"
        )
    return Resolved(
        device=device,
        dtype=auto if config.dtype == "auto" else config.dtype,
        load_format=config.load_format,
        kda_prefill_backend=config.kda_prefill_backend,
        max_batch_size=sizes.batch,
        session_len=sizes.session_len,
        max_prefill_tokens=prefill,
        num_slots=sizes.slots,
        checkpoint_budget=sizes.checkpoints,
        num_pages=sizes.pages,
        num_seats=sizes.batch,
        prefix_caching=config.enable_prefix_caching,
        checkpoint_mode=mode,
        prefill_save_alignment=save,
        checkpoint_interval=-(-config.checkpoint_interval // save) * save,
        decode_checkpoint_interval=(save if along is None else along) if caching else 0,
        hold_and_join=config.hold_and_join,
        max_overtakes=config.max_overtakes,
        watchdog_timeout=config.watchdog_timeout,
        num_draft_tokens=num_drafts(speculative),
        cache_budget=sizes.budget,
        cache_bytes=sizes.bytes(),
        debug_audit=config.debug_audit,
        debug_poison=config.debug_poison,
        notes=tuple(notes),
    )
