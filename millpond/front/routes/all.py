"""Every route that clients of a model use; those of its operator are elsewhere."""

from __future__ import annotations

from fastapi import APIRouter

from millpond.front.routes import chat, completions, models, refused, tokens
from millpond.front.service import Service


def routers(service: Service) -> tuple[APIRouter, ...]:
    """One router a module, over one service."""
    made = (m.routes(service) for m in (chat, completions, models, tokens))
    return (*made, refused.routes())
