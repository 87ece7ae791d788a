"""Refuses options that cannot be served whatever the model is. Needs no file and no device."""

from __future__ import annotations

import re

from millpond.config.options import (
    DRAFT_METHOD,
    NOT_SERVED,
    PAGE,
    PytorchEngineConfig,
    SpeculativeConfig,
)
from millpond.errors import Refused
from millpond.units import GIB, parse_memory

DEVICES = re.compile(r"auto|cpu|cuda(:\d{1,3})?")

LEAST_SESSION = 2
"""Tokens of the shortest sequence that can be served: one of a prompt, one of an answer."""


def check(config: PytorchEngineConfig, speculative: SpeculativeConfig | None = None) -> None:
    """Refuse what cannot be served whatever the model is; needs no file and no device."""
    for name, what in NOT_SERVED.items():
        if getattr(config, name) != PytorchEngineConfig.model_fields[name].default:
            raise Refused(
                f"{name}={getattr(config, name)!r}: {what} is not supported, leave it out"
            )
    if config.tp > 1:
        raise Refused(f"tp={config.tp}: tensor parallelism is not supported yet, use tp=1")
    if config.distributed_executor_backend != "uni":
        raise Refused(
            f"distributed_executor_backend={config.distributed_executor_backend!r} is not "
            "supported yet, use 'uni'"
        )
    if not config.language_model_only:
        raise Refused("language_model_only=False: the vision tower is not supported")
    if speculative is not None and speculative.method != DRAFT_METHOD:
        raise Refused(
            f"speculative method {speculative.method!r} is not supported, use {DRAFT_METHOD!r}"
        )
    if config.block_size != PAGE:
        raise Refused(f"block_size={config.block_size}: a page holds {PAGE} tokens, use {PAGE}")
    if DEVICES.fullmatch(config.device) is None:
        raise Refused(f"device={config.device!r} is none of auto, cpu, cuda, cuda:0, cuda:1, ...")
    if config.session_len is not None and config.session_len < LEAST_SESSION:
        raise Refused(
            f"session_len={config.session_len} leaves no room for a token of a prompt and one of an"
            f" answer: use at least {LEAST_SESSION}, or leave it out for all that the model can"
        )
    save, mode = config.prefill_save_alignment, config.checkpoint_mode
    if save <= 0 or save % PAGE:
        raise Refused(
            f"prefill_save_alignment={save} is not a positive multiple of the page size {PAGE}"
        )
    interval = config.checkpoint_interval
    if "checkpoint_interval" in config.model_fields_set and interval % save:
        raise Refused(
            f"checkpoint_interval={interval} is not a multiple of prefill_save_alignment={save}"
        )
    along = config.decode_checkpoint_interval
    if along and along % PAGE:
        raise Refused(
            f"decode_checkpoint_interval={along} is not a multiple of the page size {PAGE}"
        )
    if along and (mode == "off" or not config.enable_prefix_caching):
        raise Refused(
            f"decode_checkpoint_interval={along} needs prefix caching and checkpoints, one of which"
            " is off"
        )
    if mode in ("interior", "split") and not config.enable_prefix_caching:
        raise Refused(
            f"checkpoint_mode={mode!r} needs prefix caching, but enable_prefix_caching is off"
        )
    pages, blocks = config.num_kv_pages or 0, config.num_gpu_blocks or 0
    if pages and blocks and pages != blocks:
        raise Refused(f"num_kv_pages={pages} and its other name num_gpu_blocks={blocks} disagree")
    if config.cache_memory is not None:
        parse_memory(config.cache_memory, GIB)
    caches = mode != "off" and config.enable_prefix_caching
    if (config.store or config.kv_transfer_config) and not caches:
        raise Refused("a store needs prefix caching and checkpoints, one of which is off")
