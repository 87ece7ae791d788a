"""The short causal depthwise convolution before the delta rule, from slot to slot.

Per channel c: y[t] = silu(sum over j of w[c, j] * in[t - (W - 1) + j]), so the last tap multiplies
the current token. The state is the last W - 1 raw inputs, oldest first. Taps are added in rising
order, one elementwise operation each: chunk form and per-token form are the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from millpond.ops.batch import RowSlots
from millpond.ops.reference.elementwise import silu
from millpond.ops.reference.slots import read_slots, write_slots, write_targets


def conv_prefill(
    x: torch.Tensor, weight: torch.Tensor, *, bank: torch.Tensor, rows: RowSlots
) -> torch.Tensor:
    """x [T, C], weight [C, W], bank [S, C, W - 1] -> y [T, C] in the dtype of `x`; fp32 inside.

    The window comes from `state_in`; the last W - 1 inputs go to `state_out` and, as of their
    offsets, to every export. A row shorter than the window keeps the rest of the old one.
    """
    history = weight.shape[1] - 1
    window = read_slots(bank, rows.state_in).transpose(1, 2).to(x.dtype)  # [N, W - 1, C]
    row, folded, slot = write_targets(rows)

    # Each row's window goes right before its tokens: row r begins at cu_seqlens[r] + r * (W - 1).
    token_row = torch.repeat_interleave(
        torch.arange(rows.num_rows, device=x.device), rows.cu_seqlens[1:] - rows.cu_seqlens[:-1]
    )
    begin = rows.cu_seqlens[:-1] + history * torch.arange(rows.num_rows, device=x.device)
    place = torch.arange(x.shape[0], device=x.device) + history * token_row
    steps = torch.arange(history, device=x.device)
    packed = x.new_empty((x.shape[0] + history * rows.num_rows, x.shape[1]))
    packed[begin[:, None] + steps] = window
    packed[place + history] = x

    y = convolve((packed[place + tap] for tap in range(history + 1)), weight)
    windows = packed[(begin[row] + folded)[:, None] + steps]  # [N + E, W - 1, C]
    write_slots(bank, slot, windows.transpose(1, 2))
    rows.written.record(slot, folded)
    return y.to(x.dtype)


def conv_decode(
    x: torch.Tensor, weight: torch.Tensor, *, bank: torch.Tensor, rows: RowSlots
) -> torch.Tensor:
    """As `conv_prefill`, for rows in per-token form: they may start off the grid."""
    return conv_prefill(x, weight, bank=bank, rows=rows)


def convolve(inputs: Iterable[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    """inputs [..., C], one for each tap, oldest first; weight [C, W] -> y [..., C] fp32."""
    taps = (weight[:, j].float() * x.float() for j, x in enumerate(inputs))
    total = next(taps)
    for tap in taps:
        total = total + tap
    return silu(total)
