"""`/v1/chat/completions`: answer a conversation through the model's chat template."""

from __future__ import annotations

from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from millpond.errors import Rejected
from millpond.front import replies
from millpond.front.answer import Ask, Piece
from millpond.front.routes.chunked import ChoiceView
from millpond.front.routes.common import ERRORS, accept, limit_of, respond
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
    modalities: list[str] = Field(default_factory=list)
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def refuse_unsupported(self) -> None:
        """As for every route, and what concerns tools and other media."""
        super().refuse_unsupported()
        if self.tool_choice not in (None, "auto", "none"):
            raise Rejected(
                f"tool_choice {self.tool_choice!r} is not supported yet, only auto and none",
                param="tool_choice",
                code="unsupported",
            )
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

    @router.post("/v1/chat/completions", responses=ERRORS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        accept(service, body)
        answer_id = f"chatcmpl-{request.state.request_id}"
        return await respond(
            service,
            request,
            lambda: [_ask(service, body)],
            lambda flight: _Chat(service, body, flight, answer_id),
            stream=body.stream,
            ignored=body.ignored,
            spoken={"prompt": "messages"},
        )

    return router


def _ask(service: Service, body: ChatRequest) -> Ask:
    newest = body.max_completion_tokens
    if newest is None:
        limit = limit_of(body.max_tokens, "max_tokens")
    else:
        limit = limit_of(newest, "max_completion_tokens")
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
        prompt_logprobs=body.prompt_logprobs,
        cache_salt=body.cache_salt,
        priority=body.priority,
    )


def _top(body: ChatRequest) -> int | None:
    return (body.top_logprobs or 0) if body.logprobs else None


class _Chat(ChoiceView):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    body: ChatRequest

    def __init__(self, service: Service, body: ChatRequest, flight: Flight, answer_id: str) -> None:
        super().__init__(service, body, flight, answer_id)
        self._pieces: list[list[Piece]] = [[] for _ in range(body.n)]
        self._thoughts = [""] * body.n  # held back where reasoning is not streamed

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
        if not self.body.stream_reasoning:  # all of it at once, before what follows it
            held = self._thoughts[piece.index] + reasoning
            reasoning = held if content or piece.finish_reason else ""
            self._thoughts[piece.index] = "" if reasoning else held
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
