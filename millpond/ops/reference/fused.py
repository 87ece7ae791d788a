"""Steps on each token that a backend may do as one: the composition of other ops, in order.

Knows no arithmetic of its own. Where there is a `y`, the residual stream is x + y: a layer hands
on what it adds, and whoever needs the sum adds it.
"""

from __future__ import annotations

import torch

from millpond.ops.reference import dense
from millpond.ops.reference.linear import linear


def linear_float(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] @ weight [N, K] transposed, rounded to the dtype of `x`, as fp32 [T, N]."""
    return linear(x, weight).float()


def add_norm(
    x: torch.Tensor,
    y: torch.Tensor | None,
    norm: torch.Tensor,
    *,
    eps: float,
    zero_centred: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, y [T, H], norm [H] -> the sum normalised, and the sum (x itself without a y)."""
    total = x if y is None else x + y
    normed = dense.zero_centred_rms_norm if zero_centred else dense.rms_norm
    return normed(total, norm, eps), total


def norm_linear(
    x: torch.Tensor,
    y: torch.Tensor | None,
    norm: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    zero_centred: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_norm`, then the product with weight [N, H] -> [T, N], and the sum."""
    inner, total = add_norm(x, y, norm, eps=eps, zero_centred=zero_centred)
    return linear(inner, weight), total


def linear_swiglu(
    x: torch.Tensor, weight: torch.Tensor, *, limit: float | None = None
) -> torch.Tensor:
    """x [T, H], weight [2 I, H] (gate rows first): the product, then `swiglu` -> [T, I]."""
    gate, up = linear(x, weight).chunk(2, -1)
    return dense.swiglu(gate, up, limit)


def norm_swiglu(
    x: torch.Tensor,
    y: torch.Tensor | None,
    norm: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    zero_centred: bool,
    limit: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_norm`, then `linear_swiglu` -> [T, I], and the sum."""
    inner, total = add_norm(x, y, norm, eps=eps, zero_centred=zero_centred)
    return linear_swiglu(inner, weight, limit=limit), total


def gated_norm_linear(
    x: torch.Tensor,
    gate: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    silu: bool,
) -> torch.Tensor:
    """x, gate [T, H, V]: the gated norm of GDN (`silu`) or KDA, then weight [N, H V] -> [T, N]."""
    gated = dense.gated_rms_norm_silu if silu else dense.gated_rms_norm_sigmoid
    return linear(gated(x, gate, norm, eps).flatten(1), weight)
