"""`/v1/chat/completions`: answer a conversation through the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from millpond.errors import Rejected
from millpond.front import replies
from millpond.front.answer import Ask, Piece
from millpond.front.parsing.base import (
    Arguments,
    CallStart,
    Content,
    Event,
    Reasoning,
    collect,
)
from millpond.front.parsing.reader import END_THINK
from millpond.front.parsing.wish import ToolWish
from millpond.front.routes.chunked import ChoiceView
from millpond.front.routes.common import STREAMED, accept, limit_of, respond
from millpond.front.routes.talk import Talk, unread
from millpond.front.schema import Generate
from millpond.front.service import Flight, Service


class ChatRequest(Generate):
    """Body of `/v1/chat/completions`."""

    required: ClassVar[frozenset[str]] = frozenset({"messages"})
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(default=None, ge=0)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    modalities: list[str] = Field(default_factory=list)
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = Field(default=None, ge=0)
    include_reasoning: bool = True
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def refuse_unsupported(self) -> None:
        """As for every route, and what concerns tools and other media."""
        super().refuse_unsupported()
        if any(m != "text" for m in self.modalities):
            raise Rejected("modalities: only text", param="modalities", code="unsupported")
        if self.top_logprobs is not None and not self.logprobs:
            raise Rejected("top_logprobs needs logprobs: true", param="top_logprobs")
        both = self.continue_final_message and "add_generation_prompt" in self.model_fields_set
        if both and self.add_generation_prompt:
            raise Rejected(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )


def routes(service: Service) -> APIRouter:
    """The route over one service."""
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=STREAMED)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        accept(service, body)
        tools = ToolWish.of(body.tools, body.tool_choice, body.parallel_tool_calls)
        answer_id = f"chatcmpl-{request.state.request_id}"
        return await respond(
            service,
            request,
            lambda: [_ask(service, body, tools)],
            lambda flight: _Chat(service, body, flight, answer_id, tools),
            stream=body.stream,
            ignored=[*body.ignored, *unread(service, body.chat_template_kwargs)],
            spoken={"prompt": "messages"},
        )

    return router


def _ask(service: Service, body: ChatRequest, tools: ToolWish) -> Ask:
    newest = body.max_completion_tokens
    if newest is None:
        limit = limit_of(body.max_tokens, "max_tokens")
    else:
        limit = limit_of(newest, "max_completion_tokens")
    talk = Talk(
        body.messages,
        tools,
        effort=body.reasoning_effort,
        budget=body.thinking_token_budget,
        variables=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    top = (body.top_logprobs or 0) if body.logprobs else None
    return talk.ask(
        service,
        body.wish(max_tokens=limit, logprobs=top),
        fill=limit is None,
        constraint=body.constraint(),
        prompt_logprobs=body.prompt_logprobs,
        cache_salt=body.cache_salt,
        priority=body.priority,
    )


class _Chat(ChoiceView):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    body: ChatRequest

    def __init__(
        self,
        service: Service,
        body: ChatRequest,
        flight: Flight,
        answer_id: str,
        tools: ToolWish,
    ) -> None:
        super().__init__(service, body, flight, answer_id)
        self._plain = not tools.active  # an answer that is all text
        self._pieces: list[list[Piece]] = [[] for _ in range(body.n)]
        self._thoughts = [""] * body.n  # held back where reasoning is not streamed
        self._thinking = [False] * body.n

    def take(self, prompt: int, piece: Piece) -> None:
        self._pieces[piece.index].append(piece)

    def first_extras(self) -> dict[str, Any]:
        made: dict[str, Any] = {}
        answer = self.flight.answers[0]
        if self.body.return_token_ids:
            made["prompt_token_ids"] = list(answer.ask.tokens)
        if self.body.prompt_logprobs is not None:
            made["prompt_logprobs"] = replies.prompt_logprobs(
                self.service.tokenizer, answer, self.body.prompt_logprobs
            )
        return made

    def _events(self, piece: Piece) -> Sequence[Event]:
        """What a piece is made of, as this request wants it."""
        if self.body.separate_reasoning:
            if self.body.include_reasoning:
                return piece.events
            return [e for e in piece.events if not isinstance(e, Reasoning)]
        if self._plain:
            return [Content(piece.raw)] if piece.raw else []
        made: list[Event] = []
        for one in piece.events:
            thinking = isinstance(one, Reasoning)
            if self._thinking[piece.index] and not thinking:
                made.append(Content(END_THINK))
            self._thinking[piece.index] = thinking
            made.append(Content(one.text) if isinstance(one, Reasoning) else one)
        return made

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
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        reasoning = content = ""
        for one in self._events(piece):
            match one:
                case Reasoning(text):
                    reasoning += text
                case Content(text):
                    content += text
                case CallStart(index, call_id, name):
                    calls[index] = {
                        "index": index,
                        "id": call_id,
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }
                case Arguments(index, text):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
        if not self.body.stream_reasoning:  # all of it at once, before what follows it
            held = self._thoughts[piece.index] + reasoning
            reasoning = held if content or calls or piece.finish_reason else ""
            self._thoughts[piece.index] = "" if reasoning else held
        if reasoning:
            delta["reasoning_content"] = delta["reasoning"] = reasoning
        if content:
            delta["content"] = content
        if calls:
            delta["tool_calls"] = list(calls.values())
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
        return self.body_of([self._choice(i, p) for i, p in enumerate(self._pieces)])

    def _choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        found = collect(e for p in pieces for e in self._events(p))
        message: dict[str, Any] = {
            "role": "assistant",
            "content": found.content if found.content or not found.calls else None,
            "refusal": None,
        }
        if found.reasoning:
            message["reasoning_content"] = message["reasoning"] = found.reasoning
        if found.calls:
            message["tool_calls"] = [
                {
                    "id": c.id,
                    "type": "function",
                    "function": {"name": c.name, "arguments": c.arguments},
                }
                for c in found.calls
            ]
        whole = Piece(index, tokens=tuple(t for p in pieces for t in p.tokens))
        return {
            "index": index,
            "message": message,
            **self._extras(whole),
            "finish_reason": pieces[-1].finish_reason,
            "stop_reason": pieces[-1].stop_reason,
        }
