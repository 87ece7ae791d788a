"""Named tensors of a checkpoint, as a model takes them: checked, converted, on its device.

Knows the safetensors format, one file or shards with an index, and the two layouts of expert
weights; knows no architecture. Nothing is read before it is taken.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from millpond.errors import Refused

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SCALE = "_scale_inv"


class Source(Protocol):
    """Where tensors come from, by their full published names."""

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Its shape; None: whatever is asked for."""

    def dtype(self, name: str) -> torch.dtype | None:
        """Its stored dtype; None: whatever is asked for. Raises `Refused` if it is quantised."""

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, on any device."""


class Checkpoint:
    """The safetensors files of one directory. Raises `Refused` where they are missing or broken."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self._files: dict[str, safe_open] = {}
        self._file_of = self._index()

    def _index(self) -> dict[str, str]:
        index = self.model_dir / INDEX_FILE
        if index.is_file():
            try:
                named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (ValueError, KeyError, TypeError) as cause:
                raise Refused(f"{index} is not an index of weights: {cause}") from cause
            return {str(name): str(file) for name, file in named.items()}
        if (self.model_dir / SINGLE_FILE).is_file():
            return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        raise Refused(f"{self.model_dir} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")

    def _open(self, file: str) -> safe_open:
        if file not in self._files:
            path = self.model_dir / file
            if not path.is_file():
                raise Refused(f"weights file {path} is missing, the index names it")
            try:
                self._files[file] = safe_open(path, framework="pt")
            except SafetensorError as cause:
                raise Refused(f"weights file {path} cannot be read: {cause}") from cause
        return self._files[file]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files together."""
        paths = {self.model_dir / file for file in self._file_of.values()}
        return sum(path.stat().st_size for path in paths if path.is_file())

    def names(self) -> Iterable[str]:
        """All tensors."""
        return self._file_of.keys()

    def has(self, name: str) -> bool:
        """Whether the index names it."""
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """As stored; reads the header only."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """As stored. Quantised tensors are refused."""
        stored = self._slice(name).get_dtype()
        if stored not in _STORED or self.has(name + _SCALE):
            raise Refused(f"tensor {name} is quantised ({stored}): not supported yet")
        return _STORED[stored]

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, on the CPU."""
        del shape
        found: torch.Tensor = self._open(self._file_of[name]).get_tensor(name)
        return found

    def _slice(self, name: str):  # type: ignore[no-untyped-def]  # safetensors has no name for it
        handle = self._open(self._file_of[name])
        try:
            return handle.get_slice(name)
        except SafetensorError as cause:
            raise Refused(f"tensor {name} is not in the file the index names: {cause}") from cause


class Shapes:
    """Tensors without bytes, to count what a model takes: see `Weights.num_bytes`."""

    def has(self, name: str) -> bool:
        """Always."""
        del name
        return True

    def shape(self, name: str) -> None:
        """As asked."""
        del name

    def dtype(self, name: str) -> None:
        """As asked."""
        del name

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """On the meta device."""
        del name
        return torch.empty(shape, device="meta")


Draw = Callable[[str, tuple[int, ...], torch.Generator], "torch.Tensor | None"]
"""What a family draws for a tensor in particular; None: the common rule."""


CPU = torch.device("cpu")


