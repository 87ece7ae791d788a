"""Products of few tokens with large weights, bound by the reading of the weights.

Contract: `millpond.ops.reference.fused`; what stands before a product (a sum, a norm, a gate) and
behind it (an activation) happens in the same launch. A program owns some outputs for all tokens and
walks the inner axis once, so that no sum is split and a token's bytes depend on no other token.

Roundings: a norm over the whole inner axis scales the finished sums, so what is rounded before the
product is x * weight instead of x / rms * weight; each is one rounding of the same relative size.
A gated norm by heads rounds as the reference does. Programs may be launched before the kernel
they follow has ended (programmatic dependent launch): what they read before that are weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millpond.ops.triton.elementwise import bounded_swiglu
from millpond.ops.triton.layer_choices import ThinChoice, WideChoice
from millpond.ops.triton.live import live
from millpond.ops.triton.overlap import await_previous, let_next_begin, overlap, prefetch
from millpond.ops.triton.shared import (
    LAUNCH,
    power_of_two,
    product,
    rounded,
    sigmoid,
    silu,
    token_stride,
)

PLAIN = tl.constexpr(0)
NORM = tl.constexpr(1)
ZERO_CENTRED = tl.constexpr(2)
GATED_SILU = tl.constexpr(3)
GATED_SIGMOID = tl.constexpr(4)


def thin_linear(
    x: torch.Tensor, weight: torch.Tensor, choice: ThinChoice, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [T, K] @ weight [N, K] transposed -> [T, N], rounded to the dtype of `x`, in `dtype`."""
    return _launch(PLAIN, x, None, None, None, weight, choice, dtype=dtype)[0]


def thin_linear_swiglu(
    x: torch.Tensor, weight: torch.Tensor, choice: ThinChoice, *, limit: float | None
) -> torch.Tensor:
    """As the reference's `linear_swiglu`."""
    return _launch(PLAIN, x, None, None, None, weight, choice, swiglu=True, limit=limit)[0]


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
    """As the reference's `norm_linear`."""
    kind = ZERO_CENTRED if zero_centred else NORM
    return _launch(kind, x, y, norm, None, weight, choice, eps=eps)


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
    """As the reference's `norm_swiglu`."""
    kind = ZERO_CENTRED if zero_centred else NORM
    return _launch(kind, x, y, norm, None, weight, choice, eps=eps, swiglu=True, limit=limit)


def thin_gated_norm_linear(
    x: torch.Tensor,
    gate: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    choice: ThinChoice,
    *,
    eps: float,
    silu: bool,
) -> torch.Tensor:
    """As the reference's `gated_norm_linear`."""
    kind = GATED_SILU if silu else GATED_SIGMOID
    return _launch(kind, x.flatten(1), None, norm, gate, weight, choice, eps=eps, head=x.shape[-1])[
        0
    ]


