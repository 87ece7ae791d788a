"""Routes for the operator: health, metrics, version, and what changes what others are served."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

import millpond
from millpond.front import replies
from millpond.front.routes.common import documented
from millpond.front.schema import Request as Body
from millpond.front.service import Service


def routes(service: Service) -> APIRouter:
    """The routes that change nothing, over one service."""
    router = APIRouter()

    # The routes at the bottom are asked first: they take both methods, and name both in a 405.
    @router.get("/health", responses=documented(503))
    @router.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)
    async def health() -> Response:
        """200 while requests can be answered, or will be again."""
        phase = service.phase
        made = {"status": phase, "error": service.trouble}
        return replies.reply(made, 503 if phase == "failed" else 200)

    @router.get("/ready", responses=documented(503))
    @router.api_route("/ready", methods=["GET", "HEAD"], include_in_schema=False)
    async def ready() -> Response:
        """200 when a request sent now is answered; else how far the start has come."""
        startup, trouble = service.startup, service.trouble
        made = {
            "phase": service.phase,
            "error": trouble,
            "seconds": round(startup.elapsed, 3),
            "phases": {name: round(s, 3) for name, s in dict(startup.seconds).items()},
        }
        return replies.reply(made, 200 if trouble is None else 503)

    @router.get("/version")
    async def version() -> Response:
        """The version of the package."""
        return replies.reply({"version": millpond.__version__})

    @router.api_route("/metrics", methods=["GET", "HEAD"], include_in_schema=False)
    async def metrics(request: Request) -> Response:
        """Prometheus text format. Asked in a thread: the engine may take its time to answer."""
        head = request.method == "HEAD"
        text = b"" if head else await asyncio.to_thread(service.metrics.exposition)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


class AbortRequest(Body):
    """Body of `/abort_request`: the id of a request, or of its answer; or all of them."""

    rid: str | None = None
    request_id: str | None = None
    abort_all: bool = False


def admin_routes(service: Service, *, enabled: bool) -> APIRouter:
    """The routes that change what others are served. Without the switch all they do is say so."""
    router = APIRouter(include_in_schema=enabled)
    errors = documented(400, 401, 403, 429, 500, 503)

    @router.post("/flush_cache", responses=errors)
    @router.api_route("/flush_cache", methods=["GET", "POST"], include_in_schema=False)
    async def flush_cache() -> Response:
        """Forget every cached prefix; what runs goes on."""
        if not enabled:
            return _closed()
        await asyncio.to_thread(service.engine.flush_cache)
        return replies.reply({"success": True, "message": "no prefix is cached any more"})

    @router.post("/abort_request", responses=errors)
    async def abort_request(body: AbortRequest) -> Response:
        """End requests. Ending none is no error: they may have ended by themselves."""
        if not enabled:
            return _closed()
        wanted = [name for name in (body.rid, body.request_id) if name]
        found = [f for f in tuple(service.flights) if body.abort_all or f.called(wanted)]
        for flight in found:
            flight.abort()
        return replies.reply({"success": True, "aborted": len(found)})

    return router


def _closed() -> Response:
    body: dict[str, Any] = replies.error_body(
        "this route is closed: start the server with --enable-admin to open it",
        kind="permission_error",
        code="admin_disabled",
    )
    return replies.reply(body, 403)
