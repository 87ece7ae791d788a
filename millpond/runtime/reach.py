"""How a store reaches the arenas of one rank, and what the bytes in them are called.

Knows arenas and ops; does not know who moves bytes, nor when.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from millpond.memory.arena import Arena, Arenas
from millpond.memory.layout import EntrySpec, ModelLayout
from millpond.ops.bind import OP_NAMES, Bound
from millpond.runtime.staged import StagedMemory
from millpond.store.memory import HostMemory, RankMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What shapes the bytes of slots and pages, besides tokens and weights.

    `layout` names every tensor of a slot and a page with its place, `kernels` who computes each op,
    with which torch, and on a GPU from which sources, with which compiler and on which GPU.
    """

    dtype: str
    state_dtype: str
    layout: str
    kernels: str


def made(layout: ModelLayout, ops: Bound, device: torch.device) -> Made:
    """Of a model's layout, computed by `ops`."""
    slot, page = _named(layout.slot), _named(layout.page)
    modules = {name: getattr(ops, name).__module__ for name in OP_NAMES}
    served = sorted(f"{name}={module}" for name, module in modules.items())
    if device.type == "cuda":
        packages = {module.rpartition(".")[0] for module in modules.values()}
        served += [f"{package}={_sources(package)}" for package in sorted(packages)]
    dtypes = {str(t.dtype) for t in layout.page.tensors}
    states = {str(t.dtype) for t in layout.slot.tensors if t.name == "recurrent"}
    table = hashlib.sha256("\n".join(served).encode()).hexdigest()[:16]
    return Made(
        dtype=",".join(sorted(dtypes)).replace("torch.", ""),
        state_dtype=",".join(sorted(states)).replace("torch.", ""),
        layout=hashlib.sha256(json.dumps([slot, page]).encode()).hexdigest(),
        kernels=f"torch {torch.__version__} {_rounding(device)} {table}",
    )


@cache
def _sources(package: str) -> str:
    """sha256 of the modules of a package: kernels written differently may round differently."""
    whole = hashlib.sha256()
    for folder in import_module(package).__path__:
        for file in sorted(Path(folder).glob("*.py")):
            text = file.read_bytes()
            whole.update(f"{file.name} {len(text)}\n".encode())
            whole.update(text)
    return whole.hexdigest()


def _rounding(device: torch.device) -> str:
    """What else the bytes depend on: on a GPU, which one it is, and who compiled the kernels."""
    if device.type != "cuda":
        return device.type
    compiler = metadata.version("triton") if find_spec("triton") is not None else "none"
    return f"{torch.cuda.get_device_name(device)} Triton {compiler}"


def _named(spec: EntrySpec) -> list[tuple[int, str, list[int], str, int]]:
    return [
        (t.layer, t.name, list(t.shape), str(t.dtype), offset)
        for t, offset in zip(spec.tensors, spec.offsets(), strict=True)
    ]


def memory_of(arenas: Arenas, staging_bytes: int | None = None) -> RankMemory:
    """The slots and pages themselves in ordinary memory; on a device, by way of a pinned ring.

    That has `staging_bytes` for both directions together (None: as many as are of use). Raises
    `Refused`.
    """
    slots, pages = arenas.slots, arenas.pages
    if slots.storage.device.type != "cpu":
        area = None if staging_bytes is None else staging_bytes // 2
        return StagedMemory(slots, pages, batch_bytes=area)
    return HostMemory(_bytes(slots), slots.spec.num_bytes, _bytes(pages), pages.spec.num_bytes)


def _bytes(arena: Arena) -> memoryview:
    return arena.storage.numpy().reshape(-1).data.cast("B")
