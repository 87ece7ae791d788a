"""How a kernel is told what the live batch decides, so that no step compiles anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton

from millpond.ops.triton.launch import quick

LIVE = (
    "count",  # tokens, rows or blocks of this call
    "room",  # for blocks
    "first_token",
    "first_verify",
    "positions",
    "token_row",
    "token_page",
    "token_offset",
    "row_start",
    "row_end",
    "row_seats",
    "cu_seqlens",
    "page_table",
    "table_stride",
    "num_pages",
    "num_pools",
    "verify_seats",
    "num_drafts",
    "verify_width",
    "selected",
    "groups",
    "sizes",
    "listed",
    "selected_stride",
    "first_position",
    "split_stride",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "sample_index",
    "filtering",
)
"""Arguments that describe the live batch, wherever a kernel of this package's layers has them.

Everything else follows from the model's shape: strides inside a token, a page or a seat, and the
alignment of tensors that the caller allocates or cuts out at a token (constant as long as a token's
bytes are a multiple of 16, as every published model's are).
"""


def live(fn: Callable[..., Any]) -> Any:
    """`triton.jit` of a kernel whose arguments named in `LIVE` are not specialised on."""
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    found = [n for n in names if n in LIVE]
    return quick(triton.jit(fn, do_not_specialize=found, do_not_specialize_on_alignment=found))
