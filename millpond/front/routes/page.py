"""`/`: one page for a first conversation in a browser, which loads nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

_PAGE = Path(__file__).with_name("page.html")
_HEADERS = {
    # What a model writes is shown as text; were it ever more, it could load and reach nothing.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def routes() -> APIRouter:
    """The route. It needs no key: the page asks for one, and sends it along."""
    router = APIRouter(include_in_schema=False)
    page = _PAGE.read_bytes()

    @router.api_route("/", methods=["GET", "HEAD"])
    async def show() -> Response:
        """The page."""
        return Response(page, headers=_HEADERS, media_type="text/html; charset=utf-8")

    return router
