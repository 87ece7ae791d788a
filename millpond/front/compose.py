"""Puts the towers together: finds a model, plans its memory, loads it, starts its engine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

import millpond
from millpond.config import (
    ModelFacts,
    PytorchEngineConfig,
    Resolved,
    SpeculativeConfig,
    check,
    resolve,
)
from millpond.engine.loop import Engine
from millpond.engine.settings import EngineSettings
from millpond.errors import Refused
from millpond.executor.build import build_executor
from millpond.front import plan
from millpond.front.chat import ChatTemplate
from millpond.front.machine import free_memory
from millpond.front.metrics import Metrics
from millpond.front.sampling import Defaults
from millpond.front.service import Service
from millpond.front.text import Tokenizer
from millpond.models.base import describe
from millpond.runtime.worker import choose_device, model_facts
from millpond.telemetry import logger

log = logger("start")
BUNDLED = Path(millpond.__file__).parent / "bundled"
DEFAULT_MODEL = "millpond-tiny-glm"


def locate(model: str | Path | None) -> Path:
    """The directory of a model, named or bundled. Raises `Refused` naming what there is."""
    path = Path(model or DEFAULT_MODEL).expanduser()
    bundled = BUNDLED / path
    for directory in (path, bundled):
        if (directory / "config.json").is_file():
            return directory.resolve()
    names = ", ".join(sorted(p.name for p in BUNDLED.iterdir() if (p / "config.json").is_file()))
    if path.is_dir():
        raise Refused(f"{path} holds no config.json: it is not a model in the Hugging Face layout")
    raise Refused(f"no model at {path}: neither a directory nor one of the bundled {names}")


@dataclass(frozen=True, slots=True)
class Planned:
    """A model and its numbers, before a byte of weights is read."""

    directory: Path
    facts: ModelFacts
    eos_token_ids: tuple[int, ...]
    resolved: Resolved
    executor: str


def plan_model(
    model: str | Path | None,
    config: PytorchEngineConfig,
    speculative: SpeculativeConfig | None = None,
) -> Planned:
    """What serving a model would take here. Raises `Refused`."""
    check(config, speculative)
    directory = locate(model)
    # Without a model named, the one everybody can run is run where everybody can run it.
    wanted = "cpu" if model is None and config.device == "auto" else config.device
    device = choose_device(wanted)
    description = describe(directory)
    facts = model_facts(description, dtype=config.dtype, device=str(device))
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    available = max(0, free - facts.weight_bytes)
    resolved = resolve(
        config, facts, available=available, device=device.type, speculative=speculative
    )
    eos = description.eos_token_ids
    return Planned(directory, facts, eos, resolved, config.distributed_executor_backend)


def open_service(
    model: str | Path | None,
    config: PytorchEngineConfig,
    speculative: SpeculativeConfig | None = None,
    *,
    name: str | None = None,
    chat_template: str | Path | None = None,
    on_plan: Callable[[Planned], None] | None = None,
) -> Service:
    """A running service. `on_plan` sees the plan before weights are read. Raises `Refused`."""
    metrics, begin = Metrics(), time.perf_counter()
    planned = plan_model(model, config, speculative)
    directory, resolved = planned.directory, planned.resolved
    log.info("%s", plan.line(resolved, planned.facts))
    for note in resolved.notes:
        log.warning("%s", note)
    if on_plan is not None:
        on_plan(planned)
    tokenizer = Tokenizer(directory)
    template = _template(chat_template, directory, tokenizer)
    defaults = Defaults.of_model(directory)
    planned_at = time.perf_counter()
    with ExitStack() as undo:
        executor = build_executor(directory, resolved, planned.executor)
        undo.callback(executor.close)
        loaded_at = time.perf_counter()
        capabilities = executor.capabilities
        if tokenizer.vocab_size > capabilities.vocab_size:
            raise Refused(
                f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens, the model only "
                f"{capabilities.vocab_size}: they do not belong together"
            )
        engine = Engine(_settings(planned), executor)
        undo.pop_all()  # the engine closes it from here on
    engine.start()
    log.info("sampling defaults of the model: %s", defaults)
    metrics.startup("plan", planned_at - begin)
    metrics.startup("load", loaded_at - planned_at)
    log.info("ready in %.1f s", time.perf_counter() - begin)
    return Service(
        name=name or directory.name,
        directory=directory,
        tokenizer=tokenizer,
        template=template,
        defaults=defaults,
        resolved=resolved,
        vocab_size=capabilities.vocab_size,
        engine=engine,
        metrics=metrics,
    )


def _template(
    given: str | Path | None, directory: Path, tokenizer: Tokenizer
) -> ChatTemplate | None:
    """The template handed in, as a file or as text, or the model's own."""
    if given is None:
        return ChatTemplate.of_model(directory, tokenizer)
    text = str(given)
    if "{" in text:
        return ChatTemplate(text, tokenizer)
    try:
        return ChatTemplate(Path(text).read_text("utf-8"), tokenizer)
    except (OSError, ValueError) as error:
        raise Refused(f"cannot read the chat template {text}: {error}") from error


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
        checkpoint_budget=resolved.checkpoint_budget,
        eos_token_ids=planned.eos_token_ids,
        debug_audit=resolved.debug_audit,
        debug_poison=resolved.debug_poison,
        model_identity=hashlib.sha256((planned.directory / "config.json").read_bytes()).digest(),
    )
