"""The blocking face of the engine: `with pipeline() as pipe: pipe("...")`."""

from __future__ import annotations

import asyncio
import queue
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from millpond.config import GenerationConfig, PytorchEngineConfig, SpeculativeConfig
from millpond.engine.constraint import Constraint
from millpond.engine.types import EngineStats
from millpond.errors import Rejected, StepFailed, Unavailable
from millpond.front.answer import Answer, Ask, Piece, TextToken
from millpond.front.compose import open_service
from millpond.front.parsing.base import Event, ToolCall, collect, merged
from millpond.front.parsing.wish import ToolWish
from millpond.front.service import Flight, Service
from millpond.front.structured import from_response_format
from millpond.front.text import Tokenizer
from millpond.telemetry import log_to_stderr

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True)
class Response:
    """An answer, or while streaming what it gained.

    `text` is the answer without the think block, which is `reasoning_text`; `raw_text` is both as
    generated. `token_ids` are all generated tokens, the one that stopped it included. `logprobs`
    has per token its own log probability first, then those of the alternatives asked for.
    `prefix` says how the prompt met the prefix cache. With n > 1, `samples` holds all answers.
    `events` are the reasoning, the text and the tool calls in their order, as they came; those of a
    whole answer are also together in `tool_calls`. Of `drafted_tokens` that were verified for the
    prompt so far, `accepted_tokens` were right.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    logprobs: tuple[dict[int, float], ...] | None = None
    reasoning_text: str = ""
    raw_text: str = ""
    stop_reason: str | int | None = None
    prefix: str | None = None
    random_seed: int | None = None
    index: int = 0
    sample_index: int = 0
    error: str | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    events: tuple[Event, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    samples: tuple[Response, ...] = ()


class Pipeline:
    """One model ready to answer. Thread-safe; close it, or use it in a `with` statement."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="millpond-pipeline", daemon=True
        )
        self._thread.start()
        self._lock = threading.Lock()  # for what follows
        self._pumps: set[Future[None]] = set()  # those that carry pieces to a caller
        self._closed = False

    def __enter__(self) -> Pipeline:
        """The pipeline itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """End what still runs and give everything back. Closing twice does nothing."""
        with self._lock:
            already, self._closed = self._closed, True
            pumps = set(self._pumps)
        if already:
            return
        self.service.engine.close(drain=False, timeout=10.0)
        wait(pumps, 10.0)  # all streams have ended, and their readers are still to be told so
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def name(self) -> str:
        """What the model is called."""
        return self.service.name

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.service.tokenizer

    def flush_cache(self) -> None:
        """Forget every cached prefix; what runs goes on. Its slots are free when this returns."""
        self.service.engine.flush_cache()

    def stats(self) -> EngineStats:
        """The engine's counters since start."""
        return self.service.engine.stats()

    def __call__(
        self,
        prompts: Prompt | Sequence[Prompt],
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        do_preprocess: bool = True,
        **template: Any,
    ) -> Response | list[Response]:
        """Answer one prompt, or several together.

        A prompt is a string, a list of messages, or a list of token ids. A string is the user's
        message of a chat; with `do_preprocess=False`, or for a model without a chat template, it is
        continued as it stands, as ids always are. Keywords of a chat: `tools`, `tool_choice` and
        `parallel_tool_calls` as in the OpenAI API, `reasoning_effort`, `thinking_budget` (tokens of
        reasoning), `add_generation_prompt`, `continue_final_message`; others are the template's.
        Raises `Rejected` (a `ValueError`) for what cannot be served, `StepFailed` when a single
        answer failed; in a list, a failed one says so in `error`.
        """
        batch, single = _as_batch(prompts)
        asks = self._asks(batch, gen_config, do_preprocess, template)
        if not asks:
            return []
        kept: list[list[Piece]] = [[] for _ in asks]
        flight = Flight(self.service, asks, uuid.uuid4().hex)
        for index, piece in self._follow(flight):
            kept[index].append(piece)
        made = [_whole(i, a, p) for i, (a, p) in enumerate(zip(flight.answers, kept, strict=True))]
        if not single:
            return made
        failed = next((p for p in kept[0] if p.finish_reason == "error"), None)
        if failed is not None:
            raise self._failure(failed)
        return made[0]

    def stream_infer(
        self,
        prompts: Prompt | Sequence[Prompt],
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        do_preprocess: bool = True,
        **template: Any,
    ) -> Iterator[Response]:
        """What the answers gain, as it comes; arguments as in a call.

        `index` says which prompt a piece belongs to. Leaving the loop early ends the requests.
        """
        batch, _ = _as_batch(prompts)
        asks = self._asks(batch, gen_config, do_preprocess, template)
        return self._stream(asks)

    def _stream(self, asks: Sequence[Ask]) -> Iterator[Response]:
        if not asks:
            return
        flight = Flight(self.service, asks, uuid.uuid4().hex)
        for index, piece in self._follow(flight):
            if piece.finish_reason == "error":
                raise self._failure(piece)
            yield _response(index, flight.answers[index], [piece])

    def _failure(self, piece: Piece) -> StepFailed | Unavailable | Rejected:
        if not self.service.engine.healthy:
            return Unavailable(f"the engine has failed: {self.service.engine.failure}")
        if piece.param is not None:
            return Rejected(piece.error or "the request cannot be served", param=piece.param)
        return StepFailed(piece.error or "the request failed")

    def _follow(self, flight: Flight) -> Iterator[tuple[int, Piece]]:
        """The pieces of a flight, from the loop's thread to this one; aborts it when left early."""
        out: queue.SimpleQueue[tuple[int, Piece] | BaseException | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async with aclosing(flight.pieces()) as pieces:
                    async for item in pieces:
                        out.put(item)
                out.put(None)
            except Exception as error:  # noqa: BLE001 -- raised again where it is read
                out.put(error)

        with self._lock:
            if self._closed:
                flight.abort()
                raise Unavailable("the pipeline is closed")
            task = asyncio.run_coroutine_threadsafe(pump(), self._loop)
            self._pumps.add(task)
        try:
            while (item := out.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            task.cancel()
            with self._lock:
                self._pumps.discard(task)
            flight.abort()

    def _asks(
        self,
        batch: Sequence[Prompt],
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None,
        do_preprocess: bool,
        template: Mapping[str, Any],
    ) -> list[Ask]:
        if self._closed:
            raise Unavailable("the pipeline is closed")
        if gen_config is None or isinstance(gen_config, GenerationConfig):
            wishes = [gen_config or GenerationConfig()] * len(batch)
        else:
            wishes = list(gen_config)
        if len(wishes) != len(batch):
            raise Rejected(f"{len(wishes)} configurations for {len(batch)} prompts")
        asks = [
            self._ask(prompt, wish, do_preprocess, template)
            for prompt, wish in zip(batch, wishes, strict=True)
        ]
        try:
            for compiled in self.service.prepare(asks):
                compiled.result()
        except CancelledError:
            raise Unavailable("the pipeline is closed") from None
        return asks

    def _ask(
        self, prompt: Prompt, wish: GenerationConfig, chat: bool, template: Mapping[str, Any]
    ) -> Ask:
        service = self.service
        shape = from_response_format(wish.response_format)
        if isinstance(prompt, str):
            if not prompt:
                raise Rejected("the prompt is empty", param="prompt", code="empty_prompt")
            if chat and service.template is not None:
                messages = [{"role": "user", "content": prompt}]
                return self._ask_chat(messages, wish, shape, template)
            return service.ask(prompt, wish, constraint=shape)
        talk = [m for m in prompt if isinstance(m, Mapping)]
        if prompt and len(talk) == len(prompt):
            return self._ask_chat(talk, wish, shape, template)
        return service.ask([_token(t) for t in prompt], wish, constraint=shape)

    def _ask_chat(
        self,
        messages: Sequence[Message],
        wish: GenerationConfig,
        shape: Constraint | None,
        given: Mapping[str, Any],
    ) -> Ask:
        """An `Ask` for a conversation; keywords that are not of ours are the template's."""
        extra = dict(given)
        names = ("add_generation_prompt", "continue_final_message")
        own = {name: extra.pop(name) for name in names if name in extra}
        choice = [extra.pop(n, None) for n in ("tools", "tool_choice", "parallel_tool_calls")]
        budget = extra.pop("thinking_budget", None)
        effort = extra.pop("reasoning_effort", None)
        if effort is not None and self.service.template is not None:
            extra |= self.service.template.effort(effort)
        return self.service.ask_chat(
            messages,
            wish,
            template={**own, "extra": extra},
            tools=ToolWish.of(*choice),
            thinking_budget=budget,
            constraint=shape,
        )


def pipeline(
    model_path: str | Path | None = None,
    backend_config: PytorchEngineConfig | None = None,
    speculative_config: SpeculativeConfig | None = None,
    chat_template: str | Path | None = None,
    log_level: str = "WARNING",
) -> Pipeline:
    """Load a model and start its engine; without arguments the bundled model, on the CPU.

    `model_path` is a directory in the Hugging Face layout or the name of a bundled model,
    `chat_template` a file or the template itself, in place of the model's own. Raises `Refused`
    for a model or configuration that cannot be served, before weights are read wherever possible.
    """
    log_to_stderr(log_level)
    service = open_service(
        model_path,
        backend_config or PytorchEngineConfig(),
        speculative_config,
        chat_template=chat_template,
    )
    return Pipeline(service)


def _token(value: Any) -> int:
    if type(value) is not int:
        raise Rejected(f"a prompt is text, messages or token ids, not {value!r}", param="prompt")
    return value


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> tuple[Sequence[Prompt], bool]:
    """(prompts, whether it was a single one)."""
    if isinstance(prompts, str):
        return [prompts], True
    if not isinstance(prompts, Sequence):
        raise Rejected(f"a prompt is text, messages or token ids, not {type(prompts).__name__}")
    if prompts and isinstance(prompts[0], int | Mapping):
        return [prompts], True  # type: ignore[list-item]
    for prompt in prompts:
        if not isinstance(prompt, str | Sequence):
            raise Rejected(f"a prompt is text, messages or token ids, not {prompt!r}")
    return prompts, False  # type: ignore[return-value]


def _logprobs(tokens: Sequence[TextToken]) -> tuple[dict[int, float], ...] | None:
    if not tokens or tokens[0].out.logprob is None:
        return None
    return tuple({t.out.token: t.out.logprob or 0.0, **dict(t.out.top)} for t in tokens)


def _response(index: int, answer: Answer, pieces: Sequence[Piece]) -> Response:
    """One sample's pieces as one response."""
    tokens = [t for p in pieces for t in p.tokens]
    last = pieces[-1]
    return Response(
        text="".join(p.text for p in pieces),
        token_ids=tuple(t.out.token for t in tokens),
        finish_reason=last.finish_reason,
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.samples[last.index].count,
        cached_tokens=answer.cached_tokens,
        logprobs=_logprobs(tokens),
        reasoning_text="".join(p.reasoning for p in pieces),
        raw_text="".join(p.raw for p in pieces),
        stop_reason=last.stop_reason,
        prefix=answer.outcome.reason if answer.outcome else None,
        random_seed=answer.ask.params.seed if answer.ask.params.temperature else None,
        index=index,
        sample_index=last.index,
        error=last.error,
        drafted_tokens=answer.drafted,
        accepted_tokens=answer.accepted,
        events=merged(e for p in pieces for e in p.events),
    )


def _whole(index: int, answer: Answer, pieces: Sequence[Piece]) -> Response:
    """All samples of one prompt; the first one stands for them."""
    count = answer.ask.params.n
    made = [_response(index, answer, [p for p in pieces if p.index == i]) for i in range(count)]
    made = [replace(r, tool_calls=collect(r.events).calls) for r in made]
    return replace(made[0], samples=tuple(made)) if count > 1 else made[0]
