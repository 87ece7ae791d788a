"""`/v1/messages` and its token counting: Anthropic's API in, the chat route's words onward."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from millpond.engine.constraint import Constraint
from millpond.errors import Rejected
from millpond.front import replies
from millpond.front.answer import Ask
from millpond.front.parsing.wish import ToolWish
from millpond.front.routes.blocks import MessageView
from millpond.front.routes.common import ERRORS, STREAMED, accept, ignored_header, limit_of, respond
from millpond.front.routes.talk import Talk, text_of, unread
from millpond.front.schema import Sampling, StopField, Text
from millpond.front.service import Service
from millpond.front.structured import from_response_format, only_one

BILLING = "x-anthropic-billing-header"
"""Begins a system block that one client changes with every request; it would never be cached."""


class Thinking(BaseModel):
    """How much the model thinks, and whether that is shown."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["enabled", "disabled", "adaptive"] = "disabled"
    budget_tokens: int | None = Field(default=None, ge=0)
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(BaseModel):
    """How much effort is made, and the shape of the answer."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    effort: str | None = None
    format: dict[str, Any] | None = None


class CountRequest(Sampling):
    """Body of `/v1/messages/count_tokens`, and what every request has in common with it."""

    required: ClassVar[frozenset[str]] = frozenset({"messages"})
    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] = ""
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking = Thinking()
    output_config: OutputConfig = OutputConfig()
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def refuse_unsupported(self) -> None:
        """As for every route, and what only Anthropic's own servers do."""
        super().refuse_unsupported()
        for name in ("container", "mcp_servers"):
            if (self.model_extra or {}).get(name):
                raise Rejected(f"{name} is not supported", param=name, code="unsupported")
        if self.n != 1:
            raise Rejected("n must be 1", param="n", code="unsupported")


class MessagesRequest(CountRequest):
    """Body of `/v1/messages`."""

    max_tokens: int = Field(ge=1)
    stop_sequences: StopField = ()
    stream: bool = False
    cache_salt: Text = ""
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)


def routes(service: Service) -> APIRouter:
    """The routes over one service."""
    router = APIRouter()

    @router.post("/v1/messages", responses=STREAMED)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation."""
        accept(service, body)
        talk, unused = _talk(service, body)
        answer_id = f"msg_{request.state.request_id}"
        return await respond(
            service,
            request,
            lambda: [_ask(service, body, talk)],
            lambda flight: MessageView(
                service,
                flight,
                answer_id,
                thinking=body.thinking.type != "disabled",
                omitted=body.thinking.display == "omitted",
            ),
            stream=body.stream,
            ignored=[*body.ignored, *unused],
            spoken={
                "prompt": "messages",
                "stop": "stop_sequences",
            },
        )

    @router.post("/v1/messages/count_tokens", responses=ERRORS)
    async def count_tokens(body: CountRequest) -> Response:
        """How many tokens a request has."""
        accept(service, body)
        talk, unused = _talk(service, body)
        count = await asyncio.to_thread(talk.count, service)
        headers = ignored_header([*body.ignored, *unused])
        return replies.reply({"input_tokens": count}, headers=headers)

    return router


def _ask(service: Service, body: MessagesRequest, talk: Talk) -> Ask:
    stops = (*body.stop_sequences, *body.stop)
    own = body.model_copy(update={"stop": stops})
    return talk.ask(
        service,
        own.wish(max_tokens=limit_of(body.max_tokens, "max_tokens"), logprobs=None),
        constraint=_shape(body),
        cache_salt=body.cache_salt,
        priority=body.priority,
    )


def _shape(body: MessagesRequest) -> Constraint | None:
    wanted = from_response_format(body.output_config.format, "output_config.format")
    return only_one(wanted, body.constraint())


def _talk(service: Service, body: CountRequest) -> tuple[Talk, list[str]]:
    """The conversation, and the names of what this model has no use for."""
    system = body.system
    if isinstance(system, list):
        kept = [b for b in system if not str(b.get("text", "")).startswith(BILLING)]
        system = "\n".join(text_of([b], "system", ("text",)) for b in kept)
    talk = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(body.messages):
        talk += _messages(message, f"messages[{i}]")
    unused = unread(service, body.chat_template_kwargs)
    effort, template = body.output_config.effort, service.template
    if effort is not None and (template is None or effort not in template.efforts):
        unused.append("output_config.effort")  # clients send one whatever the model is
        effort = None
    thinking = body.thinking
    budget = thinking.budget_tokens
    if thinking.type == "disabled" and "thinking" in body.model_fields_set:
        budget = 0
    made = Talk(
        talk,
        _tools(body),
        effort=effort,
        budget=budget,
        variables=body.chat_template_kwargs,
        continue_final_message=bool(talk) and talk[-1]["role"] == "assistant",
    )
    return made, unused


def _tools(body: CountRequest) -> ToolWish:
    made = []
    for i, tool in enumerate(body.tools):
        if tool.get("type", "custom") != "custom":
            raise Rejected(
                f"tools[{i}]: {tool['type']!r} is no tool of the client's own",
                param="tools",
                code="unsupported",
            )
        function = {
            "name": tool.get("name"),
            "description": tool.get("description") or "",
            "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
        }
        made.append({"type": "function", "function": function})
    given = body.tool_choice
    if given is None:
        return ToolWish.of(made)
    parallel = given.get("disable_parallel_tool_use") is not True
    match given:
        case {"type": "auto" | "none" as kind}:
            return ToolWish.of(made, kind, parallel)
        case {"type": "any"}:
            return ToolWish.of(made, "required", parallel)
        case {"type": "tool", "name": str(name)}:
            return ToolWish.of(made, {"type": "function", "function": {"name": name}}, parallel)
    raise Rejected("tool_choice.type must be auto, any, tool or none", param="tool_choice")


def _messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """One message as messages of the chat route: results of tools are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise Rejected(f"{where}.role must be user or assistant, not {role!r}", param="messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise Rejected(f"{where}.content must be a string or a list of blocks", param="messages")
    text, thought = [], []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in content:
        match block:
            case {"type": "text", "text": str(words)}:
                text.append(words)
            case {"type": "thinking", "thinking": str(words)} if role == "assistant":
                thought.append(words)
            case {"type": "redacted_thinking"} if role == "assistant":
                continue  # nobody here can read it
            case {"type": "tool_use", "id": str(call_id), "name": str(name)} if role == "assistant":
                function = {"name": name, "arguments": block.get("input") or {}}
                calls.append({"id": call_id, "type": "function", "function": function})
            case {"type": "tool_result", "tool_use_id": str(call_id)} if role == "user":
                said = text_of(block.get("content"), f"{where}.content", ("text",))
                results.append({"role": "tool", "tool_call_id": call_id, "content": said})
            case _:
                kind = block.get("type") if isinstance(block, Mapping) else block
                raise Rejected(
                    f"{where}.content: a block of type {kind!r} is not supported in a message of "
                    f"role {role!r}",
                    param="messages",
                    code="unsupported",
                )
    made: dict[str, Any] = {"role": role, "content": "".join(text)}
    if thought:
        made["reasoning_content"] = "".join(thought)
    if calls:
        made["tool_calls"] = calls
    return [*results, made] if text or not results else results
