"""The OpenAI routes that generate text: chat completions and completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from millpond.errors import Rejected, StepFailed, Unavailable
from millpond.front import replies
from millpond.front.answer import Ask, Piece
from millpond.front.schema import ChatRequest, CompletionRequest, Generate
from millpond.front.service import Flight, Service
from millpond.front.transport import DONE, EventStream, event, finish_unless_gone
from millpond.telemetry import logger

log = logger("front")
MAX_PROMPTS = 2048  # of one request


def routes(service: Service) -> APIRouter:
    """The routes over one service."""
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=ERRORS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        accept(service, body)
        ask = await asyncio.to_thread(_chat_ask, service, body)
        flight, headers = _start(service, [ask], body)
        view = _Chat(service, body, flight, f"chatcmpl-{request.state.request_id}")
        if body.stream:
            return EventStream(view.events(), flight, headers)
        await finish_unless_gone(request, flight, view.collect())
        return replies.reply(view.whole(), headers=headers)

    @router.post("/v1/completions", responses=ERRORS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        accept(service, body)
        asks = await asyncio.to_thread(_completion_asks, service, body)
        flight, headers = _start(service, asks, body)
        view = _Completion(service, body, flight, f"cmpl-{request.state.request_id}")
        if body.stream:
            return EventStream(view.events(), flight, headers)
        await finish_unless_gone(request, flight, view.collect())
        return replies.reply(view.whole(), headers=headers)

    return router


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request is wrong; the error names the field"},
    404: {"description": "No such model"},
    503: {"description": "Not ready, draining, or the engine has failed"},
}


def accept(service: Service, body: Any) -> None:
    """Refuse what is addressed to another model, comes too late, or asks for what is not there."""
    model = body.model
    if model is not None and model != service.name:
        raise Rejected(
            f"the model {model!r} does not exist, this server has {service.name!r}",
            param="model",
            code="model_not_found",
        )
    if service.draining:
        raise Unavailable("the server is shutting down")
    if not service.engine.healthy:
        raise Unavailable(f"the engine has failed: {service.engine.failure}")
    if isinstance(body, Generate):
        body.refuse_unsupported()


def _limit(given: int | None, *, echo: bool = False) -> int | None:
    """The limit on new tokens; 0 only makes sense when the prompt itself is asked for."""
    if given == 0 and not echo:
        raise Rejected("max_tokens must be at least 1", param="max_tokens")
    return max(1, given) if given is not None else None


def _chat_ask(service: Service, body: ChatRequest) -> Ask:
    newest = body.max_completion_tokens
    limit = _limit(body.max_tokens if newest is None else newest)
    extra = dict(body.chat_template_kwargs)
    template = service.template
    if body.reasoning_effort is not None and template is not None and template.efforts:
        if body.reasoning_effort not in template.efforts:
            raise Rejected(
                f"reasoning_effort {body.reasoning_effort!r} is unknown to this model, it knows "
                f"{', '.join(sorted(template.efforts))}",
                param="reasoning_effort",
            )
        extra["reasoning_effort"] = body.reasoning_effort
    return service.ask_chat(
        body.messages,
        body.wish(max_tokens=limit, logprobs=_top(body)),
        fill=limit is None,
        template={
            "tools": None if body.tool_choice == "none" else body.tools,
            "add_generation_prompt": body.add_generation_prompt,
            "continue_final_message": body.continue_final_message,
            "extra": extra,
        },
        cache_salt=body.cache_salt,
        priority=body.priority,
    )


def _top(body: ChatRequest) -> int | None:
    return (body.top_logprobs or 0) if body.logprobs else None


def _completion_asks(service: Service, body: CompletionRequest) -> list[Ask]:
    prompts: Sequence[str | list[int]]
    if isinstance(body.prompt, str) or isinstance(body.prompt[0], int):
        prompts = [body.prompt]
    else:
        prompts = body.prompt
    if len(prompts) > MAX_PROMPTS:
        raise Rejected(f"at most {MAX_PROMPTS} prompts in one request", param="prompt")
    limit = _limit(16 if body.max_tokens is None else body.max_tokens, echo=body.echo)
    wish = body.wish(max_tokens=limit, logprobs=body.logprobs)
    return [
        service.ask(
            prompt,
            wish,
            prompt_logprobs=body.logprobs if body.echo else None,
            add_special_tokens=body.add_special_tokens,
            cache_salt=body.cache_salt,
            priority=body.priority,
        )
        for prompt in prompts
    ]


_told: set[str] = set()


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header that names ignored fields, logged the first time each is seen."""
    if not names:
        return {}
    for name in names:
        if name not in _told and len(_told) < 1000:
            _told.add(name)
            log.warning("ignored request field %r", name)
    text = ", ".join(n.encode("ascii", "backslashreplace").decode() for n in names)
    clean = "".join(c if c.isprintable() else "?" for c in text)
    return {"x-ignored-fields": clean[:1000]}


