"""Norms over the last axis, plain, zero-centred, centred and gated.

Contract and rounding: `millpond.ops.reference.dense` and `.fused`. A program takes whole vectors,
so the order of a sum follows from the size alone. x, y and gate may be views of wider tokens.
"""

from __future__ import annotations

from functools import cache
from math import prod

import torch
import triton.language as tl

from millpond.ops.triton.launch import Bound, bound
from millpond.ops.triton.live import live
from millpond.ops.triton.overlap import await_previous, let_next_begin, overlap
from millpond.ops.triton.shared import (
    LAUNCH,
    cdiv,
    power_of_two,
    rounded,
    sigmoid,
    silu,
    token_stride,
)

ELEMENTS = 2048
"""Of a program at least, where vectors are short. Not measured yet."""

PLAIN = tl.constexpr(0)
ZERO_CENTRED = tl.constexpr(1)
LAYER = tl.constexpr(2)
GATED_SILU = tl.constexpr(3)
GATED_SIGMOID = tl.constexpr(4)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As the reference."""
    return _norm(PLAIN.value, x, weight, eps)


def zero_centred_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As the reference."""
    return _norm(ZERO_CENTRED.value, x, weight, eps)


def add_norm(
    x: torch.Tensor,
    y: torch.Tensor | None,
    norm: torch.Tensor,
    *,
    eps: float,
    zero_centred: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference's, in one launch."""
    kind = (ZERO_CENTRED if zero_centred else PLAIN).value
    total = x if y is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    return _norm(kind, x, norm, eps, added=y, total=total), total


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """As the reference."""
    return _norm(LAYER.value, x, weight, eps, bias=bias)


def gated_rms_norm_silu(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """As the reference."""
    return _norm(GATED_SILU.value, x, weight, eps, gate=gate)


def gated_rms_norm_sigmoid(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """As the reference."""
    return _norm(GATED_SIGMOID.value, x, weight, eps, gate=gate)


def _norm(
    kind: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    tokens, *several, size = x.shape
    inner = prod(several)
    count = tokens * inner
    if count:
        vectors, kernel = _bound(kind, added is not None, inner, size, x.device)
        kernel.launch(
            (cdiv(count, vectors),),
            x, x if gate is None else gate, x if added is None else added, weight,
            weight if bias is None else bias, out, out if total is None else total, count,
            token_stride(x), 0 if gate is None else token_stride(gate),
            0 if added is None else token_stride(added), float(eps),
        )  # fmt: skip
    return out


@cache
def _bound(
    kind: int, adding: bool, inner: int, size: int, device: torch.device
) -> tuple[int, Bound]:
    """How many vectors a program normalises, and the kernel bound to their size."""
    padded = power_of_two(size)
    vectors = max(1, ELEMENTS // padded)
    return vectors, bound(
        _vectors, KIND=kind, ADDING=adding, INNER=inner, H=size, HP=padded, VECTORS=vectors,
        num_warps=min(16, max(4, padded // 1024)), **LAUNCH, **overlap(device),
    )  # fmt: skip


@live
def _vectors(
    x, gate, added, weight, bias, out, total, count, x_stride, gate_stride, added_stride, eps,
    KIND: tl.constexpr, ADDING: tl.constexpr, INNER: tl.constexpr, H: tl.constexpr,
    HP: tl.constexpr, VECTORS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """VECTORS vectors; INNER of them belong to a token."""
    if OVERLAP:
        let_next_begin()
        await_previous()
    vector = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    h = tl.arange(0, HP)
    here = (vector < count)[:, None] & (h < H)[None, :]
    token = (vector // INNER).to(tl.int64)[:, None]
    inside = (vector % INNER)[:, None] * H + h[None, :]
    value = tl.load(x + token * x_stride + inside, mask=here, other=0.0).to(tl.float32)
    place = vector.to(tl.int64)[:, None] * H + h[None, :]
    KEPT: tl.constexpr = out.dtype.element_ty
    if ADDING:
        more = tl.load(added + token * added_stride + inside, mask=here, other=0.0)
        value = rounded(value + more.to(tl.float32), KEPT)
        tl.store(total + place, value, mask=here)
        value = value.to(tl.float32)
    if KIND == LAYER:
        value = tl.where((h < H)[None, :], value - (tl.sum(value, 1) / H)[:, None], 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, 1) / H + eps)[:, None]
    factor = tl.load(weight + h, mask=h < H, other=0.0)
    if KIND == PLAIN:
        factor = rounded(factor.to(tl.float32), KEPT).to(tl.float32)
        value = rounded(value, KEPT).to(tl.float32) * factor[None, :]
    elif KIND == ZERO_CENTRED:
        value = value * (1.0 + factor.to(tl.float32))[None, :]
    elif KIND == LAYER:
        shift = tl.load(bias + h, mask=h < H, other=0.0).to(tl.float32)
        value = value * factor.to(tl.float32)[None, :] + shift[None, :]
    else:
        passing = tl.load(gate + token * gate_stride + inside, mask=here, other=0.0).to(tl.float32)
        if KIND == GATED_SILU:
            value = rounded(value, KEPT).to(tl.float32) * factor.to(tl.float32)[None, :]
            if factor.dtype == KEPT:
                value = rounded(value, KEPT).to(tl.float32)
            value = value * silu(passing)
        else:
            value = value * factor.to(tl.float32)[None, :] * sigmoid(passing)
    tl.store(out + place, rounded(value, KEPT), mask=here)
