"""Matrix products in blocks of one size: a row's bytes depend on no other row, on any device.

A library chooses how to multiply by how many rows there are. Given the same number every time it
chooses the same way, at the price of speed; so a test can ask of all other ops that not a byte
depends on neighbours.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, pad

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


def steady_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As the reference: a [..., M, K] @ b [..., K, N], one matrix of the batch at a time."""
    lead = a.shape[:-2]
    pairs = zip(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]), strict=True)
    parts = [_by_blocks(rows, lambda block, by=by: block @ by) for rows, by in pairs]
    return torch.stack(parts).reshape(*lead, a.shape[-2], b.shape[-1])


def _by_blocks(rows: torch.Tensor, times) -> torch.Tensor:  # type: ignore[no-untyped-def]
    count = rows.shape[0]
    padded = pad(rows, (0, 0, 0, -count % BLOCK))
    parts = [times(padded[first : first + BLOCK]) for first in range(0, padded.shape[0], BLOCK)]
    return torch.cat(parts)[:count] if parts else times(padded)
