"""Functions of single elements and sums over rows whose bytes depend on nothing but the row itself.

Knows that some of torch's CPU kernels treat the last elements of a range differently from the
others: `sigmoid`, `silu` and `softplus` change bits with an element's place, `exp`, `log1p`,
division and square roots do not. Everything here is built from the latter.
"""

from __future__ import annotations

import torch

SOFTPLUS_LINEAR = 20.0
"""Beyond this argument softplus is the identity, as in torch."""


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), computed in fp32 and returned in fp32."""
    return 1.0 / (1.0 + torch.exp(-x.float()))


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), computed in fp32 and returned in fp32."""
    x = x.float()
    return x / (1.0 + torch.exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), linear above `SOFTPLUS_LINEAR`; computed in fp32 and returned in fp32."""
    x = x.float()
    return torch.where(x > SOFTPLUS_LINEAR, x, torch.log1p(torch.exp(x.clamp(max=SOFTPLUS_LINEAR))))


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis, kept as an axis of one: [..., K] -> [..., 1].

    A single long row would be split between threads where several rows are not, so a lone row is
    summed as one of two.
    """
    if x.numel() == x.shape[-1]:
        flat = x.reshape(1, -1)
        return torch.cat((flat, flat)).sum(-1)[:1].reshape(*x.shape[:-1], 1)
    return x.sum(-1, keepdim=True)