def wide_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    choice: WideChoice,
    *,
    swiglu: bool = False,
    limit: float | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [T, K] @ weight [N, K] transposed -> [T, N], or `swiglu` of its halves [T, N / 2].

    Rounded to the dtype of `x`, in `dtype`.
    """
    outputs = weight.shape[0] // 2 if swiglu else weight.shape[0]
    out = torch.empty((x.shape[0], outputs), dtype=dtype or x.dtype, device=x.device)
    _launch_wide(x, weight, out, 1, choice, swiglu, limit)
    return out


def wide_parts(x: torch.Tensor, weight: torch.Tensor, choice: WideChoice) -> torch.Tensor:
    """As the reference's `linear_parts`: the inner axis in as many as keep a GPU busy."""
    steps, splits = triton.cdiv(x.shape[1], choice.step), 1
    tiles = triton.cdiv(weight.shape[0], choice.outputs)
    while tiles * splits < choice.programs and steps % (2 * splits) == 0:
        splits *= 2
    dtype = x.dtype if splits == 1 else torch.float32
    out = torch.empty((splits, x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
    _launch_wide(x, weight, out, splits, choice, False, None)
    return out


def _launch_wide(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    splits: int,
    choice: WideChoice,
    swiglu: bool,
    limit: float | None,
) -> None:
    tokens, inner = x.shape
    outputs = out.shape[-1]
    ahead = choice.ahead_bytes // (weight.shape[0] * choice.step * splits * weight.itemsize)
    if tokens:
        _wide[(triton.cdiv(outputs, choice.outputs), splits)](
            x, weight, out, tokens, token_stride(x),
            K=inner, N=outputs, TOKENS=max(16, power_of_two(tokens)), BN=choice.outputs,
            BK=choice.step, SPLITS=splits, SWIGLU=swiglu, LIMIT=limit,
            AHEAD=min(ahead, triton.cdiv(inner, choice.step * splits)),
            num_warps=choice.warps, num_stages=choice.stages, **LAUNCH, **overlap(x.device),
        )  # fmt: skip


def _launch(
    kind: tl.constexpr,
    x: torch.Tensor,
    y: torch.Tensor | None,
    norm: torch.Tensor | None,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    choice: ThinChoice,
    *,
    eps: float = 0.0,
    head: int = 1,
    swiglu: bool = False,
    limit: float | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product, and x + y where there is a y."""
    tokens, inner = x.shape
    outputs = weight.shape[0] // 2 if swiglu else weight.shape[0]
    out = torch.empty((tokens, outputs), dtype=dtype or x.dtype, device=x.device)
    total = x if y is None else torch.empty((tokens, inner), dtype=x.dtype, device=x.device)
    step = max(choice.step, head)
    ahead = choice.ahead_bytes // (weight.shape[0] * step * weight.itemsize)
    ahead = min(ahead, triton.cdiv(inner, step))
    if tokens:
        _few[(triton.cdiv(outputs, choice.outputs),)](
            x, x if y is None else y, x if norm is None else norm, x if gate is None else gate,
            weight, out, total, tokens, token_stride(x),
            token_stride(x if y is None else y), token_stride(x if gate is None else gate), eps,
            K=inner, N=outputs, TOKENS=power_of_two(tokens), BN=choice.outputs,
            BK=step, HEAD=head, KIND=kind, ADDING=y is not None,
            SWIGLU=swiglu, LIMIT=limit, STAGES=choice.stages, AHEAD=ahead,
            num_warps=choice.warps, **LAUNCH, **overlap(x.device),
        )  # fmt: skip
    return out, total


@triton.jit
def _input(
    x, y, norm, gate, total, token, begin, own, count, x_stride, y_stride, gate_stride, eps,
    K: tl.constexpr, BK: tl.constexpr, HEAD: tl.constexpr, KIND: tl.constexpr,
    ADDING: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """BK elements of one token as the product takes them, rounded, in fp32; and their squares.

    `own`: whether it is this program that stores their sums.
    """
    k = begin + tl.arange(0, BK)
    here = k < tl.where(count > token, K, 0)
    squares = tl.zeros([BK], tl.float32)
    value = tl.load(x + token * x_stride + k, mask=here, other=0.0).to(tl.float32)
    if ADDING:
        added = tl.load(y + token * y_stride + k, mask=here, other=0.0).to(tl.float32)
        kept = rounded(value + added, KEPT)
        tl.store(total + token * K + k, kept, mask=k < tl.where((count > token) & own, K, 0))
        value = kept.to(tl.float32)
    if (KIND == NORM) | (KIND == ZERO_CENTRED):
        squares = value * value
        factor = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
        if KIND == ZERO_CENTRED:
            factor = 1.0 + factor
        value = rounded(value * factor, KEPT).to(tl.float32)
    if (KIND == GATED_SILU) | (KIND == GATED_SIGMOID):
        heads = tl.reshape(value, [BK // HEAD, HEAD])
        heads = heads * tl.rsqrt(tl.sum(heads * heads, 1) / HEAD + eps)[:, None]
        factor = tl.load(norm + tl.arange(0, HEAD))[None, :]
        passing = tl.load(gate + token * gate_stride + k, mask=here, other=0.0).to(tl.float32)
        passing = tl.reshape(passing, [BK // HEAD, HEAD])
        if KIND == GATED_SILU:
            heads = rounded(heads, KEPT).to(tl.float32) * factor.to(tl.float32)
            if factor.dtype == KEPT:
                heads = rounded(heads, KEPT).to(tl.float32)
            heads = heads * silu(passing)
        else:
            heads = heads * factor.to(tl.float32) * sigmoid(passing)
        value = tl.reshape(rounded(heads, KEPT).to(tl.float32), [BK])
    return value, squares


@triton.jit
def _output(
    acc, other, squares, out, token, n, count, eps,
    K: tl.constexpr, N: tl.constexpr, NORMED: tl.constexpr, SWIGLU: tl.constexpr,
    LIMIT: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """The sums of one token, scaled, activated and stored."""
    unit = 1.0
    if NORMED:
        unit = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    found = rounded(tl.sum(acc, 1) * unit, KEPT)
    if SWIGLU:
        up = rounded(tl.sum(other, 1) * unit, KEPT).to(tl.float32)
        found = bounded_swiglu(found.to(tl.float32), up, LIMIT, KEPT)
    found = found.to(out.dtype.element_ty)
    tl.store(out + token * N + n, found, mask=n < tl.where(count > token, N, 0))


@live
def _few(
    x, y, norm, gate, weight, out, total, count, x_stride, y_stride, gate_stride, eps,
    K: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    HEAD: tl.constexpr, KIND: tl.constexpr, ADDING: tl.constexpr, SWIGLU: tl.constexpr,
    LIMIT: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BN outputs of up to four tokens; AHEAD steps of the weights are asked for before the inputs.

    An accumulator for each place of a step: lanes add up among themselves once, at the end.
    """
    KEPT: tl.constexpr = x.dtype.element_ty
    NORMED: tl.constexpr = (KIND == NORM) | (KIND == ZERO_CENTRED)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = weight + n.to(tl.int64)[:, None] * K
    if OVERLAP:
        let_next_begin()
        wanted = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
        for ahead in tl.static_range(AHEAD):
            at = tl.minimum(ahead * BK + tl.arange(0, BK // 64) * 64, K - 1)[None, :]
            prefetch(wanted + at)
            if SWIGLU:
                prefetch(wanted + N * K + at)
        await_previous()
    acc0 = tl.zeros([BN, BK], tl.float32)
    acc1 = tl.zeros([BN, BK], tl.float32)
    acc2 = tl.zeros([BN, BK], tl.float32)
    acc3 = tl.zeros([BN, BK], tl.float32)
    other0 = tl.zeros([BN, BK], tl.float32)
    other1 = tl.zeros([BN, BK], tl.float32)
    other2 = tl.zeros([BN, BK], tl.float32)
    other3 = tl.zeros([BN, BK], tl.float32)
    squares0 = tl.zeros([BK], tl.float32)
    squares1 = tl.zeros([BK], tl.float32)
    squares2 = tl.zeros([BK], tl.float32)
    squares3 = tl.zeros([BK], tl.float32)
    for begin in tl.range(0, K, BK, num_stages=STAGES):
        k = begin + tl.arange(0, BK)
        own = tl.program_id(0) == (begin // BK) % tl.num_programs(0)
        if N % BN == 0 and K % BK == 0:
            w = tl.load(rows + k[None, :])
        else:
            there = (n < N)[:, None] & (k < K)[None, :]
            w = tl.load(rows + k[None, :], mask=there, other=0.0)
        w = w.to(tl.float32)
        u = w
        if SWIGLU:
            if N % BN == 0 and K % BK == 0:
                u = tl.load(rows + N * K + k[None, :])
            else:
                there = (n < N)[:, None] & (k < K)[None, :]
                u = tl.load(rows + N * K + k[None, :], mask=there, other=0.0)
            u = u.to(tl.float32)
        value, found = _input(
            x, y, norm, gate, total, 0, begin, own, count, x_stride, y_stride, gate_stride, eps,
            K, BK, HEAD, KIND, ADDING, KEPT,
        )  # fmt: skip
        squares0 += found
        acc0 += w * value[None, :]
        if SWIGLU:
            other0 += u * value[None, :]
        if TOKENS > 1:
            value, found = _input(
                x, y, norm, gate, total, 1, begin, own, count, x_stride, y_stride, gate_stride,
                eps, K, BK, HEAD, KIND, ADDING, KEPT,
            )  # fmt: skip
            squares1 += found
            acc1 += w * value[None, :]
            if SWIGLU:
                other1 += u * value[None, :]
        if TOKENS > 2:
            value, found = _input(
                x, y, norm, gate, total, 2, begin, own, count, x_stride, y_stride, gate_stride,
                eps, K, BK, HEAD, KIND, ADDING, KEPT,
            )  # fmt: skip
            squares2 += found
            acc2 += w * value[None, :]
            if SWIGLU:
                other2 += u * value[None, :]
            value, found = _input(
                x, y, norm, gate, total, 3, begin, own, count, x_stride, y_stride, gate_stride,
                eps, K, BK, HEAD, KIND, ADDING, KEPT,
            )  # fmt: skip
            squares3 += found
            acc3 += w * value[None, :]
            if SWIGLU:
                other3 += u * value[None, :]
    _output(acc0, other0, squares0, out, 0, n, count, eps, K, N, NORMED, SWIGLU, LIMIT, KEPT)
    if TOKENS > 1:
        _output(acc1, other1, squares1, out, 1, n, count, eps, K, N, NORMED, SWIGLU, LIMIT, KEPT)
    if TOKENS > 2:
        _output(acc2, other2, squares2, out, 2, n, count, eps, K, N, NORMED, SWIGLU, LIMIT, KEPT)
        _output(acc3, other3, squares3, out, 3, n, count, eps, K, N, NORMED, SWIGLU, LIMIT, KEPT)


@live
def _wide(
    x, weight, out, count, x_stride,
    K: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, SWIGLU: tl.constexpr, LIMIT: tl.constexpr, AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """BN outputs of all tokens, one of SPLITS equal parts of the inner axis."""
    KEPT: tl.constexpr = x.dtype.element_ty
    PART: tl.constexpr = ((K + BK - 1) // BK + SPLITS - 1) // SPLITS * BK
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    first = tl.program_id(1) * PART
    rows = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    if OVERLAP:
        let_next_begin()
        for ahead in tl.static_range(AHEAD):
            at = tl.minimum(first + ahead * BK + tl.arange(0, BK // 64) * 64, K - 1)[None, :]
            prefetch(rows + at)
            if SWIGLU:
                prefetch(rows + N * K + at)
        await_previous()
    token = tl.arange(0, TOKENS)
    lines = x + token.to(tl.int64)[:, None] * x_stride
    acc = tl.zeros([BN, TOKENS], tl.float32)
    other = tl.zeros([BN, TOKENS], tl.float32)
    for step in range(0, PART, BK):
        k = first + step + tl.arange(0, BK)
        value = tl.load(
            lines + k[None, :], mask=(token < count)[:, None] & (k < K)[None, :], other=0.0
        )
        if K % (BK * SPLITS) == 0:
            w = tl.load(rows + k[None, :])
        else:
            w = tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0.0)
        acc += product(w, tl.trans(value), KEPT, "tf32x3")
        if SWIGLU:
            if K % (BK * SPLITS) == 0:
                u = tl.load(rows + N * K + k[None, :])
            else:
                u = tl.load(rows + N * K + k[None, :], mask=(k < K)[None, :], other=0.0)
            other += product(u, tl.trans(value), KEPT, "tf32x3")
    place = (tl.program_id(1).to(tl.int64) * count + token)[None, :] * N + n[:, None]
    here = (n < N)[:, None] & (token < count)[None, :]
    if SPLITS == 1:
        acc = rounded(acc, KEPT).to(tl.float32)
    if SWIGLU:
        other = rounded(other, KEPT).to(tl.float32)
        acc = bounded_swiglu(acc, other, LIMIT, KEPT).to(tl.float32)
    tl.store(out + place, rounded(acc, out.dtype.element_ty), mask=here)
