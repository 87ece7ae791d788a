"""Gates, activations and rotary positions of single elements.

Contract and rounding: `millpond.ops.reference.dense`. Inputs may be views of wider tokens.
"""

from __future__ import annotations

from functools import cache
from math import prod

import torch
import triton
import triton.language as tl

from millpond.ops.reference.dense import rope_speeds
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

BLOCK = 1024
"""Elements of a program. Not measured yet."""

ANGLES = 16
"""Tokens of a program that makes their rotations."""


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = prod(x.shape[1:])
    if x.shape[0]:
        _sigmoid_gate[(x.shape[0], cdiv(size, BLOCK))](
            x, gate, out, token_stride(x), token_stride(gate),
            SIZE=size, BLOCK=min(BLOCK, power_of_two(size)), num_warps=4, **LAUNCH,
        )  # fmt: skip
    return out


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """As the reference."""
    out = torch.empty_like(up, memory_format=torch.contiguous_format)
    tokens, *several = up.shape
    size = prod(several)
    if tokens:
        grid, strides = (tokens, cdiv(size, BLOCK)), (token_stride(gate), token_stride(up))
        _bound_swiglu(size, limit, up.device).launch(grid, gate, up, out, *strides)
    return out


@cache
def _bound_swiglu(size: int, limit: float | None, device: torch.device) -> Bound:
    return bound(
        _swiglu, SIZE=size, BLOCK=min(BLOCK, power_of_two(size)), LIMIT=limit, num_warps=4,
        **LAUNCH, **overlap(device),
    )  # fmt: skip


def rope_tables(
    positions: torch.Tensor, rotary_dim: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, in one launch."""
    count, half = positions.shape[0], rotary_dim // 2
    cos, sin = torch.empty((2, count, half), dtype=torch.float32, device=positions.device)
    if count:
        _angles[(cdiv(count, ANGLES),)](
            positions, _speeds(rotary_dim, theta, positions.device), cos, sin, count,
            HALF=half, HP=power_of_two(half), BLOCK=ANGLES, num_warps=4, **LAUNCH,
        )  # fmt: skip
    return cos, sin


@cache
def _speeds(rotary_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """As the reference's, computed once where the reference computes them: on the CPU."""
    return rope_speeds(rotary_dim, theta, torch.device("cpu")).to(device)


def rotate_partial(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    tokens, heads, dim = x.shape
    half = cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    padded = power_of_two(dim)
    block = max(1, min(power_of_two(heads), 2 * BLOCK // padded))
    if tokens:
        _rotate[(tokens, cdiv(heads, block))](
            x, cos, sin, out, token_stride(x), token_stride(cos), token_stride(sin),
            HEADS=heads, D=dim, DP=padded, HALF=half, BLOCK=block, num_warps=4, **LAUNCH,
        )  # fmt: skip
    return out


@triton.jit
def bounded_swiglu(gate, up, LIMIT: tl.constexpr, KEPT: tl.constexpr):
    """silu(gate) * up of fp32 values that KEPT holds; rounded as the reference rounds, in KEPT.

    A NaN stays one: neither bound is a minimum.
    """
    if LIMIT is not None:
        gate = rounded(tl.where(gate > LIMIT, LIMIT, gate), KEPT).to(tl.float32)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        up = rounded(up, KEPT).to(tl.float32)
    return rounded(rounded(silu(gate), KEPT).to(tl.float32) * up, KEPT)


@live
def _angles(
    positions, speeds, cos, sin, count,
    HALF: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, HP)
    here = (token < count)[:, None] & (i < HALF)[None, :]
    position = tl.load(positions + token, mask=token < count, other=0).to(tl.float32)
    angle = position[:, None] * tl.load(speeds + i, mask=i < HALF, other=0.0)[None, :]
    place = token.to(tl.int64)[:, None] * HALF + i[None, :]
    tl.store(cos + place, tl.cos(angle), mask=here)
    tl.store(sin + place, tl.sin(angle), mask=here)


@live
def _sigmoid_gate(x, gate, out, x_stride, gate_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * x_stride + at, mask=at < SIZE, other=0.0).to(tl.float32)
    passing = tl.load(gate + token * gate_stride + at, mask=at < SIZE, other=0.0).to(tl.float32)
    share = rounded(sigmoid(passing), out.dtype.element_ty).to(tl.float32)
    value = rounded(value * share, out.dtype.element_ty)
    tl.store(out + token * SIZE + at, value, mask=at < SIZE)


@live
def _swiglu(
    gate, up, out, gate_stride, up_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        let_next_begin()
        await_previous()
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    passing = tl.load(gate + token * gate_stride + at, mask=at < SIZE, other=0.0).to(tl.float32)
    value = tl.load(up + token * up_stride + at, mask=at < SIZE, other=0.0).to(tl.float32)
    value = bounded_swiglu(passing, value, LIMIT, out.dtype.element_ty)
    tl.store(out + token * SIZE + at, value, mask=at < SIZE)


@live
def _rotate(
    x, cos, sin, out, x_stride, cos_stride, sin_stride,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK heads of one token; an element of a pair is read twice, by itself and by its other."""
    KEPT: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, DP)
    here = (head < HEADS)[:, None] & (d < D)[None, :]
    at = head[:, None] * D
    turning = (d < 2 * HALF)[None, :]
    other = tl.where(d < HALF, d + HALF, d - HALF)
    own = tl.load(x + token * x_stride + at + d[None, :], mask=here, other=0.0)
    pair = tl.load(x + token * x_stride + at + other[None, :], mask=here & turning, other=0.0)
    angle = d % HALF
    c = tl.load(cos + token * cos_stride + angle, mask=d < 2 * HALF, other=0.0)
    s = tl.load(sin + token * sin_stride + angle, mask=d < 2 * HALF, other=0.0)
    c = rounded(c.to(tl.float32), KEPT).to(tl.float32)[None, :]
    s = rounded(s.to(tl.float32), KEPT).to(tl.float32)[None, :]
    along = rounded(own.to(tl.float32) * c, KEPT).to(tl.float32)
    across = rounded(pair.to(tl.float32) * s, KEPT).to(tl.float32)
    turned = rounded(tl.where((d < HALF)[None, :], along - across, along + across), KEPT)
    tl.store(out + token * (HEADS * D) + at + d[None, :], tl.where(turning, turned, own), mask=here)
