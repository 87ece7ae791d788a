"""Keys, values and latents of new tokens into their pages.

Contract: `millpond.ops.reference.attention.write_kv`. A negative page writes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millpond.ops.triton.live import live
from millpond.ops.triton.shared import LAUNCH, power_of_two, rounded, slot_stride, token_stride

PAGE = 64
"""Positions of a page."""

STORE_BLOCK = 1024


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
