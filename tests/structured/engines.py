"""The bundled model behind an engine that is stepped by hand, and what constrained requests ask."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from msgspec.structs import replace

import millpond
from millpond.engine.constraint import Constraint, Reasoning
from millpond.engine.grammar import Grammars
from millpond.engine.loop import Engine, EngineSettings
from millpond.engine.types import EngineRequest
from millpond.executor.uni import UniExecutor
from millpond.front.text import Tokenizer
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import Launched, SeatMask, StepPlan, StepResult
from millpond.runtime.worker import Worker, load

MODEL = Path(millpond.__file__).parent / "bundled" / "millpond-tiny-glm"
EOS = (2012, 2019, 2021)
VOCAB = 2048

_names = count()


@cache
def tokenizer() -> Tokenizer:
    """That of the bundled model."""
    return Tokenizer(MODEL)


@cache
def worker(num_drafts: int = 0) -> Worker:
    """A rank that runs the bundled model; one a number of drafts, used by one engine at a time."""
    return load(
        MODEL,
        device="cpu",
        num_slots=16,
        num_pages=48,
        num_seats=6,
        session_len=2048,
        num_draft_tokens=num_drafts,
        debug_poison=True,
    )


def tokens(text: str) -> tuple[int, ...]:
    """Ids of a text."""
    return tuple(tokenizer().encode(text, add_special_tokens=False))


def text(ids: tuple[int, ...]) -> str:
    """What ids say, special tokens left out."""
    return tokenizer().decode(ids)


@dataclass
class Told:
    """What a sample said, and how it ended."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    stop: int | None = None
    error: str | None = None
    param: str | None = None
    accepted: int = 0

    @property
    def text(self) -> str:
        """As a user reads it."""
        return text(tuple(self.tokens))


class Noting(UniExecutor):
    """Notes what is launched, and when what it draws is: by step. With `ahead` two may fly."""

    def __init__(self, worker: Worker, *, ahead: bool) -> None:
        super().__init__(worker)
        self._capabilities = replace(self._capabilities, runs_ahead=ahead)
        self.events: list[tuple[str, int]] = []
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> Launched:
        """Hand it to the rank."""
        self.plans.append(plan)
        self.events.append(("launch", plan.step))
        return Noted(super().launch(plan), plan.step, self.events)


@dataclass
class Noted:
    """A step in flight."""

    launched: Launched
    step: int
    events: list[tuple[str, int]]

    def draw(self, masks: tuple[SeatMask, ...]) -> None:
        """Its masks are there."""
        self.events.append(("draw", self.step))
        self.launched.draw(masks)

    def result(self) -> StepResult:
        """Its end."""
        self.events.append(("end", self.step))
        return self.launched.result()


class House:
    """An engine on the bundled model."""

    def __init__(self, num_drafts: int = 0, *, ahead: bool = False, **settings: Any) -> None:
        self.worker = worker(num_drafts)
        self.grammars = Grammars(MODEL / "tokenizer.json", VOCAB, EOS)
        given: dict[str, Any] = {
            "max_batch_size": 6,
            "max_prefill_tokens": 256,
            "session_len": 2048,
            "eos_token_ids": EOS,
            "debug_audit": True,
            "debug_poison": True,
        }
        self.executor = Noting(self.worker, ahead=ahead)
        self.engine = Engine(
            EngineSettings(**(given | settings)), self.executor, grammars=self.grammars
        )

    def request(
        self,
        prompt: str = "Say something.",
        constraint: Constraint | None = None,
        reasoning: Reasoning | None = None,
        **params: Any,
    ) -> EngineRequest:
        """A request; keywords are sampling parameters."""
        given: dict[str, Any] = {"max_tokens": 200, "temperature": 1.5, "seed": 1}
        if constraint is not None:
            self.engine.prepare(constraint).result(60)
        return EngineRequest(
            request_id=f"r{next(_names)}",
            tokens=tokens(prompt),
            params=SamplingParams(**(given | params)),
            constraint=constraint,
            reasoning=reasoning,
        )

    def tell(self, *requests: EngineRequest) -> list[list[Told]]:
        """Run requests together to their ends; per request, its samples."""
        streams = [self.engine.submit(request) for request in requests]
        while self.engine.step():
            pass
        return [
            read(stream, request.params.n)
            for stream, request in zip(streams, requests, strict=True)
        ]

    def close(self) -> None:
        """End it; the rank stays."""
        self.engine.close(drain=False)


def read(stream: Any, samples: int) -> list[Told]:
    """All a finished stream holds."""
    told = [Told() for _ in range(samples)]
    while (delta := stream.get(timeout=0)) is not None:
        one = told[delta.sample_index]
        one.tokens += [out.token for out in delta.tokens]
        one.accepted += delta.accepted
        if delta.finish_reason is not None:
            one.finish, one.stop, one.error = delta.finish_reason, delta.stop_token, delta.error
            one.param = delta.param
    return told
