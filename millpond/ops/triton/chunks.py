"""The delta rule of prompt rows, 64 tokens at a time on the absolute grid, from slot to slot.

Contract and formulas: `millpond.ops.reference.delta`. Two launches: `chunk_prepare` does what
chunks do without a state, all in parallel; `chunk_recur` runs along the chunks of one row with a
part of one head's state in registers; exports are stores between two chunks.

With T the inverse of the triangular system times beta, E the decay since the chunk's start and F
the decay until its end:
    fresh = T v + T (-k E) S    o = (q E) S + (qk) fresh    S <- S * fall + (k F)^T fresh
By channel, the decayed queries and keys are tiles of the workspace. By head they are q and k as
they came: decay, and what makes them unit vectors, is applied to the rows of the products.

Rounding. State, decay, beta, norms and all sums are fp32. Matrix operands: in a bf16 model bf16,
except in the triangular solve, where they are fp16; otherwise three TF32 products stand for each
fp32 one. T, qk and decayed queries and keys are stored in the operands' type.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton.language as tl

from millpond.ops.batch import RowSlots
from millpond.ops.reference.delta import CHUNK, NORM_EPS, Gate
from millpond.ops.triton.choices import chunk_choice
from millpond.ops.triton.chunk_prepare import LOWEST_AROUND_MIDDLE, PAIRS, SCALES, _prepare
from millpond.ops.triton.chunk_recur import _recur
from millpond.ops.triton.shared import (
    LAUNCH,
    cdiv,
    power_of_two,
    slot_stride,
    token_stride,
)

SMALLEST_TILE = 16
"""Matrix products need at least this many rows, columns and terms."""


def delta_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    gate: Gate,
    bank: torch.Tensor,
    rows: RowSlots,
) -> torch.Tensor:
    """As the reference; an export off the grid that is not its row's end is not written, and not
    reported. All inputs may be views of wider rows; they are copied only where tokens do not lie at
    multiples of 16 bytes. Its workspace, for a head and every 64 tokens begun: 64 * 128 operands,
    and 64 * 3 K more if decay is by channel."""
    choice = chunk_choice(v.device)
    count, exports = rows.num_rows, rows.export_slot.shape[0]
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    report = rows.written.blank(count + exports, v.device)
    rows.written.record_report(report)
    if not count:
        return o
    heads, v_dim = v.shape[1:]
    key_heads, k_dim = k.shape[1:]
    by_channel = decay.ndim == 3
    q, k, v = lined_up(q), lined_up(k), lined_up(v)
    decay = lined_up(decay) if by_channel else decay
    narrow = v.dtype == torch.bfloat16  # fp16 has not the range
    bound = gate.lower_bound
    shape = _shape(heads, key_heads, k_dim, by_channel, narrow)
    blocks = v.shape[0] // CHUNK + count
    work = v.new_empty(
        blocks * heads * shape["RECORD"], dtype=torch.bfloat16 if narrow else torch.float32
    )
    scales = v.new_empty(blocks * heads * shape["NUMBERS"], dtype=torch.float32)
    part = min(shape["KP"], 64)
    strides = token_stride(q), token_stride(k), token_stride(v)
    _prepare[(blocks, heads)](
        q, k, decay, beta, gate.a_log, gate.dt_bias, work, scales, rows.cu_seqlens,
        count, bound or 0.0,
        *strides[:2], token_stride(decay), token_stride(beta),
        **shape, BOUNDED=bound is not None, EPS=NORM_EPS,
        PART=part, RUN=max(part // (8 * choice.prepare_warps), 1), STAGES=1, SOLVED=16,
        AROUND_MIDDLE=by_channel and narrow and bound is not None and bound >= LOWEST_AROUND_MIDDLE,
        num_warps=choice.prepare_warps,
        maxnreg=choice.head_registers if narrow and not by_channel else None, **LAUNCH,
    )  # fmt: skip
    values = max(min(choice.values, power_of_two(v_dim)), SMALLEST_TILE)
    _recur[(cdiv(v_dim, values), heads, count)](
        q, k, v, work, scales, o, bank, rows.cu_seqlens, rows.state_in, rows.state_out,
        rows.export_row, rows.export_offset, rows.export_slot, report, count, exports,
        *strides, slot_stride(bank),
        **shape, V=v_dim, BV=values, STAGES=choice.stages if narrow else 1,
        num_warps=choice.warps, **LAUNCH,
    )  # fmt: skip
    return o


@cache
def _shape(
    heads: int, key_heads: int, k_dim: int, by_channel: bool, narrow: bool
) -> Mapping[str, Any]:
    """The constants of both kernels. `narrow`: operands of matrix products are bf16."""
    return {
        "H": heads,
        "HK": key_heads,
        "K": k_dim,
        "KP": max(power_of_two(k_dim), SMALLEST_TILE),
        "BY_CHANNEL": by_channel,
        "RECORD": 2 * PAIRS + (3 * CHUNK * k_dim if by_channel else 0),
        "NUMBERS": k_dim if by_channel else SCALES,
        "OPERAND": tl.bfloat16 if narrow else tl.float32,
        "PRECISION": "tf32" if narrow else "tf32x3",
    }


def lined_up(x: torch.Tensor) -> torch.Tensor:
    """x [T, ...], or a copy if its tokens lie anywhere: kernels are compiled for one of the two."""
    if (x.data_ptr() | x.stride(0) * x.itemsize) % 16 and x.numel():
        return x.clone(memory_format=torch.contiguous_format)
    return x
