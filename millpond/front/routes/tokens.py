"""Text to token ids and back over HTTP, and what the tokenizer says of itself."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from millpond.errors import Rejected
from millpond.front import replies
from millpond.front.routes.common import ERRORS, accept, documented, ignored_header
from millpond.front.schema import Request
from millpond.front.service import Service


class TokenizeRequest(Request):
    """Body of `/tokenize`: a prompt, or messages for the chat template."""

    required: ClassVar[frozenset[str]] = frozenset({"prompt"})
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] = Field(default_factory=list)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    return_token_strs: bool = False


class DetokenizeRequest(Request):
    """Body of `/detokenize`."""

    required: ClassVar[frozenset[str]] = frozenset({"tokens"})
    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False


def routes(service: Service) -> APIRouter:
    """The routes over one service."""
    router = APIRouter()

    @router.post("/tokenize", responses=ERRORS)
    @router.post("/v1/tokenize", responses=ERRORS, include_in_schema=False)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a prompt, or of messages through the chat template."""
        accept(service, body)
        made = await asyncio.to_thread(_tokenized, service, body)
        return replies.reply(made, headers=ignored_header(body.ignored))

    @router.post("/detokenize", responses=ERRORS)
    @router.post("/v1/detokenize", responses=ERRORS, include_in_schema=False)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        accept(service, body)
        wrong = next((i for i in body.tokens if not 0 <= i < service.vocab_size), None)
        if wrong is not None:
            raise Rejected(
                f"{wrong} is not a token of this model (0 to {service.vocab_size - 1})",
                param="tokens",
            )
        text = await asyncio.to_thread(
            service.tokenizer.decode, body.tokens, skip_special_tokens=body.skip_special_tokens
        )
        return replies.reply({"prompt": text}, headers=ignored_header(body.ignored))

    @router.get("/tokenizer_info", responses=documented(401, 429))
    async def tokenizer_info() -> Response:
        """The tokenizer's configuration, with its special tokens."""
        return replies.reply(service.tokenizer.config)

    return router


def _tokenized(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    tokens = _tokenize(service, body)
    made: dict[str, Any] = {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": service.resolved.session_len,
    }
    if body.return_token_strs:
        made["token_strs"] = [service.tokenizer.token_text(t) for t in tokens]
    return made


def _tokenize(service: Service, body: TokenizeRequest) -> list[int]:
    if body.messages and body.prompt is not None:
        raise Rejected("prompt and messages are two ways to say the same: send one", param="prompt")
    if body.messages:
        if service.template is None:
            raise Rejected(f"{service.name} has no chat template", param="messages")
        prompt = service.template.render(
            body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            extra=body.chat_template_kwargs,
        )
        return prompt.encode(service.tokenizer)
    if body.prompt is None:
        raise Rejected("prompt or messages is needed", param="prompt")
    return service.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
