"""Routes for the operator: health, metrics, version."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

import millpond
from millpond.front import replies
from millpond.front.routes.common import ERRORS
from millpond.front.service import Service


def _health(service: Service) -> tuple[str, str | None]:
    """(phase, why not ready)."""
    if not service.engine.healthy:
        return "failed", service.engine.failure or "the engine has failed"
    return ("draining", "the server is shutting down") if service.draining else ("ready", None)


def routes(service: Service) -> APIRouter:
    """The routes over one service."""
    router = APIRouter()

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

    return router
