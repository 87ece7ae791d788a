"""Routes beside generation: models, tokens, health, metrics, version."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

import millpond
from millpond.errors import Rejected
from millpond.front import replies
from millpond.front.openai import ERRORS, accept, ignored_header
from millpond.front.schema import DetokenizeRequest, TokenizeRequest
from millpond.front.service import Service


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "millpond",
        "root": str(service.directory.name),
        "max_model_len": service.resolved.session_len,
    }


def _health(service: Service) -> tuple[str, str | None]:
    """(phase, why not ready)."""
    if not service.engine.healthy:
        return "failed", service.engine.failure or "the engine has failed"
    return ("draining", "the server is shutting down") if service.draining else ("ready", None)


def routes(service: Service) -> APIRouter:
    """The routes over one service."""
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> Response:
        """The one model there is."""
        return replies.reply({"object": "list", "data": [_model(service)]})

    @router.get("/v1/models/{model:path}", responses=ERRORS)
    async def model(model: str) -> Response:
        """Facts about one model."""
        if model != service.name:
            raise Rejected(
                f"the model {model!r} does not exist", param="model", code="model_not_found"
            )
        return replies.reply(_model(service))

    @router.get("/health", responses=ERRORS)
    async def health() -> Response:
        """200 while requests can be answered, or will be again."""
        phase, why = _health(service)
        return replies.reply({"status": phase, "error": why}, 503 if phase == "failed" else 200)

    @router.get("/ready", responses=ERRORS)
    async def ready() -> Response:
        """200 when a request sent now is answered."""
        phase, why = _health(service)
        return replies.reply({"phase": phase, "error": why}, 200 if phase == "ready" else 503)

    @router.get("/version")
    async def version() -> Response:
        """The version of the package."""
        return replies.reply({"version": millpond.__version__})

    @router.api_route("/metrics", methods=["GET", "HEAD"], include_in_schema=False)
    async def metrics(request: Request) -> Response:
        """Prometheus text format."""
        text = b"" if request.method == "HEAD" else service.metrics.exposition()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.post("/tokenize", responses=ERRORS)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a prompt, or of messages through the chat template."""
        accept(service, body)
        tokens = await asyncio.to_thread(_tokenize, service, body)
        made: dict[str, Any] = {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": service.resolved.session_len,
        }
        if body.return_token_strs:
            made["token_strs"] = [service.tokenizer.token_text(t) for t in tokens]
        return replies.reply(made, headers=ignored_header(body.ignored))

    @router.post("/detokenize", responses=ERRORS)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        accept(service, body)
        tokens = service.encode(body.tokens)
        text = await asyncio.to_thread(
            service.tokenizer.decode, tokens, skip_special_tokens=body.skip_special_tokens
        )
        return replies.reply({"prompt": text}, headers=ignored_header(body.ignored))

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """The tokenizer's configuration, with its special tokens."""
        return replies.reply(service.tokenizer.config)

    return router


def _tokenize(service: Service, body: TokenizeRequest) -> list[int]:
    if body.messages:
        if service.template is None:
            raise Rejected(f"{service.name} has no chat template", param="messages")
        prompt = service.template.render(
            body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            extra=body.chat_template_kwargs,
        )
        return service.tokenizer.encode(prompt.text, add_special_tokens=False)
    if body.prompt is None:
        raise Rejected("prompt or messages is needed", param="prompt")
    return service.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
