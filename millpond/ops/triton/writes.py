"""Keys, values and latents of new tokens into their pages; queries and keys turned on the way.

Contract and rounding: `millpond.ops.reference.attention.write_kv` and `.turn_and_write`. A negative
page writes nothing. Inputs may be views of wider tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millpond.ops.triton.live import live
from millpond.ops.triton.overlap import await_previous, let_next_begin, overlap
from millpond.ops.triton.shared import (
    LAUNCH,
    head_stride,
    power_of_two,
    rounded,
    slot_stride,
    token_stride,
)

PAGE = 64
"""Positions of a page."""

STORE_BLOCK = 1024

TURNED = 1024
"""Elements of a program that turns, at least; whole heads. Not measured yet."""


def write_kv(
    cache: torch.Tensor,
    values: torch.Tensor,
    token_page: torch.Tensor,
    token_offset: torch.Tensor,
) -> None:
    """As the reference; values may be a view of wider tokens."""
    count = values.shape[0]
    heads, dim = (1, values.shape[1]) if cache.ndim == 3 else values.shape[1:]
    if count:
        _write_kv[(count, triton.cdiv(heads * dim, STORE_BLOCK))](
            cache, values, token_page, token_offset, slot_stride(cache), token_stride(values),
            HEADS=heads, D=dim, TILE=PAGE, BLOCK=min(STORE_BLOCK, power_of_two(heads * dim)),
            num_warps=4, **LAUNCH,
        )  # fmt: skip


def turn_and_write(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    token_page: torch.Tensor,
    token_offset: torch.Tensor,
) -> torch.Tensor | None:
    """As the reference, in one launch."""
    count, kv_heads, dim = key.shape
    heads = 0 if query is None else query.shape[1]
    asked = key if query is None else query
    out = torch.empty((count, heads, dim), dtype=key.dtype, device=key.device)
    padded = power_of_two(dim)
    block = max(1, min(power_of_two(kv_heads), TURNED // padded))
    if count:
        _turn[(count, triton.cdiv(heads, block) + 2 * triton.cdiv(kv_heads, block))](
            asked, key, value, q_norm, k_norm, cos, sin, out, key_pages, value_pages,
            token_page, token_offset,
            asked.stride(0), head_stride(asked), key.stride(0), head_stride(key),
            value.stride(0), head_stride(value), token_stride(cos), token_stride(sin),
            slot_stride(key_pages), slot_stride(value_pages), eps,
            HEADS=heads, KV_HEADS=kv_heads, D=dim, DP=padded, HALF=cos.shape[-1],
            TILE=PAGE, BLOCK=block, num_warps=4, **LAUNCH, **overlap(key.device),
        )  # fmt: skip
    return None if query is None else out


@live
def _write_kv(
    cache, values, token_page, token_offset, page_stride, value_stride,
    HEADS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of one token."""
    token = tl.program_id(0).to(tl.int64)
    page = tl.load(token_page + token).to(tl.int64)
    offset = tl.load(token_offset + token).to(tl.int64)
    if page >= 0:
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(values + token * value_stride + at, mask=at < HEADS * D, other=0.0)
        place = (at // D) * (TILE * D) + offset * D + at % D
        value = rounded(value.to(tl.float32), cache.dtype.element_ty)
        tl.store(cache + page * page_stride + place, value, mask=at < HEADS * D)


@triton.jit
def _turned(
    x, norm, cos, sin, head, here, eps, x_head,
    D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Heads of one token, normalised and rotated; the other of a pair is normalised again."""
    d = tl.arange(0, DP)
    turning = d < 2 * HALF
    other = tl.where(d < HALF, d + HALF, d - HALF)
    at = x + head[:, None] * x_head
    own = tl.load(at + d[None, :], mask=here, other=0.0).to(tl.float32)
    pair = tl.load(at + other[None, :], mask=here & turning[None, :], other=0.0).to(tl.float32)
    unit = tl.rsqrt(tl.sum(own * own, 1) / D + eps)[:, None]
    weight = 1.0 + tl.load(norm + d, mask=d < D, other=0.0).to(tl.float32)
    of_pair = 1.0 + tl.load(norm + other, mask=turning, other=0.0).to(tl.float32)
    own = rounded(own * unit * weight[None, :], KEPT)
    pair = rounded(pair * unit * of_pair[None, :], KEPT).to(tl.float32)
    c = tl.load(cos + d % HALF, mask=turning, other=0.0).to(tl.float32)
    s = tl.load(sin + d % HALF, mask=turning, other=0.0).to(tl.float32)
    c, s = rounded(c, KEPT).to(tl.float32)[None, :], rounded(s, KEPT).to(tl.float32)[None, :]
    along = rounded(own.to(tl.float32) * c, KEPT).to(tl.float32)
    across = rounded(pair * s, KEPT).to(tl.float32)
    turned = rounded(tl.where((d < HALF)[None, :], along - across, along + across), KEPT)
    return tl.where(turning[None, :], turned, own)


@live
def _turn(
    query, key, value, q_norm, k_norm, cos, sin, out, key_pages, value_pages,
    token_page, token_offset,
    query_stride, query_head, key_stride, key_head, value_stride, value_head,
    cos_stride, sin_stride, key_page_stride, value_page_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    HALF: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK heads of one token: some of its queries, of its keys or of its values."""
    if OVERLAP:
        let_next_begin()
        await_previous()
    QUERIES: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    KEYS: tl.constexpr = (KV_HEADS + BLOCK - 1) // BLOCK
    KEPT: tl.constexpr = key.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    page = tl.load(token_page + token).to(tl.int64)
    offset = tl.load(token_offset + token).to(tl.int64)
    d = tl.arange(0, DP)
    lane = tl.arange(0, BLOCK)
    cos += token * cos_stride
    sin += token * sin_stride
    if part < QUERIES:
        head = part * BLOCK + lane
        here = (head < HEADS)[:, None] & (d < D)[None, :]
        turned = _turned(
            query + token * query_stride, q_norm, cos, sin, head, here, eps, query_head,
            D, DP, HALF, KEPT,
        )  # fmt: skip
        tl.store(out + (token * HEADS + head[:, None]) * D + d[None, :], turned, mask=here)
    else:
        head = ((part - QUERIES) % KEYS) * BLOCK + lane
        here = (head < KV_HEADS)[:, None] & (d < D)[None, :]
        kept = (head < tl.where(page >= 0, KV_HEADS, 0))[:, None] & (d < D)[None, :]
        place = head[:, None] * (TILE * D) + offset * D + d[None, :]
        page = tl.maximum(page, 0)
        if part < QUERIES + KEYS:
            turned = _turned(
                key + token * key_stride, k_norm, cos, sin, head, here, eps, key_head,
                D, DP, HALF, KEPT,
            )  # fmt: skip
            turned = rounded(turned.to(tl.float32), key_pages.dtype.element_ty)
            tl.store(key_pages + page * key_page_stride + place, turned, mask=kept)
        else:
            at = value + token * value_stride + head[:, None] * value_head + d[None, :]
            same = tl.load(at, mask=here, other=0.0).to(tl.float32)
            same = rounded(same, value_pages.dtype.element_ty)
            tl.store(value_pages + page * value_page_stride + place, same, mask=kept)
