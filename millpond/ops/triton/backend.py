"""The Triton backend: kernels for NVIDIA GPUs, or anywhere under Triton's interpreter.

Knows which modules hold which op; none of them, nor Triton, is imported before an op is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType

import torch

from millpond.ops.bind import Backend

_OPS = {
    "conv": ("conv_prefill",),
    "chunks": ("delta_prefill",),
    "steps": ("mix_decode", "mix_verify"),
    "slots": ("boundary_store", "hidden_before_verify", "boundary_verify"),
    "writes": ("write_kv", "turn_and_write"),
    "attention": ("paged_gqa",),
    "latent": ("paged_mla",),
    "indexer": ("pool_keys", "select"),
    "products": (
        "linear",
        "linear_by_head",
        "linear_float",
        "norm_linear",
        "linear_swiglu",
        "norm_swiglu",
        "gated_norm_linear",
    ),
    "norms": (
        "rms_norm",
        "zero_centred_rms_norm",
        "layer_norm",
        "add_norm",
    ),
    "elementwise": ("swiglu", "rope_tables", "rotate_partial"),
    "hyper": ("hyper_pre", "hyper_post", "hyper_mean"),
    "moe": ("moe_route_softmax", "moe_route_sigmoid", "grouped_experts"),
    "staging": ("stage_live", "stage_singles", "settle", "keep_counters"),
    "sampling": ("sample",),
}
HOMES = MappingProxyType({op: module for module, ops in _OPS.items() for op in ops})
"""The module of each op, beside this one."""

FIRST_CAPABILITY = (8, 0)
"""bfloat16 and TF32 matrix products begin here (Ampere)."""


class Lazy(Mapping[str, Callable[..., object]]):
    """Ops by name, imported when looked up: the modules need Triton, this one must not."""

    def __init__(self, package: str, homes: Mapping[str, str]) -> None:
        self.package = package
        self.homes = homes

    def __getitem__(self, name: str) -> Callable[..., object]:
        """The op, after importing its module."""
        op: Callable[..., object] = getattr(
            import_module(f"{self.package}.{self.homes[name]}"), name
        )
        return op

    def __iter__(self) -> Iterator[str]:
        """Names only; nothing is imported."""
        return iter(self.homes)

    def __len__(self) -> int:
        """How many ops there are."""
        return len(self.homes)


def unusable(device: torch.device) -> str | None:
    """Why the kernels cannot run on `device`, or None."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cuda":
        if torch.version.hip is not None:
            return "the kernels are for NVIDIA GPUs"
        capability = torch.cuda.get_device_capability(device)
        if capability < FIRST_CAPABILITY:
            wanted, found = (".".join(map(str, c)) for c in (FIRST_CAPABILITY, capability))
            return f"needs compute capability {wanted}, this GPU has {found}"
        return None
    # Triton's own switch decides when a kernel is defined; asking Triton keeps both in step.
    if not import_module("triton").knobs.runtime.interpret:
        return "needs CUDA, or Triton's interpreter (TRITON_INTERPRET=1)"
    return None


BACKEND = Backend(
    name="triton",
    rank=10,
    unusable=unusable,
    export_granularity=64,
    ops=Lazy(__package__, HOMES),
)
