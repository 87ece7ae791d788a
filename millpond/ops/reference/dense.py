"""Operations on each token by itself: embedding, norms, activations and rotary positions.

Knows in which order each family rounds; holds no state. Norms work in fp32 inside.
"""

from __future__ import annotations

import torch

from millpond.ops.reference.elementwise import row_sum, sigmoid, silu


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """token_ids [T] int64, weight [V, H] -> [T, H]."""
    return weight.index_select(0, token_ids)


def normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean of squares + eps) over the last axis, in fp32 and left in fp32."""
    x = x.float()
    return x * torch.rsqrt(row_sum(x * x) / x.shape[-1] + eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H], weight [H]: normalise in fp32, round to the dtype of `x`, then multiply."""
    return normalised(x, eps).to(x.dtype) * weight.to(x.dtype)


def zero_centred_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] times (1 + weight [H]), all in fp32 with one rounding at the end."""
    return (normalised(x, eps) * (1.0 + weight.float())).to(x.dtype)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """x [..., H] centred, scaled to unit variance, times weight [H], plus bias [H]; fp32 inside."""
    centred = x.float()
    centred = centred - row_sum(centred) / x.shape[-1]
    return (normalised(centred, eps) * weight.float() + bias.float()).to(x.dtype)


def gated_rms_norm_silu(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """The gated norm of GDN: x, gate [..., V], weight [V].

    Normalise in fp32, round to the dtype of `x`, times weight (fp32 when the weight is), times
    silu(gate) in fp32, round.
    """
    return ((weight * normalised(x, eps).to(x.dtype)).float() * silu(gate)).to(x.dtype)


def gated_rms_norm_sigmoid(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """The gated norm of KDA: x, gate [..., V], weight [V]; all in fp32, one rounding at the end."""
    return (normalised(x, eps) * weight.float() * sigmoid(gate)).to(x.dtype)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate), the sigmoid rounded to the dtype of `x` first."""
    return x * sigmoid(gate).to(x.dtype)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """silu(gate) * up; with `limit`, gate is first clamped from above and up from both sides."""
    if limit is not None:
        gate = gate.clamp(max=limit)
        up = up.clamp(min=-limit, max=limit)
    return silu(gate).to(up.dtype) * up


def rope_tables(
    positions: torch.Tensor, rotary_dim: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [T] -> cos, sin [T, dim / 2] fp32; angle i is position * theta^(-2i / dim)."""
    angles = positions.float()[:, None] * rope_speeds(rotary_dim, theta, positions.device)
    return angles.cos(), angles.sin()


def rope_speeds(rotary_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """The angles of position 1: [dim / 2] fp32."""
    steps = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device)
    return 1.0 / theta ** (steps / rotary_dim)


def rotate_partial(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2n of the last axis of x [T, H, D] by cos, sin [T, n]; the rest passes.

    Pairs are (i, i + n). The tables are rounded to the dtype of `x` before use.
    """
    n = cos.shape[-1]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    first, second, rest = x.split((n, n, x.shape[-1] - 2 * n), -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
