"""What a model, a device and a backend cannot do together, said before weights are read."""

from __future__ import annotations

import torch

from millpond.errors import Refused
from millpond.models.base import Description
from millpond.ops.bind import AUTO
from millpond.units import human

MAX_DRAFT_TOKENS = 7
"""A verify row then takes eight places; more drafts than that are hardly ever accepted."""


def delta_backend(description: Description, kda_prefill_backend: str, dtype: torch.dtype) -> str:
    """The backend of `delta_prefill`; what the model has no use for, or cannot have, is refused."""
    if kda_prefill_backend != AUTO and description.config.delta_rule != "kda":
        raise Refused(
            f"kda_prefill_backend={kda_prefill_backend!r} is for models with KDA layers;"
            f" {description.model_type} has none"
        )
    if kda_prefill_backend == "flash_kda" and dtype != torch.bfloat16:
        found = str(dtype).removeprefix("torch.")
        raise Refused(f"kda_prefill_backend='flash_kda' computes in bfloat16 only, not in {found}")
    return kda_prefill_backend


def check_drafts(description: Description, num_draft_tokens: int) -> None:
    """Raise `Refused` for a number of drafts that is not served, or that no layer could make."""
    if not 0 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise Refused(
            f"{num_draft_tokens} draft tokens are not supported, use 0 to {MAX_DRAFT_TOKENS}"
        )
    if num_draft_tokens and not description.config.num_draft_layers:
        raise Refused(
            f"{description.model_dir} has no draft layer to make {num_draft_tokens} draft tokens"
        )


def check_weights(name: str, num_bytes: int, free: int) -> None:
    """Raise `Refused` for weights that a GPU with `free` bytes cannot hold."""
    if num_bytes > free:
        raise Refused(
            f"the weights of {name} take {human(num_bytes)}, the GPU has {human(free)} free: use"
            " one with more memory, or end what else runs there"
        )
