"""Dense matrix products on a GPU, with what stands before and behind them.

Contract: `millpond.ops.reference.linear` and `.fused`. Few tokens go through one kernel that reads
the weights at the memory's speed (`thin`), some dozens through another, the rest through cuBLAS,
without the padding that makes rows invariant elsewhere: a row may depend on how many rows there
are. Where there is no GPU (under the interpreter) the reference multiplies.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from millpond.ops.reference import linear as reference
from millpond.ops.triton import layer_choices, thin
from millpond.ops.triton.elementwise import swiglu
from millpond.ops.triton.layer_choices import HEAD_TOKENS, thin_choice, wide_choice
from millpond.ops.triton.norms import add_norm, gated_rms_norm_sigmoid, gated_rms_norm_silu
from millpond.ops.triton.shared import power_of_two


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the reference, in one launch."""
    if x.device.type != "cuda":
        return reference.linear(x, weight, bias)
    if x.ndim == 2 and bias is None:
        if choice := thin_choice(x, weight):
            return thin.thin_linear(x, weight, choice)
        if wide := wide_choice(x, weight):
            return thin.wide_linear(x, weight, wide)
    return functional.linear(x, weight, bias)


def linear_float(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As the reference: one launch for some dozens of tokens, else two."""
    if choice := thin_choice(x, weight):
        return thin.thin_linear(x, weight, choice, dtype=torch.float32)
    if wide := wide_choice(x, weight, HEAD_TOKENS):
        return thin.wide_linear(x, weight, wide, dtype=torch.float32)
    return linear(x, weight).float()


def linear_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As the reference; some dozens of tokens and few outputs give several parts, in fp32."""
    if choice := wide_choice(x, weight):
        return thin.wide_parts(x, weight, choice)
    return linear(x, weight)[None]


def linear_by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As the reference, in one call that reads and writes the tokens where they are."""
    if x.device.type != "cuda":
        return reference.linear_by_head(x, weight)
    out = torch.empty((*x.shape[:2], weight.shape[2]), dtype=x.dtype, device=x.device)
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out


def norm_linear(
    x: torch.Tensor,
    y: torch.Tensor | None,
    norm: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    zero_centred: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference: one launch for few tokens, else two."""
    if choice := thin_choice(x, weight):
        return thin.thin_norm_linear(
            x, _one(y), norm, weight, choice, eps=eps, zero_centred=zero_centred
        )
    inner, total = add_norm(x, y, norm, eps=eps, zero_centred=zero_centred)
    return linear(inner, weight), total


def linear_swiglu(
    x: torch.Tensor, weight: torch.Tensor, *, limit: float | None = None
) -> torch.Tensor:
    """As the reference: one launch for few tokens, else two."""
    if choice := thin_choice(x, weight):
        return thin.thin_linear_swiglu(x, weight, choice, limit=limit)
    if wide := wide_choice(x, weight):
        return thin.wide_linear(x, weight, wide, swiglu=True, limit=limit)
    gate, up = linear(x, weight).chunk(2, -1)
    return swiglu(gate, up, limit)


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
    """As the reference: one launch for few tokens, else three."""
    if choice := thin_choice(x, weight):
        return thin.thin_norm_swiglu(
            x, _one(y), norm, weight, choice, eps=eps, zero_centred=zero_centred, limit=limit
        )
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
    """As the reference: one launch for few tokens, else two."""
    alike = x.shape[-1] == power_of_two(x.shape[-1]) and x.shape[0] <= layer_choices.GATED_TOKENS
    if alike and (choice := thin_choice(x, weight)):
        found = thin.thin_gated_norm_linear(x, gate, norm, weight, choice, eps=eps, silu=silu)
        return found[None]
    gated = gated_rms_norm_silu if silu else gated_rms_norm_sigmoid
    return linear_parts(gated(x, gate, norm, eps).flatten(1), weight)


def _one(y: torch.Tensor | None) -> torch.Tensor | None:
    """What is added to few tokens: products of few tokens come in one part."""
    if y is None or y.ndim == 2:
        return y
    return y.squeeze(0)
