"""One model behind one engine, as every front door sees it: prompts in, pieces of answers out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from millpond.config import GenerationConfig, Resolved
from millpond.engine.constraint import Constraint
from millpond.engine.types import Delta, EngineRequest, EngineStats
from millpond.errors import Busy, Rejected, Unavailable
from millpond.front.answer import Answer, Ask, Piece
from millpond.front.chat import ChatTemplate
from millpond.front.directory import Texts
from millpond.front.metrics import Metrics
from millpond.front.parsing.wish import ToolWish
from millpond.front.sampling import Defaults, to_params
from millpond.front.startup import Startup
from millpond.front.text import Tokenizer
from millpond.front.verbatim import Spans
from millpond.telemetry import logger

log = logger("start")

ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""What routes put before the id of a request to make that of its answer."""


class Stream(Protocol):
    """Deltas of one request; ends after every sample has a finish reason."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        """The deltas, in order."""

    def abort(self) -> None:
        """End the request; nothing happens when it is over."""


class Door(Protocol):
    """The engine's front door, which is all of it that this package uses."""

    @property
    def healthy(self) -> bool:
        """Whether requests are still answered."""

    @property
    def failure(self) -> str | None:
        """Why not."""

    def submit(self, request: EngineRequest) -> Stream:
        """`Rejected` for one that can never be served, `Unavailable` when closing or dead."""

    def prepare(self, constraint: Constraint) -> Future[Any]:
        """Compile a constraint elsewhere; this or the future raise `Rejected` or `Unavailable`."""

    def stats(self) -> EngineStats:
        """Counters since start."""

    def flush_cache(self) -> None:
        """Forget every prefix."""

    def close(self, drain: bool, timeout: float) -> None:
        """Stop; with `drain`, after what is running has ended, or `timeout` seconds."""


