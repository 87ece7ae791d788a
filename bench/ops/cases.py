"""Calls of the linear-attention ops at the shapes of real models, on any device.

Knows contracts and least bytes; times nothing. A case is built anew from a seed, so that two
backends can be given equal inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from millpond.ops.batch import RowSlots, VerifyRows, WriteLog
from millpond.ops.reference.delta import Gate

CONV_WIDTH = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """One linear layer of a model, whole (no tensor parallelism)."""

    name: str
    key_heads: int
    heads: int
    k_dim: int
    v_dim: int
    lower_bound: float | None

    @property
    def by_channel(self) -> bool:
        """KDA decays by key channel, GDN by head."""
        return self.lower_bound is not None

    @property
    def channels(self) -> int:
        """What the convolution sees of a token."""
        return 2 * self.key_heads * self.k_dim + self.heads * self.v_dim

    @property
    def decay(self) -> tuple[int, ...]:
        """Decay inputs of a token."""
        return (self.heads, self.k_dim) if self.by_channel else (self.heads,)

    @property
    def state_bytes(self) -> int:
        """One recurrent state."""
        return 4 * self.heads * self.v_dim * self.k_dim


SHAPES = {
    "kda": Shape("kda", 64, 64, 128, 128, -5.0),
    "gdn": Shape("gdn", 16, 32, 128, 128, None),
    "small-kda": Shape("small-kda", 2, 2, 32, 32, -5.0),
    "small-gdn": Shape("small-gdn", 1, 2, 32, 32, None),
}


@dataclass(slots=True)
class Case:
    """One call: `op` of a backend takes `args` and `named`. `least_bytes` must cross the memory."""

    op: str
    label: str
    shape: Shape
    args: tuple[torch.Tensor, ...]
    named: dict[str, object]
    least_bytes: int

    @property
    def least_flops(self) -> int:
        """Not counted: these ops are bound by bytes, or should be."""
        return 0

    @property
    def changed(self) -> tuple[str, ...]:
        """Those of `named` that a call may write: banks and rings."""
        return tuple(name for name, x in self.named.items() if isinstance(x, torch.Tensor))

    def call(self, op: Callable[..., object]) -> object:
        """Run it once, with a fresh log."""
        rows = self.named["rows"]
        assert isinstance(rows, RowSlots | VerifyRows)
        return op(*self.args, **{**self.named, "rows": replace(rows, written=WriteLog())})


class Maker:
    """Random tensors of one seed, device and dtype; heads are views of wider rows, as in models."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.device = device
        self.dtype = dtype
        self.generator = torch.Generator(device).manual_seed(1)

    def random(self, *sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Standard normal, in the model dtype unless told otherwise."""
        x = torch.randn(*sizes, generator=self.generator, device=self.device)
        return x.to(self.dtype if dtype is None else dtype)

    def ints(self, values: list[int]) -> torch.Tensor:
        """int64 on the device."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def heads(self, *lead: int) -> tuple[torch.Tensor, ...]:
        """q, k, v [..., heads, size]."""
        s = self.shape
        keys = s.key_heads * s.k_dim
        q, k, v = self.random(*lead, s.channels).split((keys, keys, s.heads * s.v_dim), -1)
        size = (s.key_heads, s.k_dim)
        return (
            q.unflatten(-1, size),
            k.unflatten(-1, size),
            v.unflatten(-1, (s.heads, s.v_dim)),
        )

    def gate(self) -> Gate:
        """Decays like a trained model's: most channels remember for long."""
        s = self.shape
        bias = self.random(s.heads * (s.k_dim if s.by_channel else 1), dtype=torch.float32) - 4.0
        return Gate(self.random(s.heads, dtype=torch.float32) * 0.3, bias, s.lower_bound)

    def states(self, count: int) -> torch.Tensor:
        """A bank of recurrent states."""
        s = self.shape
        return self.random(count, s.heads, s.v_dim, s.k_dim, dtype=torch.float32) * 0.1

    def rows(self, lengths: list[int], exports: list[tuple[int, int]]) -> RowSlots:
        """Rows in place in slots 0 .., exports (row, offset) in the slots after them."""
        count = len(lengths)
        ends = [0]
        for length in lengths:
            ends.append(ends[-1] + length)
        return RowSlots(
            lengths=tuple(lengths),
            cu_seqlens=self.ints(ends),
            state_in=self.ints(list(range(count))),
            state_out=self.ints(list(range(count))),
            export_row=self.ints([r for r, _ in exports]),
            export_offset=self.ints([o for _, o in exports]),
            export_slot=self.ints([count + i for i in range(len(exports))]),
        )

    def token_bytes(self) -> int:
        """What one token brings and takes: q, k, v, o, decay, beta."""
        s = self.shape
        values = s.channels + s.heads * s.v_dim + s.heads
        values += s.heads * (s.k_dim if s.by_channel else 1)
        return values * self.dtype.itemsize


def prefill(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    lengths: list[int],
    exports: list[tuple[int, int]],
) -> Case:
    """`delta_prefill`."""
    make = Maker(shape, device, dtype)
    tokens, states = sum(lengths), len(lengths) + len(exports)
    args = (
        *make.heads(tokens),
        make.random(tokens, *shape.decay),
        make.random(tokens, shape.heads),
    )
    named = {
        "gate": make.gate(),
        "bank": make.states(states),
        "rows": make.rows(lengths, exports),
    }
    moved = (2 * len(lengths) + len(exports)) * shape.state_bytes + tokens * make.token_bytes()
    return Case("delta_prefill", _label(lengths, exports), shape, args, named, moved)


def verify_rows(make: Maker, rows: int, most: int, pending: int, exports: int) -> VerifyRows:
    """All seats live, `pending` drafts to fold, all K drafts to run."""
    return VerifyRows(
        width=most + 1,
        state_in=make.ints(list(range(rows))),
        state_out=make.ints(list(range(rows))),
        base=make.ints([64] * rows),
        pending=make.ints([pending] * rows),
        num_drafts=make.ints([most] * rows),
        parity=make.ints([r % 2 for r in range(rows)]),
        seats=make.ints(list(range(rows))),
        export_end=make.ints([65 if r < exports else -1 for r in range(rows)]),
        export_slot=make.ints([rows + r if r < exports else -1 for r in range(rows)]),
    )


def conv(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    lengths: list[int],
    exports: list[tuple[int, int]],
) -> Case:
    """`conv_prefill`."""
    make = Maker(shape, device, dtype)
    tokens, slots = sum(lengths), len(lengths) + len(exports)
    x = make.random(tokens, shape.channels + 64)[:, : shape.channels]
    named = {
        "bank": make.random(slots, shape.channels, CONV_WIDTH - 1),
        "rows": make.rows(lengths, exports),
    }
    weight = make.random(shape.channels, CONV_WIDTH, dtype=torch.float32)
    windows = (2 * len(lengths) + len(exports)) * (CONV_WIDTH - 1)
    moved = (2 * tokens + windows) * shape.channels * dtype.itemsize
    return Case("conv_prefill", _label(lengths, exports), shape, (x, weight), named, moved)


def _label(lengths: list[int], exports: list[tuple[int, int]]) -> str:
    """Rows, all their tokens, and exports if there are any."""
    more = f", exports {len(exports)}" if exports else ""
    return f"rows {len(lengths)}, tokens {sum(lengths)}{more}"


def mix_decode(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    lengths: list[int],
    exports: list[tuple[int, int]],
) -> Case:
    """`mix_decode` of rows of these lengths."""
    make = Maker(shape, device, dtype)
    args, moved = _mixed(make, sum(lengths))
    rows, slots = len(lengths), len(lengths) + len(exports)
    named = {
        "gate": make.gate(),
        "window": make.random(slots, CONV_WIDTH - 1, shape.channels).mT,
        "bank": make.states(slots),
        "rows": make.rows(lengths, exports),
    }
    moved += (2 * rows + len(exports)) * _slot_bytes(shape, dtype)
    return Case("mix_decode", _label(lengths, exports), shape, args, named, moved)


def mix_verify(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    most: int,
    pending: int,
    exports: int = 0,
) -> Case:
    """`mix_verify` of `rows` rows with K = `most`, each with `pending` drafts to fold."""
    make = Maker(shape, device, dtype)
    args, moved = _mixed(make, rows * (most + 1))
    slots = rows + exports
    named = {
        "gate": make.gate(),
        "window": make.random(slots, CONV_WIDTH - 1, shape.channels).mT,
        "bank": make.states(slots),
        "ring": make.random(rows, 2, most, shape.channels),
        "ring_decay": make.random(rows, 2, most, *shape.decay),
        "ring_beta": make.random(rows, 2, most, shape.heads),
        "rows": verify_rows(make, rows, most, pending, exports),
    }
    decays = shape.heads * (shape.k_dim if shape.by_channel else 1)
    of_ring = (shape.channels + decays + shape.heads) * dtype.itemsize
    moved += (2 * rows + exports) * _slot_bytes(shape, dtype) + rows * (pending + most) * of_ring
    label = f"rows {rows}, K {most}, folded {pending}"
    return Case("mix_verify", label, shape, args, named, moved)


def _mixed(make: Maker, tokens: int) -> tuple[tuple[torch.Tensor, ...], int]:
    """What a layer's projections give of so many tokens, its taps, and what these move."""
    shape = make.shape
    x = make.random(tokens, shape.channels + 64)[:, : shape.channels]
    taps = make.random(CONV_WIDTH, shape.channels, dtype=torch.float32).t()
    gates = make.random(tokens, *shape.decay), make.random(tokens, shape.heads)
    return (x, taps, *gates), tokens * make.token_bytes() + taps.nbytes


def _slot_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """A state and a window."""
    return shape.state_bytes + (CONV_WIDTH - 1) * shape.channels * dtype.itemsize
