"""Hyper-connections: the small matrices of every token, and the streams they mix.

Contract and rounding: `millpond.ops.reference.hyper`. The number of streams is a power of two. Sums
over streams have the reference's order, those over the hidden size fixed places of their own.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from millpond.ops.triton.launch import Bound, bound
from millpond.ops.triton.live import live
from millpond.ops.triton.narrow import narrow_parts
from millpond.ops.triton.shared import LAUNCH, cdiv, power_of_two, rounded, sigmoid

BLOCK = 1024
"""Of the hidden size, per program. Not measured yet."""


def hyper_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    iterations: int,
    hyper_eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the reference, in two launches: products with `fn`, then the matrices and the mix."""
    tokens, n, hidden = streams.shape
    _check(n)
    parts = narrow_parts(streams.flatten(1), fn, squares=True)
    post = parts.new_empty((tokens, n))
    mix = parts.new_empty((tokens, n, n))
    x = streams.new_empty((tokens, hidden))
    if tokens:
        _bound_pre(parts.shape[1], n, hidden, iterations).launch(
            (tokens, cdiv(hidden, BLOCK)),
            parts, streams, base, scale, post, mix, x, float(hyper_eps), float(norm_eps),
        )  # fmt: skip
    return post, mix, x


@cache
def _bound_pre(splits: int, n: int, hidden: int, iterations: int) -> Bound:
    return bound(
        _pre, SPLITS=splits, N=n, H=hidden, BLOCK=min(BLOCK, power_of_two(hidden)),
        ITERATIONS=iterations, num_warps=4, **LAUNCH,
    )  # fmt: skip


def hyper_post(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
) -> torch.Tensor:
    """As the reference."""
    tokens, n, hidden = streams.shape
    _check(n)
    out = y.new_empty(streams.shape)
    if tokens:
        grid = (tokens, cdiv(hidden, BLOCK))
        _bound_post(n, hidden).launch(grid, y, streams, post, mix, out)
    return out


@cache
def _bound_post(n: int, hidden: int) -> Bound:
    return bound(
        _post, N=n, H=hidden, BLOCK=min(BLOCK, power_of_two(hidden)), num_warps=4, **LAUNCH
    )


def hyper_mean(streams: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    tokens, n, hidden = streams.shape
    out = torch.empty((tokens, hidden), dtype=streams.dtype, device=streams.device)
    if tokens:
        _mean[(tokens, cdiv(hidden, BLOCK))](
            streams, out,
            N=n, H=hidden, BLOCK=min(BLOCK, power_of_two(hidden)), num_warps=4, **LAUNCH,
        )  # fmt: skip
    return out


def _check(n: int) -> None:
    if n != power_of_two(n):
        raise ValueError(f"{n} residual streams: a power of two is needed")


@triton.jit
def _column(parts, at, SPLITS: tl.constexpr, COLUMNS: tl.constexpr):
    """One or more columns of a token's parts, summed in the order of the splits."""
    total = tl.load(parts + at)
    for split in range(1, SPLITS):
        total += tl.load(parts + split * COLUMNS + at)
    return total


@live
def _pre(
    parts, streams, base, scale, post, mix, x, hyper_eps, norm_eps,
    SPLITS: tl.constexpr, N: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    ITERATIONS: tl.constexpr,
):  # fmt: skip
    """BLOCK of one token; every program makes the token's matrices, the first stores them."""
    COLUMNS: tl.constexpr = (2 + N) * N + 1
    token = tl.program_id(0).to(tl.int64)
    own = parts + token * (SPLITS * COLUMNS)
    square = _column(own, tl.arange(0, 1) + (COLUMNS - 1), SPLITS, COLUMNS)
    unit = tl.rsqrt(square / (N * H) + norm_eps)
    i = tl.arange(0, N)
    m = _column(own, i, SPLITS, COLUMNS) * unit
    pre = sigmoid(m * tl.load(scale).to(tl.float32) + tl.load(base + i).to(tl.float32)) + hyper_eps

    if tl.program_id(1) == 0:
        m = _column(own, N + i, SPLITS, COLUMNS) * unit
        m = m * tl.load(scale + 1).to(tl.float32) + tl.load(base + N + i).to(tl.float32)
        tl.store(post + token * N + i, 2.0 * sigmoid(m))
        place = i[:, None] * N + i[None, :]
        c = _column(own, 2 * N + place, SPLITS, COLUMNS) * unit[:, None]
        c = c * tl.load(scale + 2).to(tl.float32) + tl.load(base + 2 * N + place).to(tl.float32)
        c = tl.exp(c - tl.max(c, 1)[:, None])
        c = c / tl.sum(c, 1)[:, None] + hyper_eps
        c = c / (tl.sum(c, 0)[None, :] + hyper_eps)
        for _ in range(ITERATIONS - 1):
            c = c / (tl.sum(c, 1)[:, None] + hyper_eps)
            c = c / (tl.sum(c, 0)[None, :] + hyper_eps)
        tl.store(mix + token * (N * N) + place, c)

    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for stream in tl.static_range(N):
        value = tl.load(streams + (token * N + stream) * H + h, mask=h < H, other=0.0)
        total += tl.sum(tl.where(i == stream, pre, 0.0), 0) * value.to(tl.float32)
    tl.store(x + token * H + h, rounded(total, x.dtype.element_ty), mask=h < H)


@live
def _post(
    y, streams, post, mix, out, N: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    KEPT: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, N)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = (h < H)[None, :]
    total = tl.zeros([N, BLOCK], tl.float32)
    for stream in tl.static_range(N):
        factor = rounded(tl.load(mix + (token * N + stream) * N + k).to(tl.float32), KEPT)
        value = tl.load(streams + (token * N + stream) * H + h, mask=h < H, other=0.0)
        total += factor.to(tl.float32)[:, None] * value.to(tl.float32)[None, :]
    total = rounded(total, KEPT).to(tl.float32)
    factor = rounded(tl.load(post + token * N + k).to(tl.float32), KEPT).to(tl.float32)
    value = tl.load(y + token * H + h, mask=h < H, other=0.0).to(tl.float32)
    own = rounded(factor[:, None] * value[None, :], KEPT).to(tl.float32)
    place = (token * N + k)[:, None] * H + h[None, :]
    tl.store(out + place, rounded(own + total, KEPT), mask=here)


@live
def _mean(streams, out, N: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(streams + token * N * H + h, mask=h < H, other=0.0).to(tl.float32)
    for stream in tl.static_range(1, N):
        at = streams + (token * N + stream) * H + h
        total += tl.load(at, mask=h < H, other=0.0).to(tl.float32)
    tl.store(out + token * H + h, rounded(total / N, out.dtype.element_ty), mask=h < H)
