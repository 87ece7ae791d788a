"""What a server is and runs with: read by load clients, and by people who ask why."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

import millpond
from millpond.errors import Unavailable
from millpond.front import replies
from millpond.front.routes.common import documented
from millpond.front.service import Service
from millpond.plan.step import PAGE_SIZE


def routes(service: Service) -> APIRouter:
    """The routes over one service."""
    router = APIRouter()
    errors = documented(401)

    @router.get("/model_info", responses=errors)
    @router.get("/get_model_info", include_in_schema=False)
    async def model_info() -> Response:
        """The model, in the words of SGLang's clients."""
        template = service.template
        dialect = template.dialect if template is not None else None
        return replies.reply(
            {
                "model_path": service.directory.name,
                "tokenizer_path": service.directory.name,
                "served_model_name": service.name,
                "is_generation": True,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "preferred_sampling_params": asdict(service.defaults),
                "vocab_size": service.vocab_size,
                "max_model_len": service.resolved.session_len,
                "has_chat_template": template is not None,
                "parser": dialect.family.name if dialect is not None else None,
                "reasoning_efforts": sorted(template.efforts) if template is not None else [],
            }
        )

    @router.get("/server_info", responses=errors)
    @router.get("/get_server_info", include_in_schema=False)
    async def server_info() -> Response:
        """Every number the engine runs with, and sampling where a request says nothing of it."""
        resolved = service.resolved
        return replies.reply(
            {
                "version": millpond.__version__,
                "phase": service.phase,
                "served_model_name": service.name,
                "model_path": service.directory.name,
                "sampling_defaults": asdict(service.defaults),
                "max_queued": service.room.limit and service.room.limit - resolved.max_batch_size,
                "force_usage": service.force_usage,
                "max_total_num_tokens": resolved.num_pages * PAGE_SIZE,
                "max_req_input_len": resolved.session_len - 1,
                **asdict(resolved),
                "internal_states": [await asyncio.to_thread(_state, service)],
            }
        )

    return router


def _state(service: Service) -> dict[str, Any]:
    """What the engine has come to; nothing of one that has never answered."""
    try:
        stats = service.engine.stats()
    except Unavailable:
        return {}
    made: dict[str, Any] = {
        "requests_running": stats.requests_running,
        "requests_waiting": stats.requests_waiting,
    }
    if stats.drafts:
        made["avg_spec_accept_length"] = 1 + stats.accepted_tokens / stats.drafts
    return made
