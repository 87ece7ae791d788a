"""Products with few outputs (routers, hyper-connections) whose rows depend on no other row.

A weight of some dozens or hundreds of rows leaves a GPU idle unless the inner axis is split. It is
split at fixed places and the parts are added in rising order by whoever needs the product, so a
row's bytes do not depend on how many rows there are. Both in bf16: bf16 products, fp32 sums; else
three TF32 products each.
"""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl

from millpond.ops.triton.launch import Bound, bound
from millpond.ops.triton.live import live
from millpond.ops.triton.shared import LAUNCH, cdiv, product, token_stride

SPLIT = 512
"""Elements of the inner axis that one program adds up."""

TOKENS, OUTPUTS, STEP = 64, 64, 64
"""The tile. Not measured yet."""


def narrow_parts(x: torch.Tensor, weight: torch.Tensor, *, squares: bool) -> torch.Tensor:
    """x [T, K], weight [N, K] -> fp32 [T, K / 512 rounded up, N (+ 1 if squares)].

    Summed over the middle axis: x @ weight transposed, then the sum of squares of x.
    """
    tokens, inner = x.shape
    outputs = weight.shape[0]
    splits = cdiv(inner, SPLIT)
    parts = x.new_empty((tokens, splits, outputs + squares), dtype=torch.float32)
    both = x.dtype == weight.dtype == torch.bfloat16
    if tokens:
        _bound(inner, outputs, squares, both).launch(
            (cdiv(tokens, TOKENS), cdiv(outputs, OUTPUTS), splits),
            x, weight.contiguous(), parts, tokens, token_stride(x),
        )  # fmt: skip
    return parts


@cache
def _bound(inner: int, outputs: int, squares: bool, narrow: bool) -> Bound:
    """The kernel for [T, inner] times [inner, outputs]; `narrow`: both factors are bf16."""
    return bound(
        _parts, K=inner, N=outputs, SPLITS=cdiv(inner, SPLIT), COLUMNS=outputs + squares,
        SQUARES=squares, OPERAND=tl.bfloat16 if narrow else tl.float32,
        SPLIT=SPLIT, TOKENS=TOKENS, OUTPUTS=OUTPUTS, STEP=STEP,
        num_warps=4, num_stages=3, **LAUNCH,
    )  # fmt: skip


@live
def _parts(
    x, weight, parts, count, x_stride,
    K: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
    SQUARES: tl.constexpr, OPERAND: tl.constexpr, SPLIT: tl.constexpr, TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One split of TOKENS rows by OUTPUTS outputs."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    square = tl.zeros([TOKENS], tl.float32)
    for step in range(0, SPLIT, STEP):
        k = tl.program_id(2) * SPLIT + step + tl.arange(0, STEP)
        rows = tl.load(
            x + token[:, None] * x_stride + k[None, :],
            mask=(token < count)[:, None] & (k < K)[None, :],
            other=0.0,
        )
        factors = tl.load(
            weight + n[:, None] * K + k[None, :],
            mask=(n < N)[:, None] & (k < K)[None, :],
            other=0.0,
        )
        total += product(rows, tl.trans(factors), OPERAND, "tf32x3")
        if SQUARES:
            wide = rows.to(tl.float32)
            square += tl.sum(wide * wide, 1)
    place = (token * SPLITS + tl.program_id(2)) * COLUMNS
    tl.store(
        parts + place[:, None] + n[None, :],
        total,
        mask=(token < count)[:, None] & (n < N)[None, :],
    )
    if SQUARES:
        told = tl.where(tl.program_id(1) == 0, count, 0)
        tl.store(parts + place + N, square, mask=token < told)
