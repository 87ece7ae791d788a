"""Dense matrix products on a GPU, with what stands before and behind them.

Contract: `millpond.ops.reference.linear` and `.fused`. One token goes through a kernel that reads
the weights at the memory's speed (`thin`), others through cuBLAS, without the padding that makes
rows invariant elsewhere: a row may depend on how many rows there are. Where there is no GPU (under
the interpreter) the reference multiplies.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from millpond.ops.reference import linear as reference
from millpond.ops.triton import thin
from millpond.ops.triton.elementwise import swiglu
from millpond.ops.triton.layer_choices import head_choice, thin_choice
from millpond.ops.triton.norms import add_norm, gated_rms_norm_sigmoid, gated_rms_norm_silu


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the reference, in one call."""
    if x.device.type != "cuda":
        return reference.linear(x, weight, bias)
    if x.ndim == 2 and bias is None and (choice := thin_choice(x, weight)):
        return thin.thin_linear(x, weight, choice)
    return functional.linear(x, weight, bias)


def linear_float(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As the reference: one launch for some dozens of tokens, else two."""
    if choice := thin_choice(x, weight):
        return thin.thin_linear(x, weight, choice, dtype=torch.float32)
    if wide := head_choice(x):
        return thin.wide_linear(x, weight, wide, dtype=torch.float32)
    return linear(x, weight).float()


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
    """As the reference: one launch for one token, else two."""
    if choice := thin_choice(x, weight):
        return thin.thin_norm_linear(x, y, norm, weight, choice, eps=eps, zero_centred=zero_centred)
    inner, total = add_norm(x, y, norm, eps=eps, zero_centred=zero_centred)
    return linear(inner, weight), total


def linear_swiglu(
    x: torch.Tensor, weight: torch.Tensor, *, limit: float | None = None
) -> torch.Tensor:
    """As the reference: one launch for one token, else two."""
    if choice := thin_choice(x, weight, pairs=True):
        return thin.thin_linear_swiglu(x, weight, choice, limit=limit)
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
    """As the reference: one launch for one token, else three."""
    if choice := thin_choice(x, weight, pairs=True):
        return thin.thin_norm_swiglu(
            x, y, norm, weight, choice, eps=eps, zero_centred=zero_centred, limit=limit
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
    """As the reference, in two launches."""
    gated = gated_rms_norm_silu if silu else gated_rms_norm_sigmoid
    return linear(gated(x, gate, norm, eps).flatten(1), weight)
