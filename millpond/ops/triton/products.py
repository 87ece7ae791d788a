"""Dense matrix products on a GPU: cuBLAS, without the padding that makes rows invariant elsewhere.

Contract: `millpond.ops.reference.linear`. A row may depend on how many rows there are. Where there
is no GPU (under the interpreter) the reference serves.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from millpond.ops.reference import linear as reference


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the reference, in one call."""
    if x.device.type != "cuda":
        return reference.linear(x, weight, bias)
    return functional.linear(x, weight, bias)


def linear_by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As the reference, in one call that reads and writes the tokens where they are."""
    if x.device.type != "cuda":
        return reference.linear_by_head(x, weight)
    out = torch.empty((*x.shape[:2], weight.shape[2]), dtype=x.dtype, device=x.device)
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out
