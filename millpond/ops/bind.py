"""Chooses, once and at start, which backend serves each op; knows the backends by listing a folder.

A backend is a package next to this module with a `backend` module that holds `BACKEND`. It may
serve some ops only. What was asked for and cannot serve is refused, with the reason of every
backend.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module

import torch

import millpond.ops
from millpond.errors import Refused
from millpond.ops.batch import LiveTokens, Sampled, Settled, SingleTokens

log = logging.getLogger(__name__)

AUTO = "auto"

Op = Callable[..., torch.Tensor]
Pair = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Triple = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute ops. `unusable` says why it cannot serve a device, or None if it can."""

    name: str
    rank: int  # of the usable ones that have an op, the highest serves it
    unusable: Callable[[torch.device], str | None]
    ops: Mapping[str, Callable[..., object]]
    export_granularity: int  # of its `delta_prefill`, in tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The ops of a device, chosen. Signatures and meaning: `millpond.ops.reference`."""

    linear: Op
    linear_float: Op
    norm_linear: Pair
    linear_swiglu: Op
    norm_swiglu: Pair
    gated_norm_linear: Op
    add_norm: Pair
    linear_by_head: Op
    conv_prefill: Op
    delta_prefill: Op
    boundary_store: Callable[..., None]
    mix_decode: Op
    mix_verify: Op
    hidden_before_verify: Op
    boundary_verify: Callable[..., None]
    write_kv: Callable[..., None]
    turn_and_write: Callable[..., torch.Tensor | None]
    paged_gqa: Op
    paged_mla: Op
    pool_keys: Callable[..., None]
    select: Callable[..., torch.Tensor | None]
    embedding: Op
    rms_norm: Op
    zero_centred_rms_norm: Op
    layer_norm: Op
    swiglu: Op
    rope_tables: Pair
    rotate_partial: Op
    hyper_pre: Triple
    hyper_post: Op
    hyper_mean: Op
    moe_route_softmax: Pair
    moe_route_sigmoid: Pair
    grouped_experts: Op
    stage_live: Callable[..., LiveTokens]
    stage_singles: Callable[..., SingleTokens]
    settle: Callable[..., Settled]
    keep_counters: Callable[..., None]
    sample: Callable[..., Sampled]
    token_logprobs: Triple
    export_granularity: int  # tokens; where `delta_prefill` can export, counted from position 0


OP_NAMES = tuple(f.name for f in fields(Bound) if f.name != "export_granularity")


def backends() -> tuple[Backend, ...]:
    """All backends of this installation, the highest rank first."""
    found = [
        import_module(f"{millpond.ops.__name__}.{module.name}.backend").BACKEND
        for module in pkgutil.iter_modules(millpond.ops.__path__)
        if module.ispkg
    ]
    return tuple(sorted(found, key=lambda b: (-b.rank, b.name)))


def bind(
    device: torch.device,
    *,
    backend: str = AUTO,
    delta_prefill_backend: str = AUTO,
    among: Sequence[Backend] | None = None,
    quiet: bool = False,
) -> Bound:
    """Choose a backend for every op on `device`.

    `backend` puts one first wherever it has the op; `delta_prefill_backend` decides for that op
    alone, and must have it. `among` replaces the installed backends. What was chosen is logged,
    unless `quiet`. Raises `Refused`.
    """
    known = backends() if among is None else tuple(among)
    reasons = {b.name: b.unusable(device) for b in known}
    usable = [b for b in known if reasons[b.name] is None]

    def refuse(wanted: str, op: str | None = None) -> Refused:
        table = [
            f"{b.name}: {reasons[b.name] or ('usable' if op in (None, *b.ops) else 'lacks it')}"
            for b in known
        ]
        asked = {backend, delta_prefill_backend} - {AUTO, *reasons}
        table += [f"{name}: not part of this installation" for name in sorted(asked)]
        return Refused(f"{wanted} cannot be served on {device}. Backends: {'; '.join(table)}")

    if backend != AUTO:
        if backend not in {b.name for b in usable}:
            raise refuse(f"backend {backend!r}")
        usable.sort(key=lambda b: b.name != backend)
    chosen: dict[str, Backend] = {}
    for name in OP_NAMES:
        serving = [b for b in usable if name in b.ops]
        if name == "delta_prefill" and delta_prefill_backend != AUTO:
            serving = [b for b in serving if b.name == delta_prefill_backend]
            if not serving:
                raise refuse(f"delta_prefill by {delta_prefill_backend!r}", name)
        if not serving:
            raise refuse(f"op {name!r}", name)
        chosen[name] = serving[0]
    if not quiet:
        _log_table(device, chosen, reasons)
    functions = {name: b.ops[name] for name, b in chosen.items()}
    return Bound(
        **functions,  # type: ignore[arg-type]  # backends answer for their signatures
        export_granularity=chosen["delta_prefill"].export_granularity,
    )


def _log_table(
    device: torch.device, chosen: Mapping[str, Backend], reasons: Mapping[str, str | None]
) -> None:
    """One line: who serves what, and why the others do not."""
    served: dict[str, list[str]] = {}
    for op, backend in chosen.items():
        served.setdefault(backend.name, []).append(op)
    largest = max(served, key=lambda name: len(served[name]))
    parts = [f"{n}: {', '.join(ops)}" for n, ops in served.items() if n != largest]
    parts.append(f"{largest}: {'all others' if parts else 'all'}")
    parts += [f"not {name} ({why})" for name, why in reasons.items() if why is not None]
    log.info("ops on %s: %s", device, "; ".join(parts))
