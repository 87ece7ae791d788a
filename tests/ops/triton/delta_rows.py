"""Layers of the delta rule with random inputs, and rows of them, for tests of its kernels."""

from __future__ import annotations

import torch

from millpond.ops.batch import VerifyRows
from millpond.ops.reference.delta import Gate
from tests.ops.batches import ints, strided_bank
from tests.ops.triton.side_by_side import NAN, equal_bytes
from tests.ops.triton.tolerances import within

KINDS = ["gdn", "kda", "kda_softplus"]
PUBLISHED = ["gdn_published", "kda_published"]
"""Heads of the size of real models, whose tiles and code are not those of small ones."""

DTYPES = [torch.float32, torch.bfloat16]


class Layer:
    """Random inputs of one layer; q, k, v are views of wider rows.

    Sizes of the first two kinds are no powers of two; tiles of the others are full and unmasked.
    """

    def __init__(
        self, kind: str, tokens: int, dtype: torch.dtype, key_heads: int | None = None
    ) -> None:
        self.made = torch.Generator().manual_seed(tokens)
        self.dtype = dtype
        self.key_heads, self.heads, self.k_dim, self.v_dim = {
            "gdn": (1, 2, 16, 40),
            "kda": (2, 2, 24, 16),
            "kda_softplus": (2, 2, 32, 16),
            "gdn_published": (1, 1, 128, 128),
            "kda_published": (1, 1, 128, 128),
        }[kind]
        kind = kind.removesuffix("_published")
        if key_heads is not None:
            self.heads, self.key_heads = key_heads * self.heads // self.key_heads, key_heads
        self.decay_shape = (self.heads,) if kind == "gdn" else (self.heads, self.k_dim)
        bound = {"gdn": None, "kda": -5.0, "kda_softplus": None}[kind]
        bias = self.heads if kind == "gdn" else self.heads * self.k_dim
        self.gate = Gate(self.random(self.heads) * 0.5 - 1.0, self.random(bias), bound)
        self.qkv = self.split(self.random(tokens, self.channels).to(dtype))
        self.decay = (self.random(tokens, *self.decay_shape) * 3).to(dtype)
        self.beta = self.random(tokens, self.heads).to(dtype)

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.k_dim + self.heads * self.v_dim

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.made)

    def split(self, mixed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keys = self.key_heads * self.k_dim
        q, k, v = mixed.split((keys, keys, self.heads * self.v_dim), -1)
        size = (self.key_heads, self.k_dim)
        return (
            q.unflatten(-1, size),
            k.unflatten(-1, size),
            v.unflatten(-1, (self.heads, self.v_dim)),
        )

    def bank(self, slots: int) -> torch.Tensor:
        return strided_bank(slots, (self.heads, self.v_dim, self.k_dim))

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return (*self.qkv, self.decay, self.beta)


class Mixer(Layer):
    """A layer with a convolution before it, and what its slots and seats hold."""

    def __init__(
        self,
        kind: str,
        tokens: int,
        dtype: torch.dtype,
        key_heads: int | None = None,
        width: int = 4,
    ) -> None:
        super().__init__(kind, tokens, dtype, key_heads)
        self.weight = self.random(width, self.channels).t()
        wide = torch.full((tokens, self.channels + 16), NAN, dtype=dtype)
        wide[:, : self.channels] = self.random(tokens, self.channels).to(dtype)
        self.x = wide[:, : self.channels]

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        """What `mix_decode` and `mix_verify` take by place."""
        return self.x, self.weight, self.decay, self.beta

    def window(self, slots: int) -> torch.Tensor:
        """Channels lie together, as in the weight and as a layer keeps them."""
        return strided_bank(slots, (self.weight.shape[1] - 1, self.channels), self.dtype).mT

    def rings(self, seats: int, most: int) -> dict[str, torch.Tensor]:
        """The raw inputs of `most` drafts, two banks a seat."""
        shapes = {
            "ring": (self.channels,), "ring_decay": self.decay_shape, "ring_beta": (self.heads,),
        }  # fmt: skip
        return {n: strided_bank(seats, (2, most, *s), self.dtype) for n, s in shapes.items()}


def compare_banks(found: torch.Tensor, expected: torch.Tensor, before: torch.Tensor, op: str):
    """Slots that were written are near the reference's, all others keep their bytes."""
    for slot in range(len(found)):
        if equal_bytes(expected[slot], before[slot]):
            assert equal_bytes(found[slot], before[slot]), slot
        else:
            torch.testing.assert_close(found[slot], expected[slot], **within(op, "state"))


EXPORTS = {0: [1], 1: [0, 2], 3: [2, 1, 2, 4]}
"""By K: tokens folded at each row's export. Its base, replayed drafts, its own end, and beyond."""


def verify_case(most: int) -> VerifyRows:
    """Every number of pending drafts up to `most`, fewer new ones; the last two have no seat."""
    live = most + 1
    exports = EXPORTS[most]
    return VerifyRows(
        width=most + 1,
        state_in=ints([*[2, -1, 2, 3, 4][:live], -1, -1]),
        state_out=ints([*range(10, 10 + live), -1, -1]),
        base=ints([7 * i for i in range(live + 2)]),
        pending=ints([min(i, most) for i in range(live + 2)]),
        num_drafts=ints([max(most - i, 0) for i in range(live + 2)]),
        parity=ints([i % 2 for i in range(live + 2)]),
        seats=ints([*reversed(range(live)), -1, -1]),
        export_end=ints([*(7 * i + n for i, n in enumerate(exports)), -1, -1]),
        export_slot=ints([*range(19, 19 + live), -1, -1]),
    )
