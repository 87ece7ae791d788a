"""Matrix products other than the engine's own, by kind, for models under test.

`steady`: in blocks of one size. A library chooses how to multiply by how many rows there are; given
the same number every time it chooses the same way, at the price of speed. So a row's bytes depend
on no other row on any device, and the same can be asked of all other ops. `halved`: summed in
another order, as another library would; numbers differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import linear

from millpond.ops.bind import Bound
from millpond.ops.reference import linear as reference

BLOCK = 64


def steady_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As the reference: x [..., K] @ weight [N, K] transposed, plus bias [N]."""
    rows = x.reshape(-1, x.shape[-1])
    weight = weight.to(x.dtype)
    out = _by_blocks(rows, lambda block: linear(block, weight))
    if bias is not None:
        out = out + bias.to(x.dtype)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def steady_linear_by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As the reference: x [T, H, K], weight [H, K, N] -> [T, H, N]."""
    return _by_blocks(x, lambda block: torch.bmm(block.transpose(0, 1), weight).transpose(0, 1))


def _by_blocks(rows: torch.Tensor, times: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`rows` [T, ...] by the block, the last one padded."""
    count = rows.shape[0]
    parts = []
    for first in range(0, count, BLOCK):
        block = rows.new_zeros(BLOCK, *rows.shape[1:])
        some = rows[first : first + BLOCK]
        block[: len(some)] = some
        parts.append(times(block))
    return torch.cat(parts)[:count] if parts else times(rows)


def halved_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As the reference, the second half of the sum first; added in fp32, rounded once."""
    half = x.shape[-1] // 2
    out = sum(
        reference.linear(x[..., part].float(), weight[:, part].float())
        for part in (slice(half, None), slice(half))
    ).to(x.dtype)
    return out if bias is None else out + bias.to(x.dtype)


PRODUCTS: dict[str, dict[str, Callable[..., torch.Tensor]]] = {
    "own": {},
    "steady": {"linear": steady_linear, "linear_by_head": steady_linear_by_head},
    "halved": {"linear": halved_linear},
}
"""By kind: the ops it replaces."""


def with_products(ops: Bound, kind: str) -> Bound:
    """The same ops with products of a kind, also where a product is a part of an op."""
    replaced = PRODUCTS[kind]
    if not replaced:
        return ops
    multiply = replaced["linear"]

    def norm_linear(
        x: torch.Tensor,
        y: torch.Tensor | None,
        norm: torch.Tensor,
        weight: torch.Tensor,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inner, total = ops.add_norm(x, y, norm, **named)
        return multiply(inner, weight), total

    def linear_swiglu(
        x: torch.Tensor, weight: torch.Tensor, *, limit: float | None = None
    ) -> torch.Tensor:
        return ops.swiglu(*multiply(x, weight).chunk(2, -1), limit)

    def norm_swiglu(
        x: torch.Tensor,
        y: torch.Tensor | None,
        norm: torch.Tensor,
        weight: torch.Tensor,
        *,
        limit: float | None = None,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inner, total = ops.add_norm(x, y, norm, **named)
        return linear_swiglu(inner, weight, limit=limit), total

    def gated_norm_linear(
        x: torch.Tensor, gate: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, **named: Any
    ) -> torch.Tensor:
        # A product with the identity changes nothing: every sum has one term.
        same = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        return multiply(ops.gated_norm_linear(x, gate, norm, same, **named), weight)

    return replace(
        ops,
        **replaced,
        linear_float=lambda x, weight: multiply(x, weight).float(),
        norm_linear=norm_linear,
        linear_swiglu=linear_swiglu,
        norm_swiglu=norm_swiglu,
        gated_norm_linear=gated_norm_linear,
    )