def _start(service: Service, asks: Sequence[Ask], body: Generate) -> tuple[Flight, dict[str, str]]:
    """Submit; the engine's own ids are unique whatever the client calls its request."""
    flight = Flight(service, asks, uuid.uuid4().hex)
    return flight, ignored_header(body.ignored)


class _View:
    """One request's answers in the shape of a route; the shapes themselves are in subclasses."""

    kind = chunk_kind = ""

    def __init__(self, service: Service, body: Generate, flight: Flight, request_id: str) -> None:
        self.service, self.body, self.flight = service, body, flight
        self.id, self.created = request_id, int(time.time())

    async def collect(self) -> None:
        """Take in every piece. Raises when the engine ended one before its end."""
        async with aclosing(self.flight.pieces()) as pieces:
            async for prompt, piece in pieces:
                if piece.finish_reason in ("error", "abort"):
                    raise self._failed(piece)
                self.take(prompt, piece)

    def _failed(self, piece: Piece) -> StepFailed | Unavailable:
        if not self.service.engine.healthy:
            return Unavailable(f"the engine has failed: {self.service.engine.failure}")
        if piece.finish_reason == "abort":  # not by its client, who would not read this
            return Unavailable("the server is shutting down and has ended the request")
        return StepFailed(piece.error or "the request failed")

    def take(self, prompt: int, piece: Piece) -> None:
        """Keep a piece for the whole answer."""

    def chunks(self, prompt: int, piece: Piece) -> list[dict[str, Any]]:
        """The choices that a piece adds to a stream."""
        raise NotImplementedError

    def opening(self) -> list[dict[str, Any]]:
        """Choices sent before any text."""
        return []

    async def events(self) -> AsyncGenerator[bytes]:
        """The stream: chunks, then usage where wanted, then the end mark."""
        options = self.body.stream_options

        def chunk(choices: list[dict[str, Any]], usage: bool) -> bytes:
            made = replies.envelope(self.chunk_kind, self.id, self.service.name, self.created)
            made["choices"] = choices
            if usage:
                made["usage"] = replies.usage(self.flight.answers)
            return event(made)

        for choice in self.opening():
            yield chunk([choice], options.continuous_usage_stats)
        async with aclosing(self.flight.pieces()) as pieces:
            async for prompt, piece in pieces:
                if piece.finish_reason in ("error", "abort"):
                    yield event(replies.error_of(self._failed(piece)))
                    yield DONE
                    return
                for choice in self.chunks(prompt, piece):
                    yield chunk([choice], options.continuous_usage_stats)
        if options.include_usage:
            yield chunk([], True)
        yield DONE

    def body_of(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The whole answer around its choices."""
        made = replies.envelope(self.kind, self.id, self.service.name, self.created)
        return {**made, "choices": choices, "usage": replies.usage(self.flight.answers)}


class _Chat(_View):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    body: ChatRequest

    def __init__(
        self, service: Service, body: ChatRequest, flight: Flight, request_id: str
    ) -> None:
        super().__init__(service, body, flight, request_id)
        self._pieces: list[list[Piece]] = [[] for _ in range(body.n)]

    def take(self, prompt: int, piece: Piece) -> None:
        self._pieces[piece.index].append(piece)

    def _texts(self, piece: Piece) -> tuple[str, str]:
        """(content, reasoning) as this request wants them."""
        if not self.body.separate_reasoning:
            return piece.raw, ""
        return piece.text, piece.reasoning if self.body.include_reasoning else ""

    def _extras(self, piece: Piece) -> dict[str, Any]:
        made: dict[str, Any] = {"logprobs": None}
        if self.body.logprobs:
            made["logprobs"] = replies.chat_logprobs(self.service.tokenizer, piece.tokens)
        if self.body.return_token_ids:
            made["token_ids"] = [t.out.token for t in piece.tokens]
        return made

    def opening(self) -> list[dict[str, Any]]:
        return [
            {"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            for i in range(self.body.n)
        ]

    def chunks(self, prompt: int, piece: Piece) -> list[dict[str, Any]]:
        content, reasoning = self._texts(piece)
        delta: dict[str, Any] = {}
        if reasoning:
            delta["reasoning_content"] = delta["reasoning"] = reasoning
        if content:
            delta["content"] = content
        extras = bool(piece.tokens) and (self.body.logprobs or self.body.return_token_ids)
        if not (delta or extras or piece.finish_reason):
            return []
        return [
            {
                "index": piece.index,
                "delta": delta,
                **self._extras(piece),
                "finish_reason": piece.finish_reason,
                "stop_reason": piece.stop_reason,
            }
        ]

    def whole(self) -> dict[str, Any]:
        """The answer that is not streamed."""
        return self.body_of([self._choice(i, p) for i, p in enumerate(self._pieces)])

    def _choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        texts = [self._texts(p) for p in pieces]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(t for t, _ in texts),
            "refusal": None,
        }
        if reasoning := "".join(r for _, r in texts):
            message["reasoning_content"] = message["reasoning"] = reasoning
        whole = Piece(index, tokens=tuple(t for p in pieces for t in p.tokens))
        return {
            "index": index,
            "message": message,
            **self._extras(whole),
            "finish_reason": pieces[-1].finish_reason,
            "stop_reason": pieces[-1].stop_reason,
        }


class _Completion(_View):
    kind = chunk_kind = "text_completion"
    body: CompletionRequest

    def __init__(
        self, service: Service, body: CompletionRequest, flight: Flight, request_id: str
    ) -> None:
        super().__init__(service, body, flight, request_id)
        self._echo = [self._echoed(i) if body.echo else "" for i in range(len(flight.answers))]
        count = len(flight.answers) * body.n
        self._begun = [False] * count
        self._logprobs = [
            replies.CompletionLogprobs(service.tokenizer) if body.logprobs is not None else None
            for _ in range(count)
        ]
        self._choices: list[list[dict[str, Any]]] = [[] for _ in range(count)]

    def _echoed(self, prompt: int) -> str:
        tokens = self.flight.answers[prompt].ask.tokens
        return self.service.tokenizer.decode(tokens, skip_special_tokens=False)

    def take(self, prompt: int, piece: Piece) -> None:
        self._choices[prompt * self.body.n + piece.index] += self.chunks(prompt, piece)

    def chunks(self, prompt: int, piece: Piece) -> list[dict[str, Any]]:
        index = prompt * self.body.n + piece.index
        first, self._begun[index] = not self._begun[index], True
        silent = self.body.max_tokens == 0  # only the prompt was asked for
        text, tokens = ("", ()) if silent else (piece.raw, piece.tokens)
        finish = piece.finish_reason
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        answer, shape = self.flight.answers[prompt], self._logprobs[index]
        parts = []
        if first and self.body.echo:
            choice["text"] = self._echo[prompt] + text
            if shape is not None:
                parts.append(shape.prompt(answer.ask.tokens, answer.prompt_logprobs))
        if shape is not None:
            parts.append(shape.generated(tokens))
            choice["logprobs"] = {k: [v for p in parts for v in p[k]] for k in parts[0]}
        if self.body.return_token_ids:
            choice["token_ids"] = [t.out.token for t in tokens]
            choice["prompt_token_ids"] = list(answer.ask.tokens) if first else None
        if not (choice["text"] or finish or parts or self.body.return_token_ids):
            return []
        return [{**choice, "finish_reason": finish, "stop_reason": piece.stop_reason}]

    def whole(self) -> dict[str, Any]:
        """The answer that is not streamed."""
        return self.body_of([self._join(i, c) for i, c in enumerate(self._choices)])

    def _join(self, index: int, chunks: list[dict[str, Any]]) -> dict[str, Any]:
        made = {**chunks[-1], "index": index, "text": "".join(c["text"] for c in chunks)}
        if self.body.logprobs is not None:
            parts = [c["logprobs"] for c in chunks]
            made["logprobs"] = {k: [v for p in parts for v in p[k]] for k in parts[0]}
        if self.body.return_token_ids:
            made["token_ids"] = [t for c in chunks for t in c["token_ids"]]
            made["prompt_token_ids"] = chunks[0]["prompt_token_ids"]
        return made
