"""Products of one token with large weights, bound by the reading of the weights; and of logits.

Contract: `millpond.ops.reference.fused`; the sum and the norm that stand before a product, and an
activation behind it, happen in the same launch. A program owns some outputs and walks the inner
axis once. A norm scales the finished sums, so what is rounded before the product is x * weight
instead of x / rms * weight: one rounding of the same relative size.
"""

from __future__ import annotations

import torch
import triton.language as tl

from millpond.ops.triton.elementwise import bounded_swiglu
from millpond.ops.triton.layer_choices import ThinChoice, WideChoice
from millpond.ops.triton.live import live
from millpond.ops.triton.overlap import await_previous, let_next_begin, overlap
from millpond.ops.triton.shared import LAUNCH, cdiv, power_of_two, product, rounded, token_stride

PLAIN = tl.constexpr(0)
NORM = tl.constexpr(1)
ZERO_CENTRED = tl.constexpr(2)


def thin_linear(
    x: torch.Tensor, weight: torch.Tensor, choice: ThinChoice, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [1, K] @ weight [N, K] transposed -> [1, N], rounded to the dtype of `x`, in `dtype`."""
    return _launch(PLAIN, x, None, None, weight, choice, dtype=dtype)[0]


def thin_linear_swiglu(
    x: torch.Tensor, weight: torch.Tensor, choice: ThinChoice, *, limit: float | None
) -> torch.Tensor:
    """As the reference's `linear_swiglu`, of one token."""
    return _launch(PLAIN, x, None, None, weight, choice, swiglu=True, limit=limit)[0]


def thin_norm_linear(
    x: torch.Tensor,
    y: torch.Tensor | None,
    norm: torch.Tensor,
    weight: torch.Tensor,
    choice: ThinChoice,
    *,
    eps: float,
    zero_centred: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference's `norm_linear`, of one token."""
    kind = ZERO_CENTRED if zero_centred else NORM
    return _launch(kind, x, y, norm, weight, choice, eps=eps)


def thin_norm_swiglu(
    x: torch.Tensor,
    y: torch.Tensor | None,
    norm: torch.Tensor,
    weight: torch.Tensor,
    choice: ThinChoice,
    *,
    eps: float,
    zero_centred: bool,
    limit: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference's `norm_swiglu`, of one token."""
    kind = ZERO_CENTRED if zero_centred else NORM
    return _launch(kind, x, y, norm, weight, choice, eps=eps, swiglu=True, limit=limit)


def wide_linear(
    x: torch.Tensor, weight: torch.Tensor, choice: WideChoice, *, dtype: torch.dtype
) -> torch.Tensor:
    """x [T, K] @ weight [N, K] transposed -> [T, N], rounded to the dtype of `x`, in `dtype`."""
    tokens, inner = x.shape
    outputs = weight.shape[0]
    out = torch.empty((tokens, outputs), dtype=dtype, device=x.device)
    if tokens:
        _wide[(cdiv(outputs, choice.outputs),)](
            x, weight, out, tokens, token_stride(x),
            K=inner, N=outputs, TOKENS=max(16, power_of_two(tokens)), BN=choice.outputs,
            BK=choice.step, num_warps=choice.warps, num_stages=choice.stages, **LAUNCH,
        )  # fmt: skip
    return out


def _launch(
    kind: tl.constexpr,
    x: torch.Tensor,
    y: torch.Tensor | None,
    norm: torch.Tensor | None,
    weight: torch.Tensor,
    choice: ThinChoice,
    *,
    eps: float = 0.0,
    swiglu: bool = False,
    limit: float | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product, and x + y where there is a y."""
    if x.shape[0] != 1:
        raise ValueError(f"{x.shape[0]} tokens: one is needed")
    inner = x.shape[1]
    outputs = weight.shape[0] // 2 if swiglu else weight.shape[0]
    out = torch.empty((1, outputs), dtype=dtype or x.dtype, device=x.device)
    total = x if y is None else torch.empty((1, inner), dtype=x.dtype, device=x.device)
    _thin[(cdiv(outputs, choice.outputs),)](
        x, x if y is None else y, x if norm is None else norm, weight, out, total, eps,
        K=inner, N=outputs, BN=choice.outputs, BK=choice.step, KIND=kind, ADDING=y is not None,
        SWIGLU=swiglu, LIMIT=limit, STAGES=choice.stages,
        num_warps=choice.warps, **LAUNCH, **overlap(x.device),
    )  # fmt: skip
    return out, total


@live
def _thin(
    x, y, norm, weight, out, total, eps,
    K: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr,
    ADDING: tl.constexpr, SWIGLU: tl.constexpr, LIMIT: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """BN outputs. An accumulator for each place of a step: lanes add up among themselves once, at
    the end."""
    KEPT: tl.constexpr = x.dtype.element_ty
    if OVERLAP:
        let_next_begin()
        await_previous()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = weight + n.to(tl.int64)[:, None] * K
    acc = tl.zeros([BN, BK], tl.float32)
    other = tl.zeros([BN, BK], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    for begin in tl.range(0, K, BK, num_stages=STAGES):
        k = begin + tl.arange(0, BK)
        value = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        if ADDING:
            added = tl.load(y + k, mask=k < K, other=0.0).to(tl.float32)
            kept = rounded(value + added, KEPT)
            own = (begin // BK) % tl.num_programs(0)
            tl.store(total + k, kept, mask=k < tl.where(tl.program_id(0) == own, K, 0))
            value = kept.to(tl.float32)
        if KIND != PLAIN:
            squares += value * value
            factor = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
            if KIND == ZERO_CENTRED:
                factor = 1.0 + factor
            value = rounded(value * factor, KEPT).to(tl.float32)
        if N % BN == 0 and K % BK == 0:
            w = tl.load(rows + k[None, :])
        else:
            w = tl.load(rows + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        acc += w.to(tl.float32) * value[None, :]
        if SWIGLU:
            up = rows + N * K + k[None, :]
            if N % BN == 0 and K % BK == 0:
                u = tl.load(up)
            else:
                u = tl.load(up, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
            other += u.to(tl.float32) * value[None, :]
    unit = 1.0
    if KIND != PLAIN:
        unit = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    found = rounded(tl.sum(acc, 1) * unit, KEPT)
    if SWIGLU:
        passing = rounded(tl.sum(other, 1) * unit, KEPT).to(tl.float32)
        found = bounded_swiglu(found.to(tl.float32), passing, LIMIT, KEPT)
    tl.store(out + n, found.to(out.dtype.element_ty), mask=n < N)


@live
def _wide(
    x, weight, out, count, x_stride,
    K: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BN outputs of all tokens."""
    KEPT: tl.constexpr = x.dtype.element_ty
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    token = tl.arange(0, TOKENS)
    lines = x + token.to(tl.int64)[:, None] * x_stride
    acc = tl.zeros([BN, TOKENS], tl.float32)
    for begin in range(0, K, BK):
        k = begin + tl.arange(0, BK)
        here = (token < count)[:, None] & (k < K)[None, :]
        value = tl.load(lines + k[None, :], mask=here, other=0.0)
        if K % BK == 0:
            w = tl.load(rows + k[None, :])
        else:
            w = tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0.0)
        acc += product(w, tl.trans(value), KEPT, "tf32x3")
    place = token.to(tl.int64)[None, :] * N + n[:, None]
    found = rounded(acc, KEPT).to(out.dtype.element_ty)
    tl.store(out + place, found, mask=(n < N)[:, None] & (token < count)[None, :])
