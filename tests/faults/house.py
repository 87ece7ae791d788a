"""A whole engine on a model whose every value is a whole number: what a row read shows.

The host half is the real one, and so are arenas, staging, poison and sampling; only the model is
`tests.support.fake_model`. A request that reads anything but its own tokens, each folded once,
draws another token than `answer` says, or not a number.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import count

import torch

from millpond.engine.loop import Engine
from millpond.engine.settings import EngineSettings
from millpond.engine.stream import RequestStream
from millpond.engine.types import EngineRequest
from millpond.executor.uni import UniExecutor
from millpond.ops.bind import bind
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import Capabilities, Ended, Launched, Row, StepPlan, StepResult
from millpond.runtime.worker import Worker
from tests.support.fake_model import VOCAB, FakeModel, expected_token, fake_layout

PATIENCE = 20_000
"""Steps after which an engine that still has work is called stuck."""


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random tokens; a longer prompt of the same seed begins with a shorter one."""
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCAB) for _ in range(length))


def answer(tokens: Sequence[int], length: int) -> list[int]:
    """The greedy continuation of a prompt, computed without an engine."""
    known = list(tokens)
    for _ in range(length):
        known.append(expected_token(known))
    return known[len(tokens) :]


class Recorder:
    """An executor that notes plans and results, and lets a test step in between."""

    def __init__(self, inner: UniExecutor) -> None:
        self.inner = inner
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        self.before: Callable[[StepPlan], None] = lambda plan: None  # may raise StepFailed
        self.after: Callable[[StepPlan, StepResult], StepResult] = lambda plan, result: result

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def launch(self, plan: StepPlan) -> Launched:
        return Ended.inline(self._run, plan)

    def _run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.before(plan)
        result = self.after(plan, self.inner.launch(plan).result())
        self.results.append(result)
        return result

    def close(self) -> None:
        self.inner.close()

    def rows(self, request: str | None = None) -> list[Row]:
        """All rows so far, in order; of one request, or of all."""
        rows = [row for plan in self.plans for row in (*plan.prefill, *plan.decode)]
        return [row for row in rows if request is None or row.request.startswith(request)]


class Ask:
    """One request and what came of it."""

    def __init__(self, stream: RequestStream, spec: EngineRequest) -> None:
        self.stream = stream
        self.spec = spec
        self.name = spec.request_id
        self.tokens: list[list[int]] = [[] for _ in range(spec.params.n)]
        self.finish: list[str | None] = [None] * spec.params.n
        self.error: str | None = None
        self.reason = ""
        self.cached = 0

    def read(self) -> None:
        """Take what has arrived, without waiting."""
        while True:
            try:
                delta = self.stream.get(timeout=0)
            except TimeoutError:
                return
            if delta is None:
                return
            self.tokens[delta.sample_index] += [out.token for out in delta.tokens]
            self.finish[delta.sample_index] = delta.finish_reason
            self.error = self.error or delta.error
            if delta.outcome is not None:
                self.reason, self.cached = delta.outcome.reason, delta.outcome.cached_tokens

    @property
    def is_right(self) -> bool:
        """Whether every sample continued the prompt, and nothing else, to its end."""
        self.read()
        params = self.spec.params
        wanted = answer(self.spec.tokens, params.max_tokens)
        return all(t == wanted for t in self.tokens) and set(self.finish) == {"length"}


class House:
    """An engine that is stepped by hand; audit and poison are always on."""

    def __init__(
        self,
        *,
        slots: int = 12,
        pages: int = 256,
        seats: int = 4,
        budget: int = 256,
        model: FakeModel | None = None,
        **settings: object,
    ) -> None:
        self.model = model or FakeModel()
        session = 64 * pages
        worker = Worker(
            self.model,
            fake_layout(),
            device=torch.device("cpu"),
            num_slots=slots,
            num_pages=pages,
            num_seats=seats,
            vocab_size=VOCAB,
            max_position=session,
            ops=bind(torch.device("cpu")),
            debug_poison=True,
        )
        self.arenas = worker.runner.arenas
        self.executor = Recorder(UniExecutor(worker))
        given: dict[str, object] = {
            "max_batch_size": seats,
            "max_prefill_tokens": budget,
            "session_len": session,
            "checkpoint_budget": slots,
            "debug_audit": True,
            "debug_poison": True,
            **settings,
        }
        self.engine = Engine(EngineSettings(**given), self.executor)  # type: ignore[arg-type]
        self.ledger = self.engine._ledger
        self._names = count()

    def ask(
        self, tokens: Sequence[int], max_tokens: int = 3, *, salt: str = "", **params: object
    ) -> Ask:
        """Submit a prompt; greedy unless told otherwise."""
        sampling = {"temperature": 0.0, "ignore_eos": True, **params}
        spec = EngineRequest(
            request_id=f"r{next(self._names)}",
            tokens=tuple(tokens),
            params=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
            cache_salt=salt,
        )
        return Ask(self.engine.submit(spec), spec)

    def run(self, *asks: Ask) -> None:
        """Step until there is nothing left to do, and read what came."""
        for _ in range(PATIENCE):
            if not self.engine.step():
                break
        else:
            raise AssertionError("the engine does not come to an end")
        for ask in asks:
            ask.read()

    def served(self, tokens: Sequence[int], max_tokens: int = 3, **given: object) -> Ask:
        """Submit one prompt and run it to its end."""
        ask = self.ask(tokens, max_tokens, **given)  # type: ignore[arg-type]
        self.run(ask)
        return ask

    def assert_nothing_is_held(self) -> None:
        """Every slot is free or a checkpoint, every page free or reachable through one."""
        stats = self.engine.stats()
        assert stats.requests_running == stats.requests_waiting == stats.slots_running == 0
        assert stats.slots_free + stats.slots_checkpoint == stats.slots_total
        assert stats.pages_free + stats.pages_indexed == stats.pages_total
        self.engine.flush_cache()
        self.run()
        stats = self.engine.stats()
        assert stats.slots_free == stats.slots_total
        assert stats.pages_free == stats.pages_total
