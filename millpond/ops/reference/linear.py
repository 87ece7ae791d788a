"""Matrix products whose rows do not depend on how many other rows there are.

Knows one measured fact: with the row count a multiple of 16, each row of a product has the same
bytes whatever the other rows are, from 1 row to thousands, on one thread or several. All matrix
products of the reference go through this module.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import pad

ROW_MULTIPLE = 16
"""Rows of every product are padded to a multiple of this."""


def padded_rows(rows: int) -> int:
    """`rows` rounded up to the multiple that makes products row-invariant."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] @ weight [N, K] transposed, plus bias [N] -> [..., N], in the dtype of `x`."""
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    padding = padded_rows(count) - count
    if padding:
        rows = pad(rows, (0, 0, 0, padding))
    out = torch_linear(rows, weight.to(x.dtype))[:count]
    if bias is not None:
        out = out + bias.to(x.dtype)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def batched_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [..., M, K] @ b [..., K, N] -> [..., M, N]; equal leading axes, no broadcasting.

    Each matrix of the batch comes out the same whatever else is in the batch. Rows of `a` are
    invariant among themselves when M is a multiple of 16; pad where that matters.
    """
    lead = a.shape[:-2]
    product = torch.bmm(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]))
    return product.reshape(*lead, a.shape[-2], b.shape[-1])


def linear_by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H, K], weight [H, K, N] -> [T, H, N]: every head has a matrix of its own."""
    tokens = x.shape[0]
    rows = pad(x.transpose(0, 1), (0, 0, 0, padded_rows(tokens) - tokens)).contiguous()
    return batched_matmul(rows, weight)[:, :tokens].transpose(0, 1).contiguous()
