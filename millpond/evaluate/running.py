"""Puts cases to an engine in one mode and keeps what came back; judges nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from millpond.config import GenerationConfig, PytorchEngineConfig, SpeculativeConfig
from millpond.evaluate.cases import Case
from millpond.front.pipeline import Pipeline, Response, pipeline

TOP = 5
"""Alternatives kept for every token: what two modes are compared on."""
_OTHER_SPELLING = 8
"""Objects and calls may say the same in this many more tokens."""
_SHORTEST_WAVE = 16
"""Cases that are put to an engine together, or as many as it runs at once if that is more."""
_FREE_TOKENS = 80
"""Room for replies that have no right length."""

Tell = Callable[[str, int], None]
"""Called with a task's name and how many of its cases have just ended."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run a model: the engine's configuration, and drafts or none."""

    engine: PytorchEngineConfig
    speculative: SpeculativeConfig | None = None
    warm: bool = True

    @property
    def is_warm(self) -> bool:
        """Whether each prompt is sent once before, so that the graded one starts from a hit."""
        caches = self.engine.enable_prefix_caching and self.engine.checkpoint_mode != "off"
        return self.warm and caches

    def describe(self) -> str:
        """What was set, in words."""
        said = self.engine.model_dump(exclude_unset=True)
        if self.speculative is not None:
            said["speculative_num_draft_tokens"] = self.speculative.num_speculative_tokens
        words = [f"{name}={value}" for name, value in sorted(said.items())]
        return ", ".join([*words, "warm" if self.is_warm else "cold"])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one case got: the tokens, and of each the likeliest ids with their log probabilities.

    `cached` is the number of prompt tokens that came from the prefix cache. `error` is what went
    wrong, if the request failed.
    """

    case: Case
    tokens: tuple[int, ...]
    top: tuple[dict[int, float], ...]
    cached: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft tokens put to the test, and how many of them were right."""

    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float | None:
        """Share of them that were accepted, None without any."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass(frozen=True, slots=True)
class Ran:
    """All outcomes of a mode, by task in the order asked, and the drafts of each task."""

    mode: Mode
    outcomes: dict[str, tuple[Outcome, ...]]
    drafts: dict[str, Drafts]


def run(
    model: str | Path | None,
    mode: Mode,
    cases: Sequence[Case],
    tell: Tell | None = None,
) -> Ran:
    """Open the model in `mode` and put all cases to it. Raises `Refused`."""
    with pipeline(model, mode.engine, mode.speculative) as pipe:
        return run_with(pipe, mode, cases, tell)


def run_with(pipe: Pipeline, mode: Mode, cases: Sequence[Case], tell: Tell | None = None) -> Ran:
    """The same with an engine that is open already; tasks one after another, a batch at a time."""
    wave = max(_SHORTEST_WAVE, pipe.service.resolved.max_batch_size)
    outcomes: dict[str, tuple[Outcome, ...]] = {}
    drafts: dict[str, Drafts] = {}
    for task in dict.fromkeys(case.task for case in cases):
        mine = [case for case in cases if case.task == task]
        before = pipe.stats()
        got: list[Outcome] = []
        for first in range(0, len(mine), wave):
            some = mine[first : first + wave]
            if mode.is_warm:
                _ask(pipe, some, warming=True)
            got += _ask(pipe, some)
            if tell is not None:
                tell(task, len(some))
        after = pipe.stats()
        outcomes[task] = tuple(got)
        drafts[task] = Drafts(
            after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens
        )
    return Ran(mode, outcomes, drafts)


def _ask(pipe: Pipeline, cases: Sequence[Case], *, warming: bool = False) -> list[Outcome]:
    wishes = [_wish(pipe, case, warming) for case in cases]
    replies = pipe([case.prompt for case in cases], wishes)
    assert isinstance(replies, list)
    return [_outcome(case, reply) for case, reply in zip(cases, replies, strict=True)]


def _wish(pipe: Pipeline, case: Case, warming: bool) -> GenerationConfig:
    """Greedy, with room for the right reply and the token that ends it.

    There is no more room than that, so that no draft is made, and counted as wrong, for a place
    behind the end.
    """
    if warming:
        return GenerationConfig(max_new_tokens=1, do_sample=False)
    room = len(pipe.tokenizer.encode(case.reply, add_special_tokens=False)) + 1
    if case.kind == "free":
        room = _FREE_TOKENS
    elif case.kind != "text":
        room += _OTHER_SPELLING
    return GenerationConfig(max_new_tokens=room, do_sample=False, logprobs=TOP)


def _outcome(case: Case, reply: Response) -> Outcome:
    failed = reply.finish_reason == "error"
    return Outcome(
        case=case,
        tokens=reply.token_ids,
        top=reply.logprobs or (),
        cached=reply.cached_tokens,
        error=(reply.error or "failed") if failed else None,
    )
