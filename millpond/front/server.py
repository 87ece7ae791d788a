"""The HTTP server: one application over one service, its errors, and its life."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import threading
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import millpond
from millpond.errors import Busy, MillpondError, Refused
from millpond.front import operations, replies
from millpond.front.connections import Silence
from millpond.front.guard import Guard, Limits
from millpond.front.routes.all import routers
from millpond.front.service import Service
from millpond.front.transport import ClientGone
from millpond.telemetry import logger

log = logger("server")


FAREWELL = 1.0
"""Seconds for which a server whose engine has failed still says so, before it ends."""
HURRY = 3.0
"""Seconds that connections are given to end once they have been broken off."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a server behaves. `admin` opens the routes that change what others are served."""

    limits: Limits = field(default_factory=Limits)
    admin: bool = False
    drain_seconds: float = 30.0
    log_level: str = "INFO"


def build_app(service: Service, options: Options | None = None) -> FastAPI:
    """The application; it neither starts nor closes the engine."""
    options = options or Options()
    app = FastAPI(
        title="millpond",
        version=millpond.__version__,
        strict_content_type=False,  # clients that name no type mean JSON
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
    )
    for router in routers(service):
        app.include_router(router)
    app.include_router(operations.routes(service))
    app.include_router(operations.admin_routes(service, enabled=options.admin))
    app.add_exception_handler(MillpondError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientGone, _gone)
    app.add_exception_handler(Exception, _unforeseen)
    app.add_middleware(Guard, limits=options.limits)
    app.add_middleware(_Envelope, service=service)  # the last one added sees a request first
    service.metrics.read_engine(service.engine.stats)
    service.metrics.read_startup(service.startup)
    return app


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, MillpondError)
    status = replies.status_of(error)
    wait = error.retry_after if isinstance(error, Busy) else 1
    headers = {"retry-after": str(wait)} if status in (429, 503) else None
    return replies.refusal(request.url.path, replies.error_of(error), status, headers)


async def _invalid(request: Request, error: Exception) -> Response:
    """A body of the wrong form. The message names places and reasons, not the whole input."""
    assert isinstance(error, RequestValidationError)
    parts, param = [], None
    for problem in error.errors()[:5]:
        where = [str(p) for p in problem["loc"] if p != "body"]
        if not where and problem["type"] == "model_attributes_type":
            parts.append("the body must be a JSON object, sent with Content-Type: application/json")
            continue
        param = param or (where[0] if where and problem["type"] != "json_invalid" else None)
        parts.append(f"{'.'.join(where)}: {problem['msg']}" if where else str(problem["msg"]))
    body = replies.error_body(
        "; ".join(parts)[:2000], kind="invalid_request_error", code="invalid_value", param=param
    )
    return replies.refusal(request.url.path, body, 400)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    unread = isinstance(error.__cause__, ValueError | RecursionError)
    body = replies.error_body(
        "the body is not JSON in UTF-8" if unread else str(error.detail),
        kind="invalid_request_error",
        code=f"http_{error.status_code}",
    )
    return replies.refusal(request.url.path, body, error.status_code, error.headers)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _unforeseen(request: Request, error: Exception) -> Response:
    body = replies.error_body(
        "an unforeseen error; the server's log has it", kind="server_error", code="internal"
    )
    return replies.refusal(request.url.path, body, 500)


class _Envelope:
    """Gives every request an id, answers with it, and counts routes and statuses."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._metrics = app, service.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((v for k, v in scope["headers"] if k == b"x-request-id"), b"")
        known = given.decode("latin-1").strip()
        request_id = known[:128] if known.isprintable() and known else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "none")
                self._metrics.observe_http(route, message["status"])
                raw = (b"x-request-id", request_id.encode("latin-1"))
                message = {**message, "headers": [*message.get("headers", ()), raw]}
            await send(message)

        await self._app(scope, receive, tagged)


class _Server(uvicorn.Server):
    """Drains on the first signal, for a limited time; breaks off on the second.

    Ends by itself, with status 1, once the engine has failed.
    """

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float) -> None:
        super().__init__(config)
        self.status = 0
        self._service, self._told, self._hurried = service, service.startup.ready, False
        self._failed_at: float | None = None
        self._silence = Silence()
        # At the deadline the engine ends what is left, so that clients are told.
        self._deadline = threading.Timer(drain_seconds, service.engine.close, (False, 10.0))
        self._deadline.daemon = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: look after the engine and the connections. True to end."""
        service = self._service
        if counter % 10 == 0:
            now = asyncio.get_running_loop().time()
            self._silence.break_off(list(self.server_state.connections), now)
        if not self._told and service.startup.ready:
            self._told = True
            parts = ", ".join(f"{name} {s:.1f} s" for name, s in service.startup.seconds.items())
            log.info("ready in %.1f s (%s)", service.startup.elapsed, parts)
        if not service.engine.healthy and not service.draining:
            now = asyncio.get_running_loop().time()
            if self._failed_at is None:
                self._failed_at, self.status = now, 1
                log.error("ending: %s", service.trouble)
            elif now - self._failed_at > FAREWELL:
                self.should_exit = True
                asyncio.get_running_loop().call_later(HURRY, self._hurry)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain, or leave."""
        if not self._service.draining:
            log.info(
                "signal %d: finishing what runs for at most %g s, refusing what comes",
                sig,
                self._deadline.interval,
            )
            self._service.draining = self.should_exit = True
            self._deadline.start()
        elif not self._hurried:
            log.info("signal %d: breaking off", sig)
            asyncio.get_running_loop().call_soon_threadsafe(self._hurry)

    def _hurry(self) -> None:
        """Break off every connection; requests end as if their clients had gone."""
        self._hurried = True
        logging.getLogger("uvicorn.error").addFilter(_unfinished_is_no_news)
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        asyncio.get_running_loop().call_later(HURRY, self._leave)

    def _leave(self) -> None:
        self.force_exit = True


def _unfinished_is_no_news(record: logging.LogRecord) -> bool:
    """Whether a line of the HTTP server's is worth saying while all requests are broken off."""
    return record.levelno < logging.ERROR


def bind(host: str, port: int) -> socket.socket:
    """The address to serve at, taken before a model is loaded for it. Raises `Refused`."""
    with ExitStack() as undo:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            made = undo.enter_context(socket.socket(family, kind, protocol))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except OSError as error:
            raise Refused(f"cannot listen on {host}:{port}: {error.strerror}") from error
        undo.pop_all()
        return made


def serve(service: Service, address: socket.socket, options: Options) -> int:
    """Serve until SIGINT or SIGTERM, then drain. Returns a status: 1 when the engine has failed."""
    host, port = address.getsockname()[:2]
    level = options.log_level
    config = uvicorn.Config(
        build_app(service, options),
        log_level="warning" if level.upper() == "INFO" else level.lower(),
        access_log=level.upper() == "DEBUG",
        timeout_graceful_shutdown=round(options.drain_seconds) + 10,
        timeout_keep_alive=30,
        backlog=4096,
        lifespan="off",
    )
    server = _Server(config, service, options.drain_seconds)
    _allow_many_connections()
    log.info("sampling where a request says nothing: %s", service.defaults)
    log.info("serving %s at http://%s:%d (%s)", service.name, host, port, service.phase)
    # uvicorn raises a signal again after it has shut down; ours have been acted on by then.
    before = {s: signal.signal(s, _ignore) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[address])
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
    return server.status if server.started else 1


def _allow_many_connections() -> None:
    """Each takes a file descriptor, and the usual soft limit is about a thousand."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _ignore(sig: int, frame: FrameType | None) -> None:
    """The signal has been acted on."""
