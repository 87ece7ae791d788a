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
from millpond.ops.triton.layer_choices import ThinChoice
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


def thin_linear(x: torch.Tensor, weight: torch.Tensor, choice: ThinChoice) -> torch.Tensor:
    """x [T, K] @ weight [N, K] transposed -> [T, N]."""
    return _launch(PLAIN, x, None, None, None, weight, choice)[0]


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product, and x + y where there is a y."""
    tokens, inner = x.shape
    outputs = weight.shape[0] // 2 if swiglu else weight.shape[0]
    out = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    total = x if y is None else torch.empty((tokens, inner), dtype=x.dtype, device=x.device)
    step = max(choice.step, head)
    if tokens:
        _thin[(triton.cdiv(outputs, choice.outputs),)](
            x, x if y is None else y, x if norm is None else norm, x if gate is None else gate,
            weight, out, total, tokens, token_stride(x),
            token_stride(x if y is None else y), token_stride(x if gate is None else gate), eps,
            K=inner, N=outputs, TOKENS=max(16, power_of_two(tokens)), BN=choice.outputs,
            BK=step, HEAD=head, KIND=kind, ADDING=y is not None, SWIGLU=swiglu, LIMIT=limit,
            AHEAD=choice.ahead,
            num_warps=choice.warps, num_stages=choice.stages, **LAUNCH, **overlap(x.device),
        )  # fmt: skip
    return out, total


@live
def _thin(
    x, y, norm, gate, weight, out, total, count, x_stride, y_stride, gate_stride, eps,
    K: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    HEAD: tl.constexpr, KIND: tl.constexpr, ADDING: tl.constexpr, SWIGLU: tl.constexpr,
    LIMIT: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BN outputs of all tokens; AHEAD steps of the weights are asked for before the inputs."""
    KEPT: tl.constexpr = out.dtype.element_ty
    NORMED: tl.constexpr = (KIND == NORM) | (KIND == ZERO_CENTRED)
    GATED: tl.constexpr = (KIND == GATED_SILU) | (KIND == GATED_SIGMOID)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    token = tl.arange(0, TOKENS)
    lane = tl.arange(0, BK)
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
    acc = tl.zeros([BN, TOKENS], tl.float32)
    other = tl.zeros([BN, TOKENS], tl.float32)
    squares = tl.zeros([TOKENS, BK], tl.float32)
    lines = token.to(tl.int64)[:, None]
    for begin in range(0, K, BK):
        k = begin + lane
        w_mask = (n < N)[:, None] & (k < K)[None, :]
        here = (token < count)[:, None] & (k < K)[None, :]
        if N % BN == 0 and K % BK == 0:
            w = tl.load(rows + k[None, :])
        else:
            w = tl.load(rows + k[None, :], mask=w_mask, other=0.0)
        value = tl.load(x + lines * x_stride + k[None, :], mask=here, other=0.0)
        if KIND != PLAIN:
            wide = value.to(tl.float32)
            if ADDING:
                added = tl.load(y + lines * y_stride + k[None, :], mask=here, other=0.0)
                value = rounded(wide + added.to(tl.float32), KEPT)
                wide = value.to(tl.float32)
                own = (begin // BK) % tl.num_programs(0)
                told = tl.where(tl.program_id(0) == own, count, 0)
                mine = (token < told)[:, None] & (k < K)[None, :]
                tl.store(total + lines * K + k[None, :], value, mask=mine)
            if NORMED:
                squares += wide * wide
                factor = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
                if KIND == ZERO_CENTRED:
                    factor = 1.0 + factor
                value = rounded(wide * factor[None, :], KEPT)
            if GATED:
                heads = tl.reshape(wide, [TOKENS, BK // HEAD, HEAD])
                unit = tl.rsqrt(tl.sum(heads * heads, 2) / HEAD + eps)
                heads = heads * unit[:, :, None]
                factor = tl.load(norm + tl.arange(0, HEAD))
                passing = tl.load(gate + lines * gate_stride + k[None, :], mask=here, other=0.0)
                passing = tl.reshape(passing.to(tl.float32), [TOKENS, BK // HEAD, HEAD])
                if KIND == GATED_SILU:
                    heads = rounded(heads, KEPT).to(tl.float32)
                    heads = heads * factor.to(tl.float32)[None, None, :]
                    if factor.dtype == KEPT:
                        heads = rounded(heads, KEPT).to(tl.float32)
                    heads = heads * silu(passing)
                else:
                    heads = heads * factor.to(tl.float32)[None, None, :] * sigmoid(passing)
                value = tl.reshape(rounded(heads, KEPT), [TOKENS, BK])
        acc += product(w, tl.trans(value), KEPT, "tf32x3")
        if SWIGLU:
            if N % BN == 0 and K % BK == 0:
                u = tl.load(rows + N * K + k[None, :])
            else:
                u = tl.load(rows + N * K + k[None, :], mask=w_mask, other=0.0)
            other += product(u, tl.trans(value), KEPT, "tf32x3")
    if NORMED:
        unit = tl.rsqrt(tl.sum(squares, 1) / K + eps)
        acc = acc * unit[None, :]
        other = other * unit[None, :]
    acc = rounded(acc, KEPT)
    if SWIGLU:
        other = rounded(other, KEPT).to(tl.float32)
        acc = bounded_swiglu(acc.to(tl.float32), other, LIMIT, KEPT)
    place = token.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out + place, acc, mask=(n < N)[:, None] & (token < count)[None, :])
