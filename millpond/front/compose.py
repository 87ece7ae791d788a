"""Puts the towers together: finds a model, plans its memory, loads it, starts its engine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from millpond.config import (
    ModelFacts,
    PytorchEngineConfig,
    Resolved,
    SpeculativeConfig,
    check,
    num_drafts,
    resolve,
)
from millpond.engine.grammar import Grammars
from millpond.engine.loop import Engine
from millpond.engine.outbox import Sink
from millpond.engine.settings import EngineSettings
from millpond.executor.build import build_executor
from millpond.front import plan
from millpond.front.directory import Texts, locate
from millpond.front.machine import free_memory
from millpond.front.service import Service
from millpond.front.startup import Startup
from millpond.front.stores import Weights, open_store
from millpond.models.base import describe
from millpond.runtime.checks import check_weights
from millpond.runtime.place import choose_device
from millpond.runtime.worker import model_facts
from millpond.store.config import StoreConfig, store_config
from millpond.telemetry import logger

log = logger("start")


@dataclass(frozen=True, slots=True)
class Planned:
    """A model and its numbers, before a byte of weights is read."""

    directory: Path
    facts: ModelFacts
    eos_token_ids: tuple[int, ...]
    resolved: Resolved
    executor: str
    vocab_size: int
    config: PytorchEngineConfig
    speculative: SpeculativeConfig | None = None
    store: StoreConfig | None = None

    def resized(self, available: int) -> Resolved:
        """The numbers for so many bytes of memory for slots, pages and seats. Raises `Refused`."""
        resolved = resolve(
            self.config,
            self.facts,
            available=available,
            device=self.resolved.device,
            speculative=self.speculative,
        )
        for note in resolved.notes:
            if note not in self.resolved.notes:
                log.warning("%s", note)
        return resolved


def plan_model(
    model: str | Path | None,
    config: PytorchEngineConfig,
    speculative: SpeculativeConfig | None = None,
) -> Planned:
    """What serving a model would take here. Raises `Refused`."""
    check(config, speculative)
    store = store_config(config)
    directory = locate(model)
    # Without a model named, the one everybody can run is run where everybody can run it.
    wanted = "cpu" if model is None and config.device == "auto" else config.device
    device = choose_device(wanted)
    description = describe(directory)
    drafts = num_drafts(speculative)
    facts = model_facts(
        description, dtype=config.dtype, device=str(device), num_draft_tokens=drafts
    )
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        check_weights(facts.name, facts.weight_bytes, free)
    else:
        free = free_memory()
    available = max(0, free - facts.weight_bytes)
    resolved = resolve(
        config, facts, available=available, device=str(device), speculative=speculative
    )
    return Planned(
        directory=directory,
        facts=facts,
        eos_token_ids=description.eos_token_ids,
        resolved=resolved,
        executor=config.distributed_executor_backend,
        vocab_size=description.config.vocab_size,
        config=config,
        speculative=speculative,
        store=store,
    )


def open_engine(
    planned: Planned,
    *,
    sink: Sink | None = None,
    on_phase: Callable[[str], object] = lambda name: None,
    on_sized: Callable[[Resolved], object] = lambda resolved: None,
    warm: bool = False,
) -> Engine:
    """Load what was planned; the engine is not started. `warm` runs every path once before.

    `on_phase` hears of each phase as it begins: loading, warm-up, and on a GPU profiling and
    capture; `on_sized` of the numbers once memory has been measured. Raises `Refused`.
    """
    with ExitStack() as undo:
        weights = None
        if planned.store is not None:  # checksummed beside the loading, which reads the same bytes
            reader = ThreadPoolExecutor(1, "millpond-identity")
            weights = reader.submit(Weights, planned.store, planned.directory, planned.resolved)
            reader.shutdown(wait=False)  # ends when that is done
        built = build_executor(
            planned.directory,
            planned.resolved,
            planned.executor,
            warm=warm,
            resize=planned.resized,
            on_phase=on_phase,
        )
        executor, planned = built.executor, replace(planned, resolved=built.resolved)
        undo.callback(executor.close)
        on_sized(planned.resolved)
        store = None
        if planned.store is not None and weights is not None:
            store = open_store(planned.store, weights.result(), planned.resolved, executor)
        grammars = Grammars(
            planned.directory / "tokenizer.json",
            executor.capabilities.vocab_size,
            planned.eos_token_ids,
        )
        engine = Engine(_settings(planned), executor, sink, grammars=grammars, store=store)
        undo.pop_all()  # the engine closes it from here on
    return engine


def open_service(
    model: str | Path | None,
    config: PytorchEngineConfig,
    speculative: SpeculativeConfig | None = None,
    *,
    name: str | None = None,
    chat_template: str | Path | None = None,
    on_plan: Callable[[Planned], object] | None = None,
) -> Service:
    """A service whose engine runs in this process. Raises `Refused`.

    `on_plan` sees the plan before weights are read; without one, the plan is logged.
    """
    begin = time.perf_counter()
    planned = plan_model(model, config, speculative)
    if on_plan is None:
        log.info("%s", plan.line(planned.resolved, planned.facts))
        for note in planned.resolved.notes:
            log.warning("%s", note)
    else:
        on_plan(planned)
    texts = Texts.read(planned.directory, chat_template)
    texts.fit(planned.vocab_size)
    startup = Startup(begin)
    sized: list[Resolved] = []
    engine = open_engine(planned, on_phase=startup.enter, on_sized=sized.append)
    engine.start()
    startup.enter("ready")
    return Service.of(texts, sized[-1], planned.vocab_size, engine, startup, name=name)


def _settings(planned: Planned) -> EngineSettings:
    resolved = planned.resolved
    return EngineSettings(
        max_batch_size=resolved.max_batch_size,
        max_prefill_tokens=resolved.max_prefill_tokens,
        session_len=resolved.session_len,
        prefix_caching=resolved.prefix_caching,
        checkpoint_mode=resolved.checkpoint_mode,
        prefill_save_alignment=resolved.prefill_save_alignment,
        checkpoint_interval=resolved.checkpoint_interval,
        decode_checkpoint_interval=resolved.decode_checkpoint_interval,
        checkpoint_budget=resolved.checkpoint_budget,
        hold_and_join=resolved.hold_and_join,
        max_overtakes=resolved.max_overtakes,
        watchdog_seconds=resolved.watchdog_timeout,
        eos_token_ids=planned.eos_token_ids,
        debug_audit=resolved.debug_audit,
        debug_poison=resolved.debug_poison,
        model_identity=hashlib.sha256((planned.directory / "config.json").read_bytes()).digest(),
    )
