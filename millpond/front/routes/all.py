"""Every route that clients of a model use; those of its operator are elsewhere."""

from __future__ import annotations

from fastapi import APIRouter

from millpond.front.routes import (
    chat,
    completions,
    facts,
    generate,
    messages,
    models,
    page,
    refused,
    responses,
    tokens,
)
from millpond.front.service import Service


def routers(service: Service) -> tuple[APIRouter, ...]:
    """One router a module, over one service."""
    speaking = (chat, completions, responses, messages, generate)
    of_service = (m.routes(service) for m in (*speaking, models, tokens, facts))
    return (*of_service, refused.routes(), page.routes())
