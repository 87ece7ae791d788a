"""The numbers an engine is built with; resolved and explained elsewhere, only checked here."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.errors import Refused
from millpond.plan.checkpoints import CheckpointMode, anchor_step
from millpond.plan.step import PAGE_SIZE, Capabilities
from millpond.state.value import EvictionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What one engine may use and how it saves.

    `max_batch_size` sequences run at once; `max_prefill_tokens` tokens of prompts (and of
    recomputed answers) are folded per step; a sequence holds at most `session_len` tokens.
    `checkpoint_budget` is the number of slots that checkpoints may hold, `eviction_policy` what
    goes when there are more (the least worth; for comparison the least recently used);
    `prefill_save_alignment` and `checkpoint_interval` are in tokens (an interval of 0: no ladder);
    so is `decode_checkpoint_interval`, of checkpoints along an answer (0: none). With
    `hold_and_join` a request waits for another that computes the beginning they share. A request
    sees at most `max_overtakes` admissions more than there were requests before it in the queue.
    A step that takes more than `watchdog_seconds` ends the engine and every stream (0: none does).
    `debug_audit` checks every invariant after every step, `debug_poison` has freed slots and pages
    overwritten.
    """

    max_batch_size: int
    max_prefill_tokens: int
    session_len: int
    prefix_caching: bool = True
    checkpoint_mode: CheckpointMode = "interior"
    prefill_save_alignment: int = PAGE_SIZE
    checkpoint_interval: int = 4096
    decode_checkpoint_interval: int = 0
    checkpoint_budget: int = 8
    eviction_policy: EvictionPolicy = "value"
    hold_and_join: bool = True
    max_overtakes: int = 64
    watchdog_seconds: float = 300.0
    eos_token_ids: tuple[int, ...] = ()
    debug_audit: bool = False
    debug_poison: bool = False
    model_identity: bytes = b""

    def check(self, capabilities: Capabilities) -> None:
        """Raise `Refused` for what cannot serve on this device tower."""
        alignment = self.prefill_save_alignment
        if alignment <= 0 or alignment % PAGE_SIZE:
            raise Refused(
                f"prefill_save_alignment {alignment} is not a positive multiple of the page,"
                f" {PAGE_SIZE} tokens"
            )
        if self.decode_checkpoint_interval % PAGE_SIZE or self.decode_checkpoint_interval < 0:
            raise Refused(
                f"decode_checkpoint_interval {self.decode_checkpoint_interval} is not a multiple of"
                f" the page, {PAGE_SIZE} tokens"
            )
        for name, least in (("max_batch_size", 1), ("max_prefill_tokens", 1), ("session_len", 2)):
            if getattr(self, name) < least:
                raise Refused(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.checkpoint_budget < 0 or self.checkpoint_interval < 0:
            raise Refused(
                f"checkpoint_budget {self.checkpoint_budget} and checkpoint_interval"
                f" {self.checkpoint_interval} must not be negative"
            )
        if capabilities.num_slots < 1 or capabilities.num_pages < 1:
            raise Refused(
                f"nothing can run with {capabilities.num_slots} slots and"
                f" {capabilities.num_pages} pages"
            )
        if self.max_batch_size > capabilities.num_seats:
            raise Refused(
                f"max_batch_size {self.max_batch_size} exceeds the {capabilities.num_seats} seats"
            )

    @property
    def decode_anchor_step(self) -> int:
        """Every how many tokens an answer's state may be kept; 0: never."""
        keeps = self.prefix_caching and self.checkpoint_mode != "off" and self.checkpoint_budget > 0
        return self.decode_checkpoint_interval if keeps else 0

    def smallest_prefix(self, capabilities: Capabilities) -> int:
        """The fewest tokens that can be found again: the spacing of anchors."""
        return anchor_step(self.prefill_save_alignment, capabilities.export_granularity)
