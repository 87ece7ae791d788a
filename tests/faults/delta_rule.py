"""Small random delta-rule layers and packed rows, for the faults that live in the operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from millpond.ops.batch import RowSlots
from millpond.ops.reference.delta import Gate, delta_decode, delta_prefill

HEADS, KEY_HEADS, V, K = 4, 2, 8, 16
"""V and K differ, so that a transposed state is a wrong shape or a wrong value."""

Fold = Callable[..., torch.Tensor]


def packed(
    lengths: Sequence[int],
    state_in: Sequence[int],
    state_out: Sequence[int],
    exports: Sequence[tuple[int, int, int]] = (),
) -> RowSlots:
    """Rows of `lengths` tokens; an export is (row, tokens folded, slot)."""
    row, folded, slot = zip(*exports, strict=True) if exports else ((), (), ())
    ids = torch.int64
    return RowSlots(
        lengths=tuple(lengths),
        cu_seqlens=torch.tensor([0, *lengths], dtype=ids).cumsum(0),
        state_in=torch.tensor(state_in, dtype=ids),
        state_out=torch.tensor(state_out, dtype=ids),
        export_row=torch.tensor(row, dtype=ids),
        export_offset=torch.tensor(folded, dtype=ids),
        export_slot=torch.tensor(slot, dtype=ids),
    )


@dataclass(frozen=True)
class Layer:
    """One layer's gate and the inputs of a sequence; half of the heads remember nearly all."""

    gate: Gate
    inputs: dict[str, torch.Tensor]

    def fold(
        self, form: Fold, bank: torch.Tensor, rows: RowSlots, spans: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """Fold the tokens `spans` of the sequence, one span a row -> o [T, H, V]."""
        at = torch.cat([torch.arange(begin, end) for begin, end in spans])
        given = {name: x[at] for name, x in self.inputs.items()}
        return form(**given, gate=self.gate, bank=bank, rows=rows)

    def state_after(self, tokens: int, form: Fold = delta_decode) -> torch.Tensor:
        """The state [H, V, K] after the first `tokens` of the sequence, from the zero state."""
        bank = torch.full((1, HEADS, V, K), float("nan"))
        self.fold(form, bank, packed([tokens], [-1], [0]), [(0, tokens)])
        return bank[0]


def layer(tokens: int, *, by_channel: bool, seed: int = 0) -> Layer:
    """A sequence of `tokens` random inputs; decay by head, or by key channel."""
    g = torch.Generator().manual_seed(seed)
    width = (HEADS, K) if by_channel else (HEADS,)
    # log decay about -1e-3 for the first half of the heads, about -1 for the others
    bias = torch.tensor([-6.9, -6.9, 0.5, 0.5])
    bias = bias.repeat_interleave(K) if by_channel else bias
    gate = Gate(a_log=torch.zeros(HEADS), dt_bias=bias, lower_bound=-2.0 if by_channel else None)
    return Layer(
        gate=gate,
        inputs={
            "q": torch.randn(tokens, KEY_HEADS, K, generator=g),
            "k": torch.randn(tokens, KEY_HEADS, K, generator=g),
            "v": torch.randn(tokens, HEADS, V, generator=g),
            "decay": 0.1 * torch.randn(tokens, *width, generator=g),
            "beta": torch.randn(tokens, HEADS, generator=g),
        },
    )


FORMS: tuple[Fold, Fold] = (delta_prefill, delta_decode)
