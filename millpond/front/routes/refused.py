"""Routes that clients know from elsewhere and that a text generator does not serve."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from millpond.errors import Rejected

_NOT_SERVED = {
    "/v1/embeddings": "embeddings",
    "/embeddings": "embeddings",
    "/pooling": "pooling",
    "/score": "scoring pairs of texts",
    "/v1/score": "scoring pairs of texts",
    "/rerank": "reranking",
    "/v1/rerank": "reranking",
    "/classify": "classification",
    "/v1/audio/transcriptions": "transcription",
    "/v1/images/generations": "images",
    "/v1/batches": "batches of files",
    "/v1/files": "files",
}


def routes() -> APIRouter:
    """One refusal each, with words that say what is missing rather than that a path is unknown."""
    router = APIRouter()
    for path in _NOT_SERVED:
        router.add_api_route(path, _refuse, methods=["POST"], include_in_schema=False)
    return router


async def _refuse(request: Request) -> Response:
    path = request.url.path
    raise Rejected(
        f"{path} is not supported: this server generates text, and does not do "
        f"{_NOT_SERVED.get(path, 'this')}",
        param=path.rpartition("/")[2],
        code="not_found",
    )
