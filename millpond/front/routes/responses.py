"""`/v1/responses`: OpenAI's newer API, without memory: nothing is stored and nothing resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from millpond.engine.constraint import Constraint
from millpond.errors import Rejected
from millpond.front.answer import Ask
from millpond.front.parsing.wish import ToolWish
from millpond.front.routes.common import STREAMED, accept, documented, limit_of, respond
from millpond.front.routes.items import ResponseView
from millpond.front.routes.talk import Talk, text_of, unread
from millpond.front.schema import Sampling, Text
from millpond.front.service import Service
from millpond.front.structured import from_response_format, only_one

_TEXT = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
LOGPROBS = "message.output_text.logprobs"
_STATEFUL = {
    "previous_response_id": "nothing is stored; send the conversation in input",
    "conversation": "nothing is stored; send the conversation in input",
    "background": "answers are not kept for later",
    "prompt": "there are no stored prompts",
    "max_tool_calls": "tools run at the client",
}


class TextConfig(BaseModel):
    """The shape of the answer."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    format: dict[str, Any] | None = None


class ReasoningConfig(BaseModel):
    """How much the model reasons."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    effort: str | None = None


class ResponsesRequest(Sampling):
    """Body of `/v1/responses`."""

    required: ClassVar[frozenset[str]] = frozenset({"input"})
    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    thinking_token_budget: int | None = Field(default=None, ge=0)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    include: list[str] = Field(default_factory=list)
    truncation: str = "disabled"
    metadata: dict[str, str] | None = None
    user: str | None = None
    stream: bool = False
    cache_salt: Text = ""
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)

    @property
    def logprobs(self) -> int | None:
        """How many alternatives of each token are shown; None when no log probability is."""
        return (self.top_logprobs or 0) if LOGPROBS in self.include or self.top_logprobs else None

    def refuse_unsupported(self) -> None:
        """As for every route, and all that would need a memory."""
        super().refuse_unsupported()
        for name, why in _STATEFUL.items():
            if (self.model_extra or {}).get(name) not in (None, False):
                raise Rejected(f"{name} is not supported: {why}", param=name, code="unsupported")
        unknown = set(self.include) - {LOGPROBS, "reasoning.encrypted_content"}
        if unknown:
            raise Rejected(
                f"include: {sorted(unknown)} cannot be included, only {LOGPROBS}",
                param="include",
                code="unsupported",
            )
        if self.truncation != "disabled":
            raise Rejected("truncation must be disabled", param="truncation", code="unsupported")
        if self.n != 1:
            raise Rejected("n must be 1", param="n", code="unsupported")


def routes(service: Service) -> APIRouter:
    """The route over one service."""
    router = APIRouter()

    @router.post("/v1/responses", responses=STREAMED)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation."""
        accept(service, body)
        tools = [_tool(t, f"tools[{i}]") for i, t in enumerate(body.tools)]
        wish = ToolWish.of(tools, body.tool_choice, body.parallel_tool_calls)
        answer_id = f"resp_{request.state.request_id}"
        return await respond(
            service,
            request,
            lambda: [_ask(service, body, wish)],
            lambda flight: ResponseView(
                service, flight, answer_id, _echo(body, flight.answers[0].ask)
            ),
            stream=body.stream,
            ignored=[*body.ignored, *unread(service, body.chat_template_kwargs)],
            spoken={
                "prompt": "input",
                "messages": "input",
                "max_tokens": "max_output_tokens",
                "reasoning_effort": "reasoning",
            },
        )

    @router.get("/v1/responses/{response_id}", responses=documented(401, 404))
    async def stored(response_id: str) -> Response:
        """No response is ever found: none is stored."""
        raise Rejected(
            f"{response_id} is not here: responses are not stored",
            param="response_id",
            code="not_found",
        )

    return router


def _ask(service: Service, body: ResponsesRequest, tools: ToolWish) -> Ask:
    limit = limit_of(body.max_output_tokens, "max_output_tokens")
    talk = Talk(
        _messages(body),
        tools,
        effort=body.reasoning.effort,
        budget=body.thinking_token_budget,
        variables=body.chat_template_kwargs,
    )
    return talk.ask(
        service,
        body.wish(max_tokens=limit, logprobs=body.logprobs),
        fill=limit is None,
        constraint=_shape(body),
        cache_salt=body.cache_salt,
        priority=body.priority,
    )


def _shape(body: ResponsesRequest) -> Constraint | None:
    return only_one(from_response_format(body.text.format, "text.format"), body.constraint())


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A tool in the chat route's shape, which nests what is flat here."""
    if tool.get("type") != "function":
        raise Rejected(
            f"{where}: tools of type {tool.get('type')!r} are not supported, only function",
            param="tools",
            code="unsupported",
        )
    inner = {k: tool[k] for k in ("name", "description", "parameters", "strict") if k in tool}
    return {"type": "function", "function": {k: v for k, v in inner.items() if v is not None}}


def _echo(body: ResponsesRequest, ask: Ask) -> dict[str, Any]:
    """What a response repeats of its request."""
    params = ask.params
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "store": False,
        "temperature": params.temperature,
        "text": {"format": body.text.format or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"strict": False, **t} for t in body.tools],
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "user": body.user,
        "background": False,
        "service_tier": "default",
    }


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The items of the input as messages; what an assistant did in a row is one message."""
    made: list[dict[str, Any]] = []
    if body.instructions:
        made.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*made, {"role": "user", "content": body.input}]
    open_turn: dict[str, Any] | None = None  # the assistant's message that items still add to
    for i, item in enumerate(body.input):
        where = f"input[{i}]"
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message" and item.get("role") != "assistant":
            open_turn = None
            content = text_of(item.get("content"), f"{where}.content", _TEXT)
            made.append({"role": item.get("role"), "content": content})
        elif kind == "function_call_output":
            open_turn = None
            said = text_of(item.get("output"), f"{where}.output", _TEXT)
            made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": said})
        elif kind in ("message", "reasoning", "function_call"):
            if open_turn is None:
                open_turn = {"role": "assistant", "content": ""}
                made.append(open_turn)
            _add(open_turn, kind, item, where)
        else:
            raise Rejected(
                f"{where}: items of type {kind!r} are not supported",
                param="input",
                code="unsupported",
            )
    return made


def _add(turn: dict[str, Any], kind: str, item: Mapping[str, Any], where: str) -> None:
    """One more thing that the assistant did in its turn."""
    if kind == "message":
        turn["content"] += text_of(item.get("content"), f"{where}.content", _TEXT)
    elif kind == "reasoning":
        shown = item.get("content") or item.get("summary") or []
        thought = turn.get("reasoning_content", "")
        turn["reasoning_content"] = thought + text_of(shown, f"{where}.content", _TEXT)
    else:
        arguments = item.get("arguments", "{}")
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {
                "name": item.get("name"),
                "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
            },
        }
        turn.setdefault("tool_calls", []).append(call)
