"""`/v1/completions`: continue prompts as they stand, or score them with `echo` and `logprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from millpond.errors import Rejected
from millpond.front import replies
from millpond.front.answer import Ask, Piece
from millpond.front.routes.chunked import ChoiceView, joined
from millpond.front.routes.common import MAX_PROMPTS, STREAMED, accept, limit_of, respond
from millpond.front.schema import Generate, PromptField
from millpond.front.service import Flight, Service

DEFAULT_TOKENS = 16  # as in the OpenAI API


class CompletionRequest(Generate):
    """Body of `/v1/completions`."""

    required: ClassVar[frozenset[str]] = frozenset({"prompt"})
    prompt: PromptField
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=20)
    add_special_tokens: bool = True


def routes(service: Service) -> APIRouter:
    """The route over one service."""
    router = APIRouter()

    @router.post("/v1/completions", responses=STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        accept(service, body)
        answer_id = f"cmpl-{request.state.request_id}"
        echoes: list[str] = []  # made beside the event loop, as tokens are
        return await respond(
            service,
            request,
            lambda: _asks(service, body, echoes),
            lambda flight: _Completion(service, body, flight, answer_id, echoes),
            stream=body.stream,
            ignored=body.ignored,
            spoken={},
        )

    return router


def prompts_of(given: Any) -> Sequence[str | list[int]]:
    """The prompts that a field of either form holds. Raises `Rejected` for too many."""
    prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    if len(prompts) > MAX_PROMPTS:
        raise Rejected(f"at most {MAX_PROMPTS} prompts in one request", param="prompt")
    return prompts


def _asks(service: Service, body: CompletionRequest, echoes: list[str]) -> list[Ask]:
    """What is asked of the engine; with `echo`, the texts of the prompts go to `echoes`."""
    given = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    limit = limit_of(given, "max_tokens", echo=body.echo)
    scored = [
        p for p in (body.logprobs if body.echo else None, body.prompt_logprobs) if p is not None
    ]
    wish = body.wish(max_tokens=limit, logprobs=body.logprobs)
    constraint = body.constraint()
    asks = [
        service.ask(
            prompt,
            wish,
            prompt_logprobs=max((s for s in scored if s is not None), default=None),
            add_special_tokens=body.add_special_tokens,
            constraint=constraint,
            cache_salt=body.cache_salt,
            priority=body.priority,
        )
        for prompt in prompts_of(body.prompt)
    ]
    if body.echo:
        decode = service.tokenizer.decode
        echoes += [decode(a.tokens, skip_special_tokens=False) for a in asks]
    return asks


class _Completion(ChoiceView):
    kind = chunk_kind = "text_completion"
    body: CompletionRequest

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        flight: Flight,
        answer_id: str,
        echoes: Sequence[str],
    ) -> None:
        super().__init__(service, body, flight, answer_id)
        self._echoes = echoes
        count = len(flight.answers) * body.n
        self._begun = [False] * count
        self._logprobs = [
            replies.CompletionLogprobs(service.tokenizer) if body.logprobs is not None else None
            for _ in range(count)
        ]
        self._choices: list[list[dict[str, Any]]] = [[] for _ in range(count)]

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
            choice["text"] = self._echoes[prompt] + text
            if shape is not None:
                parts.append(
                    shape.prompt(answer.ask.tokens, answer.prompt_logprobs, self.body.logprobs)
                )
        if shape is not None:
            parts.append(shape.generated(tokens))
            choice["logprobs"] = joined(parts)
        if self.body.return_token_ids:
            choice["token_ids"] = [t.out.token for t in tokens]
            choice["prompt_token_ids"] = list(answer.ask.tokens) if first else None
        if not (choice["text"] or finish or parts or self.body.return_token_ids):
            return []
        return [{**choice, "finish_reason": finish, "stop_reason": piece.stop_reason}]

    def whole(self) -> dict[str, Any]:
        return self.body_of([self._join(i, c) for i, c in enumerate(self._choices)])

    def _join(self, index: int, chunks: list[dict[str, Any]]) -> dict[str, Any]:
        made = {**chunks[-1], "index": index, "text": "".join(c["text"] for c in chunks)}
        if self.body.logprobs is not None:
            made["logprobs"] = joined([c["logprobs"] for c in chunks])
        if self.body.return_token_ids:
            made["token_ids"] = [t for c in chunks for t in c["token_ids"]]
            made["prompt_token_ids"] = chunks[0]["prompt_token_ids"]
        if self.body.prompt_logprobs is not None:
            answer = self.flight.answers[index // self.body.n]
            made["prompt_logprobs"] = replies.prompt_logprobs(
                self.service.tokenizer, answer, self.body.prompt_logprobs
            )
        return made
