"""Parts both training models are made of: maps, norms, attention over packed rows, the output.

Knows tensors; knows no family.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def parameter(*size: int, std: float = 0.02) -> nn.Parameter:
    """A normally distributed parameter."""
    return nn.Parameter(torch.randn(*size) * std)


class Linear(nn.Module):
    """A bias-free map; products in `Linear.dtype`, results in float32."""

    dtype = torch.float32

    def __init__(self, inputs: int, outputs: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs, std=scale * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(Linear.dtype), self.weight.to(Linear.dtype)).float()


def joint(x: Tensor, *maps: Linear) -> tuple[Tensor, ...]:
    """Several maps of one input as one product."""
    weight = torch.cat([m.weight for m in maps]).to(Linear.dtype)
    return F.linear(x.to(Linear.dtype), weight).float().split([len(m.weight) for m in maps], -1)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight, or with one plus it where the weight is zero-centred."""

    def __init__(self, width: int, eps: float, zero_centred: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if zero_centred else torch.ones(width))
        self.shift = 1.0 if zero_centred else 0.0
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight + self.shift) * scaled


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention in rows; q, k, v: [N, H, D], mask: [B, T, T]."""
    rows = [
        x.to(Linear.dtype).view(*mask.shape[:2], *x.shape[1:]).transpose(1, 2) for x in (q, k, v)
    ]
    out = F.scaled_dot_product_attention(*rows, attn_mask=mask[:, None])
    return out.transpose(1, 2).flatten(0, 1).float()


@dataclass(slots=True)
class Output:
    """`hidden` [N, D] after the final norm; `drafts[j]` [N, D] whose row p speaks of token p+2+j.

    `index_loss` is the indexers' mean divergence; `loads` one expert share per MoE, in order.
    """

    hidden: Tensor
    drafts: list[Tensor]
    index_loss: Tensor
    loads: list[Tensor]


@dataclass(frozen=True, slots=True)
class Names:
    """How a training model's parameters are called, cut and stored in the published layout.

    `split(shape, name, value)` gives the published parts of one parameter, in order; `join(name,
    parts)` undoes it; tensors whose names end with one of `exact` are kept in float32.
    """

    split: Callable[[Any, str, Tensor], dict[str, Tensor]]
    join: Callable[[str, list[Tensor]], Tensor]
    exact: tuple[str, ...]
