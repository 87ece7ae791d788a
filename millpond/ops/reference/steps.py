"""Convolution and delta rule of rows that are taken token by token, as one op each.

The composition of `conv_decode` and `delta_decode`, `conv_verify` and `delta_verify`: what a layer
calls, so that a backend may keep what lies between them in whatever form it likes.
"""

from __future__ import annotations

import torch

from millpond.ops.batch import RowSlots, VerifyRows
from millpond.ops.reference.conv import conv_decode
from millpond.ops.reference.delta import Gate, delta_decode
from millpond.ops.reference.verify import conv_verify, delta_verify


def mix_decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    gate: Gate,
    window: torch.Tensor,
    bank: torch.Tensor,
    rows: RowSlots,
) -> torch.Tensor:
    """x [T, C], q, k, then v of every token before the convolution; weight [C, W]; decay, raw,
    [T, H] or [T, H, K]; beta, raw, [T, H]; window [S, C, W - 1]; bank [S, H, V, K] fp32 -> o [T, H,
    V] in the dtype of `x`. Key heads Hk follow from C = 2 Hk K + H V.
    """
    mixed = conv_decode(x, weight, bank=window, rows=rows)
    return delta_decode(*by_head(mixed, bank), decay, beta, gate=gate, bank=bank, rows=rows)


def mix_verify(
    x: torch.Tensor,
    weight: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    gate: Gate,
    window: torch.Tensor,
    bank: torch.Tensor,
    ring: torch.Tensor,
    ring_decay: torch.Tensor,
    ring_beta: torch.Tensor,
    rows: VerifyRows,
) -> torch.Tensor:
    """As `mix_decode` for verify rows, T = B * (K + 1) places; rings as `conv_verify` and
    `delta_verify` have them. o is zero where there is no token.
    """
    old, mixed = conv_verify(x, weight, bank=window, ring=ring, rows=rows)
    return delta_verify(
        *by_head(mixed, bank),
        decay,
        beta,
        pending=by_head(old, bank),
        gate=gate,
        bank=bank,
        ring_decay=ring_decay,
        ring_beta=ring_beta,
        rows=rows,
    )


def key_heads(channels: int, bank: torch.Tensor) -> int:
    """Hk of a layer with so many channels and the states [S, H, V, K] of its value heads."""
    heads, v_dim, k_dim = bank.shape[1:]
    return (channels - heads * v_dim) // (2 * k_dim)


def by_head(
    mixed: torch.Tensor, bank: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the convolution gives, [..., C], as views q, k [..., Hk, K] and v [..., H, V]."""
    heads, v_dim, k_dim = bank.shape[1:]
    keys = key_heads(mixed.shape[-1], bank)
    q, k, v = mixed.split((keys * k_dim, keys * k_dim, heads * v_dim), -1)
    size = (keys, k_dim)
    return q.unflatten(-1, size), k.unflatten(-1, size), v.unflatten(-1, (heads, v_dim))
