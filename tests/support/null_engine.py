"""A real engine over a device that does nothing, for processes that serve it without torch."""

from __future__ import annotations

import time
from collections.abc import Callable

from millpond.config import ModelFacts, PytorchEngineConfig, resolve
from millpond.engine.grammar import Grammars
from millpond.engine.loop import Engine, EngineSettings
from millpond.engine.outbox import Sink
from millpond.errors import Refused
from millpond.front.directory import locate
from millpond.front.process import messages as m
from millpond.plan.step import Capabilities, Emitted, Ended, Launched, StepPlan, StepResult, Written

FACTS = ModelFacts(
    name="null", slot_bytes=100, page_bytes=10, seat_bytes=1, weight_bytes=0, max_position=8192
)
VOCAB = 2048
TOKEN = 1000


class NullExecutor:
    """Claims to have written whatever was planned, and draws one and the same token."""

    def __init__(self, capabilities: Capabilities, pause: float) -> None:
        self.capabilities, self._pause = capabilities, pause

    def launch(self, plan: StepPlan) -> Launched:
        return Ended.inline(self._run, plan)

    def _run(self, plan: StepPlan) -> StepResult:
        if self._pause:
            time.sleep(self._pause)
        rows = plan.prefill + plan.decode
        return StepResult(
            step=plan.step,
            emitted=tuple(
                Emitted(seat=seat, token=TOKEN) for row in rows for seat in row.emit_seats
            ),
            written=tuple(
                Written(slot, end)
                for row in rows
                for slot, end in ((row.state_out, row.end), *((e.slot, e.end) for e in row.exports))
            ),
        )

    def close(self) -> None:
        pass


def _open(
    start: m.Start, say: Callable[[m.FromEngine], object], sink: Sink, *, pause: float
) -> Engine:
    config = PytorchEngineConfig.model_validate_json(start.engine)
    resolved = resolve(config, FACTS, available=1 << 30)
    say(m.Plan(str(locate(start.model)), FACTS, resolved, VOCAB))
    say(m.Phase("loading"))
    capabilities = Capabilities(
        num_slots=resolved.num_slots,
        num_pages=resolved.num_pages,
        num_seats=resolved.num_seats,
        export_granularity=64,
        vocab_size=VOCAB,
        max_position=resolved.session_len,
    )
    settings = EngineSettings(
        max_batch_size=resolved.max_batch_size,
        max_prefill_tokens=resolved.max_prefill_tokens,
        session_len=resolved.session_len,
        checkpoint_budget=resolved.checkpoint_budget,
        watchdog_seconds=resolved.watchdog_timeout,
        debug_audit=resolved.debug_audit,
    )
    grammars = Grammars(locate(start.model) / "tokenizer.json", VOCAB)
    return Engine(settings, NullExecutor(capabilities, pause), sink, grammars=grammars)


def open_quick(start: m.Start, say: Callable[[m.FromEngine], object], sink: Sink) -> Engine:
    """Answers at once."""
    return _open(start, say, sink, pause=0.0)


def open_slow(start: m.Start, say: Callable[[m.FromEngine], object], sink: Sink) -> Engine:
    """Takes 20 ms a step."""
    return _open(start, say, sink, pause=0.02)


def open_stuck(start: m.Start, say: Callable[[m.FromEngine], object], sink: Sink) -> Engine:
    """Takes ten minutes a step."""
    return _open(start, say, sink, pause=600.0)


def open_refused(start: m.Start, say: Callable[[m.FromEngine], object], sink: Sink) -> Engine:
    """Is refused once weights would be read."""
    _open(start, say, sink, pause=0.0)
    raise Refused("no weights in sight")


def open_broken(start: m.Start, say: Callable[[m.FromEngine], object], sink: Sink) -> Engine:
    """Has a fault of its own."""
    raise ZeroDivisionError("a fault of the start")


def open_never(start: m.Start, say: Callable[[m.FromEngine], object], sink: Sink) -> Engine:
    """Goes on loading."""
    _open(start, say, sink, pause=0.0)
    while True:
        time.sleep(1.0)
