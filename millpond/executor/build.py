"""Chooses the executor a configuration names, or refuses it by name."""

from __future__ import annotations

from pathlib import Path

from millpond.config import Resolved
from millpond.errors import Refused
from millpond.executor.uni import UniExecutor
from millpond.plan.step import Executor
from millpond.runtime.worker import load


def build_executor(model_dir: Path, resolved: Resolved, name: str = "uni") -> Executor:
    """The executor called `name`, with the model of `model_dir` loaded. Raises `Refused`."""
    if name != "uni":
        raise Refused(f"executor {name!r} is not supported yet, use 'uni'")
    worker = load(
        model_dir,
        dtype=resolved.dtype,
        device=resolved.device,
        num_slots=resolved.num_slots,
        num_pages=resolved.num_pages,
        num_seats=resolved.num_seats,
        session_len=resolved.session_len,
        load_format=resolved.load_format,
        kda_prefill_backend=resolved.kda_prefill_backend,
        num_draft_tokens=resolved.num_draft_tokens,
        debug_poison=resolved.debug_poison,
    )
    return UniExecutor(worker)
