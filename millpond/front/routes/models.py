"""Which models there are: one, in the words of both OpenAI's and Anthropic's clients."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from millpond.errors import Rejected
from millpond.front import replies
from millpond.front.routes.common import ERRORS, documented
from millpond.front.service import Service


def routes(service: Service) -> APIRouter:
    """The routes over one service."""
    router = APIRouter()

    @router.get("/v1/models", responses=documented(401, 429))
    async def models() -> Response:
        """The one model there is."""
        name = service.name
        paging = {"first_id": name, "last_id": name, "has_more": False}
        return replies.reply({"object": "list", "data": [_model(service)], **paging})

    @router.get("/v1/models/{model:path}", responses=ERRORS)
    async def model(model: str) -> Response:
        """Facts about one model."""
        if model != service.name:
            raise Rejected(
                f"the model {model!r} does not exist", param="model", code="model_not_found"
            )
        return replies.reply(_model(service))

    return router


def _model(service: Service) -> dict[str, Any]:
    born = datetime.fromtimestamp(service.created, UTC)
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "millpond",
        "root": service.directory.name,
        "parent": None,
        "max_model_len": service.resolved.session_len,
        # What Anthropic's clients read.
        "type": "model",
        "display_name": service.name,
        "created_at": born.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