class Room:
    """How many prompts may be under way at once; `limit` None is any number. Thread-safe."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.taken = limit, 0
        self._lock = threading.Lock()

    def look(self, count: int = 1) -> None:
        """Raise `Busy` when there is no room for `count` prompts now."""
        if self.limit is not None and self.taken + count > self.limit:
            raise Busy(
                f"{self.taken} prompts are under way, at most {self.limit} may be: try again later"
            )

    def take(self, count: int) -> None:
        """Take room for `count` prompts. Raises `Busy`."""
        with self._lock:
            self.look(count)
            self.taken += count

    def give(self, count: int) -> None:
        """Give it back."""
        with self._lock:
            self.taken -= count


@dataclass(slots=True)
class Service:
    """A model that answers; `draining` closes the doors first.

    All else is fixed, but for the numbers of an engine that measures its memory while it starts.
    """

    name: str
    directory: Path
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: Defaults
    resolved: Resolved
    vocab_size: int
    engine: Door
    metrics: Metrics = field(default_factory=Metrics)
    startup: Startup = field(default_factory=Startup.over)
    room: Room = field(default_factory=Room)
    flights: set[Flight] = field(default_factory=set)  # those that are under way
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    force_usage: bool = False  # streams carry usage even when it is not asked for

    @classmethod
    def of(
        cls,
        texts: Texts,
        resolved: Resolved,
        vocab_size: int,
        engine: Door,
        startup: Startup,
        *,
        name: str | None = None,
    ) -> Service:
        """Of a model directory and an engine that runs it, or will."""
        least = texts.shortest_chat()
        if least is not None and least >= resolved.session_len:
            log.warning(
                "every chat will be refused: the shortest takes %d tokens, session_len is %d: use"
                " at least %d, or plain completions",
                *(least, resolved.session_len, least + 1),
            )
        return cls(
            name=name or texts.directory.name,
            directory=texts.directory,
            tokenizer=texts.tokenizer,
            template=texts.template,
            defaults=texts.defaults,
            resolved=resolved,
            vocab_size=vocab_size,
            engine=engine,
            startup=startup,
        )

    def take_numbers(self, resolved: Resolved) -> None:
        """Those that the engine has found it can run with."""
        self.resolved = resolved

    @property
    def phase(self) -> str:
        """failed, draining, ready, or the phase of the start."""
        if not self.engine.healthy:
            return "failed"
        return "draining" if self.draining else self.startup.phase

    @property
    def trouble(self) -> str | None:
        """Why a request that comes now would not be answered, None if it would be."""
        phase = self.phase
        if phase == "failed":
            return f"the engine has failed: {self.engine.failure}"
        if phase == "draining":
            return "the server is shutting down"
        return None if self.startup.ready else f"the model is not ready yet: {phase}"

    def look(self) -> None:
        """Raise `Unavailable`, or its kind `Busy`, for a request that need not be looked at."""
        if (trouble := self.trouble) is not None:
            raise Unavailable(trouble)
        self.room.look()

    def prepare(self, asks: Sequence[Ask]) -> list[Future[Any]]:
        """Have compiled what answers must be written in; a bad one is refused before it runs."""
        wanted = {a.constraint for a in asks if a.constraint is not None}
        return [self.engine.prepare(constraint) for constraint in wanted]

    def ask(
        self,
        prompt: str | Sequence[int],
        wish: GenerationConfig,
        *,
        fill: bool = False,
        prompt_logprobs: int | None = None,
        add_special_tokens: bool = True,
        verbatim: Spans = (),
        **how: Any,
    ) -> Ask:
        """An `Ask` for a prompt as it stands; `how` are fields of `Ask`. Raises `Rejected`.

        At the places `verbatim` of a text, what spells a special token is none.
        """
        if not isinstance(prompt, str):
            # Before anything is done for each of them: there may be millions.
            if len(prompt) >= self.resolved.session_len:
                raise Rejected(
                    f"the prompt of {len(prompt)} tokens leaves no room for an answer: session_len "
                    f"allows {self.resolved.session_len} tokens, prompt and answer together; "
                    "shorten the prompt",
                    param="prompt",
                    code="context_length_exceeded",
                )
            tokens = list(prompt)
        else:
            self.tokenizer.refuse_hopeless(prompt, self.resolved.session_len - 1)
            tokens = self.tokenizer.encode(
                prompt, add_special_tokens=add_special_tokens, verbatim=verbatim
            )
        params = to_params(
            wish,
            self.defaults,
            session_len=self.resolved.session_len,
            vocab_size=self.vocab_size,
            prompt_logprobs=prompt_logprobs,
            fill=fill,
        )
        return Ask(
            tokens=tuple(tokens),
            params=params,
            stops=wish.stop_words or (),
            skip_special_tokens=wish.skip_special_tokens,
            **how,
        )

    def ask_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        wish: GenerationConfig,
        *,
        fill: bool = False,
        template: Mapping[str, Any] | None = None,
        tools: ToolWish | None = None,
        thinking_budget: int | None = None,
        constraint: Constraint | None = None,
        **how: Any,
    ) -> Ask:
        """An `Ask` for a conversation; `template` are arguments of `ChatTemplate.render`.

        After `thinking_budget` tokens of thinking the think block is closed.
        """
        if self.template is None:
            raise Rejected(
                f"{self.name} has no chat template: use plain completions", code="no_chat_template"
            )
        tools = tools or ToolWish.none()
        shown = {"tools": tools.for_template, **(template or {})}
        prompt = self.template.render(messages, **shown)
        plan = self.template.plan(
            prompt, tools, constraint=constraint, thinking_budget=thinking_budget
        )
        return self.ask(
            prompt.text,
            wish,
            fill=fill,
            add_special_tokens=False,  # the template has written them
            verbatim=prompt.verbatim,
            reading=plan.reading,
            constraint=plan.constraint,
            reasoning=plan.reasoning,
            **how,
        )


class Flight:
    """Some prompts under way together. Submitted all or none; `abort` is for every exit, and
    gives their room back.

    Raises what the engine raises at submission.
    """

    def __init__(
        self, service: Service, asks: Sequence[Ask], request_id: str, client_id: str = ""
    ) -> None:
        self.answers = [Answer(a, service.tokenizer) for a in asks]
        self._metrics, self._room = service.metrics, service.room
        self._streams: list[Stream] = []
        self._ended = [0] * len(asks)  # samples the engine has ended
        self._begin = time.perf_counter()
        self._room.take(len(asks))
        self._held = [len(asks)]  # room; popped by whoever gives it back
        self._client_id, self._flights = client_id, service.flights
        self._flights.add(self)
        try:
            for i, a in enumerate(asks):
                request = EngineRequest(
                    request_id=f"{request_id}-{i}",
                    tokens=a.tokens,
                    params=a.params,
                    priority=a.priority,
                    cache_salt=a.cache_salt,
                    constraint=a.constraint,
                    reasoning=a.reasoning,
                )
                self._streams.append(service.engine.submit(request))
        except BaseException:
            self.abort()
            raise

    def called(self, names: Collection[str]) -> bool:
        """Whether one of `names` is the client's id of the request, bare or as in its answer."""
        bare = {name.removeprefix(p) for name in names for p in ("", *ANSWER_PREFIXES)}
        return self._client_id in bare

    def abort(self) -> None:
        """End whatever still runs; may be called at any time, from any thread, again."""
        self._flights.discard(self)
        with suppress(IndexError):
            self._room.give(self._held.pop())
        for stream, ended, answer in zip(self._streams, self._ended, self.answers, strict=False):
            if ended < answer.ask.params.n:
                stream.abort()

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece]]:
        """(index of the prompt, piece) as they come; to be closed when left early."""
        try:
            if len(self._streams) == 1:
                async with aclosing(self._read(0)) as found:
                    async for piece in found:
                        yield 0, piece
            else:
                async with aclosing(self._merge()) as merged:
                    async for item in merged:
                        yield item
        finally:
            self.abort()

    async def _merge(self) -> AsyncGenerator[tuple[int, Piece]]:
        """What all streams give, in the order in which it comes."""
        queue: asyncio.Queue[tuple[int, Piece] | BaseException | None] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async with aclosing(self._read(index)) as found:
                    async for piece in found:
                        queue.put_nowait((index, piece))
                queue.put_nowait(None)
            except Exception as error:  # noqa: BLE001 -- carried to the one who reads the queue
                queue.put_nowait(error)

        tasks = [asyncio.create_task(pump(i)) for i in range(len(self._streams))]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()

    async def _read(self, index: int) -> AsyncGenerator[Piece]:
        """The pieces of one prompt; its request is ended when nothing more is wanted of it."""
        answer, last, told = self.answers[index], self._begin, False
        async for delta in self._streams[index]:
            self._ended[index] += delta.finish_reason is not None
            now = time.perf_counter()
            if delta.tokens:
                self._metrics.observe_tokens(len(delta.tokens), now - last, last == self._begin)
                last = now
            piece = answer.push(delta)
            if not told and answer.outcome is not None:
                told = True
                self._metrics.observe_queue(answer.outcome.queued_seconds)
            if piece is not None:
                yield piece
            if answer.done:
                break
        self._metrics.observe_request(time.perf_counter() - self._begin)
        if self._ended[index] < answer.ask.params.n:
            self._streams[index].abort()
