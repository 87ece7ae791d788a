"""The engine of a model directory, opened in a process of its own. Brings torch."""

from __future__ import annotations

from collections.abc import Callable

from millpond.config import PytorchEngineConfig, SpeculativeConfig
from millpond.engine.loop import Engine
from millpond.engine.outbox import Sink
from millpond.front.compose import open_engine, plan_model
from millpond.front.process import messages as m


def open_model(start: m.Start, say: Callable[[m.FromEngine], object], sink: Sink) -> Engine:
    """Plan, load and warm up. Raises `Refused`."""
    say(m.Phase("planning"))
    planned = plan_model(
        start.model,
        PytorchEngineConfig.model_validate_json(start.engine),
        None
        if start.speculative is None
        else SpeculativeConfig.model_validate_json(start.speculative),
    )
    say(m.Plan(str(planned.directory), planned.facts, planned.resolved, planned.vocab_size))
    return open_engine(
        planned,
        sink=sink,
        on_phase=lambda name: say(m.Phase(name)),
        on_sized=lambda resolved: say(m.Sized(resolved)),
        warm=True,
    )