class Dummy(Shapes):
    """Random weights of any name and shape: the same seed and name give the same tensor.

    They are drawn where they are needed, billions in seconds on a GPU. Every tensor has a generator
    of its own, so none depends on what was drawn before it; kinds of devices differ in their
    numbers, not in what these are like.
    """

    def __init__(self, draw: Draw, seed: int = 0, device: torch.device = CPU) -> None:
        self._draw = draw
        self._seed = seed
        self._device = device

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Drawn by the family, else normal with the variance of one over the inputs."""
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        seed = int.from_bytes(digest[:7], "little")
        generator = torch.Generator(self._device).manual_seed(seed)
        drawn = self._draw(name, shape, generator)
        if drawn is None:
            drawn = torch.randn(shape, generator=generator, device=self._device)
            drawn /= math.sqrt(shape[-1])
        return drawn


class Taken:
    """What has been taken so far: bytes on the device, and the names."""

    __slots__ = ("names", "num_bytes")

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.num_bytes = 0


class Weights:
    """The tensors of a source under one prefix, for a model of one dtype on one device."""

    def __init__(
        self,
        source: Source,
        *,
        dtype: torch.dtype,
        device: torch.device,
        prefix: str = "",
        taken: Taken | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        self.source = source
        self.dtype = dtype
        self.device = device
        self.prefix = prefix
        self.taken = Taken() if taken is None else taken
        self._on_bytes = on_bytes

    def under(self, key: str) -> Weights:
        """The tensors whose names go on with `key`."""
        return Weights(
            self.source,
            dtype=self.dtype,
            device=self.device,
            prefix=self.prefix + key,
            taken=self.taken,
            on_bytes=self._on_bytes,
        )

    def root(self, prefixes: Sequence[str], probe: str) -> Weights:
        """The first prefix under which there is `probe`; `Refused`, naming it, if none has it."""
        for prefix in prefixes:
            if self.source.has(self.prefix + prefix + probe):
                return self.under(prefix)
        raise Refused(f"tensor {probe} is missing: looked under {', '.join(map(repr, prefixes))}")

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return self.source.has(self.prefix + name)

    def stored_dtype(self, name: str) -> torch.dtype:
        """What it is stored in; the model's dtype where the source leaves that open."""
        self._require(name)
        return self.source.dtype(self.prefix + name) or self.dtype

    def take(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The tensor in the model's dtype (or `dtype`) on the device.

        Raises `Refused`, naming it, when it is missing, quantised or of another shape.
        """
        return self.take_rows(((name, shape[0]),), shape[1:], dtype=dtype)

    def take_rows(
        self,
        parts: Sequence[tuple[str, int]],
        rest: tuple[int, ...],
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Several tensors [rows, *rest] one below the other, as (name, rows): one allocation."""
        total = sum(rows for _, rows in parts)
        wanted = self.dtype if dtype is None else dtype
        out = self._allocate((total, *rest), wanted)
        at = 0
        for name, rows in parts:
            self._copy(out[at : at + rows], name)
            at += rows
        return out

    def take_experts(
        self, key: str, *, experts: int, hidden: int, inner: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both layouts of experts under `key` -> gate_up [E, 2 I, H] (gate first), down [E, H, I].

        Fused: `key.gate_up_proj`, `key.down_proj`. One by one: `key.N.gate_proj.weight` and so on.
        """
        if self.has(f"{key}.gate_up_proj"):
            return (
                self.take(f"{key}.gate_up_proj", (experts, 2 * inner, hidden)),
                self.take(f"{key}.down_proj", (experts, hidden, inner)),
            )
        gate_up = self._allocate((experts, 2 * inner, hidden), self.dtype)
        down = self._allocate((experts, hidden, inner), self.dtype)
        for expert in range(experts):
            self._copy(gate_up[expert, :inner], f"{key}.{expert}.gate_proj.weight")
            self._copy(gate_up[expert, inner:], f"{key}.{expert}.up_proj.weight")
            self._copy(down[expert], f"{key}.{expert}.down_proj.weight")
        return gate_up, down

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(shape, dtype=dtype, device=self.device)
        self.taken.num_bytes += out.numel() * out.element_size()
        return out

    def _copy(self, target: torch.Tensor, name: str) -> None:
        """Read one tensor into its place."""
        full = self.prefix + name
        self._require(name)
        expected = tuple(target.shape)
        found = self.source.shape(full)
        if found is not None and found != expected:
            raise Refused(f"tensor {full} has shape {list(found)}, expected {list(expected)}")
        self.source.dtype(full)  # refuses what is quantised
        value = self.source.read(full, expected)
        if value.dtype != target.dtype:  # moved as it is stored, so that a GPU converts it
            value = value.to(target.device)
        target.copy_(value)
        self.taken.names.add(full)
        if self._on_bytes is not None:
            self._on_bytes(value.numel() * value.element_size())

    def _require(self, name: str) -> None:
        if not self.has(name):
            raise Refused(f"tensor {self.prefix}{name} is missing from the checkpoint")


def has_weights(model_dir: Path) -> bool:
    """Whether a directory holds weights at all."""
    return any((model_dir / name).is_file() for name in (INDEX_FILE, SINGLE_FILE))


def unused(checkpoint: Checkpoint, taken: Taken, skipped: Sequence[str]) -> list[str]:
    """Tensors nobody took, but for those under the `skipped` prefixes."""
    return sorted(
        name
        for name in checkpoint.names()
        if name not in taken.names and not name.startswith(tuple(skipped))
    )


def half_kept_decay(
    name: str, shape: tuple[int, ...], *, heads: int, lower_bound: float | None = None
) -> torch.Tensor | None:
    """A_log [H] and dt_bias [H] or [H * K]: every other head barely forgets, the others do.

    Log decays of the first kind lie in [-0.02, 0] for decay inputs up to about 3, so that a damaged
    state shows hundreds of tokens later. None for tensors of other names.
    """
    keeps = torch.arange(heads) % 2 == 0
    if name.endswith("A_log"):
        return torch.where(keeps, -1.0 if lower_bound is None else 0.0, 0.3)
    if name.endswith("dt_bias"):
        slow = -6.0 if lower_bound is None else -8.7
        return torch.where(keeps, slow, -1.0).repeat_interleave(shape[0] // heads)
    return None


def read_json(path: Path) -> Mapping[str, object]:
    """One JSON object. Raises `Refused` where the file is missing or not one."""
    if not path.is_file():
        raise Refused(f"{path} does not exist")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as cause:
        raise Refused(f"{path} is not JSON: {cause}") from cause
    if not isinstance(found, dict):
        raise Refused(f"{path} is not a JSON object")
    return found
