"""Puts the towers together: finds a model, plans its memory, loads it, starts its engine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
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
from millpond.engine.types import EngineRequest
from millpond.errors import Refused
from millpond.executor.build import build_executor
from millpond.front import plan
from millpond.front.directory import Texts, locate
from millpond.front.machine import free_memory
from millpond.front.service import Service
from millpond.front.startup import Startup
from millpond.front.stores import Weights, open_store
from millpond.models.base import describe
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import Executor
from millpond.runtime.worker import choose_device, model_facts
from millpond.store.config import StoreConfig, store_config
from millpond.telemetry import logger

log = logger("start")
WARM_PROMPT = 96
"""Tokens: more than a page, and no whole number of them."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A model and its numbers, before a byte of weights is read."""

    directory: Path
    facts: ModelFacts
    eos_token_ids: tuple[int, ...]
    resolved: Resolved
    executor: str
    vocab_size: int
    store: StoreConfig | None = None


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
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    available = max(0, free - facts.weight_bytes)
    resolved = resolve(
        config, facts, available=available, device=device.type, speculative=speculative
    )
    return Planned(
        directory=directory,
        facts=facts,
        eos_token_ids=description.eos_token_ids,
        resolved=resolved,
        executor=config.distributed_executor_backend,
        vocab_size=description.config.vocab_size,
        store=store,
    )


def open_engine(
    planned: Planned,
    *,
    sink: Sink | None = None,
    on_phase: Callable[[str], object] = lambda name: None,
    warm: bool = False,
) -> Engine:
    """Load what was planned; the engine is not started. `warm` runs every path once before.

    `on_phase` hears of each phase as it begins: loading, warm-up. Raises `Refused`.
    """
    settings = _settings(planned)
    with ExitStack() as undo:
        on_phase("loading")
        weights = None
        if planned.store is not None:  # checksummed beside the loading, which reads the same bytes
            reader = ThreadPoolExecutor(1, "millpond-identity")
            weights = reader.submit(Weights, planned.store, planned.directory, planned.resolved)
            reader.shutdown(wait=False)  # ends when that is done
        executor = build_executor(planned.directory, planned.resolved, planned.executor)
        undo.callback(executor.close)
        if warm:
            on_phase("warm-up")
            warm_up(settings, executor)
        store = None
        if planned.store is not None and weights is not None:
            store = open_store(planned.store, weights.result(), planned.resolved, executor)
        grammars = Grammars(
            planned.directory / "tokenizer.json",
            executor.capabilities.vocab_size,
            planned.eos_token_ids,
        )
        engine = Engine(settings, executor, sink, grammars=grammars, store=store)
        undo.pop_all()  # the engine closes it from here on
    return engine


class _Kept:
    """An executor that outlives the engine which is told to close it."""

    def __init__(self, executor: Executor) -> None:
        self.capabilities = executor.capabilities
        self.launch = executor.launch

    def close(self) -> None:
        """Nothing: it is still needed."""


def warm_up(settings: EngineSettings, executor: Executor) -> None:
    """Run prefill, decoding and sampling once, so that nobody's first request pays for it.

    By an engine of its own, whose ledger and counters are then forgotten. Raises `Refused` when
    nothing comes out.
    """
    engine = Engine(settings, _Kept(executor))
    token = next(
        t for t in range(len(settings.eos_token_ids) + 1) if t not in settings.eos_token_ids
    )
    for temperature in (0.0, 1.0):
        room = min(settings.session_len, executor.capabilities.max_position)
        params = SamplingParams(max_tokens=3, temperature=temperature, ignore_eos=True)
        prompt = (token,) * max(1, min(WARM_PROMPT, room - params.max_tokens))
        request = EngineRequest(request_id=f"warm-{temperature}", tokens=prompt, params=params)
        stream = engine.submit(request)
        while engine.step():
            pass
        last = [delta.finish_reason for delta in stream][-1]
        if last != "length":
            raise Refused(f"the model does not run: a first request ended with {last!r}")
    engine.close(drain=False)


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
    engine = open_engine(planned, on_phase=startup.enter)
    engine.start()
    startup.enter("ready")
    return Service.of(texts, planned.resolved, planned.vocab_size, engine, startup, name=name)


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
        eos_token_ids=planned.eos_token_ids,
        debug_audit=resolved.debug_audit,
        debug_poison=resolved.debug_poison,
        model_identity=hashlib.sha256((planned.directory / "config.json").read_bytes()).digest(),
    )
