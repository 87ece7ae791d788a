"""Mixtures of experts: routing, and experts as one grouped product each way, without the host.

Contract and rounding: `millpond.ops.reference.moe`. Choices are ordered by expert, each expert's
choices are cut into blocks of 64, and grids have room for the worst case, so nothing is read back.
One tile size whatever the batch: a token's bytes depend on no neighbour.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millpond.ops.triton.elementwise import bounded_swiglu
from millpond.ops.triton.live import live
from millpond.ops.triton.narrow import narrow_parts
from millpond.ops.triton.shared import (
    LAUNCH,
    power_of_two,
    product,
    rounded,
    row_of_block,
    sigmoid,
    slot_stride,
    token_stride,
)

ROWS, COLUMNS, STEP = 64, 64, 64
"""The tile of a grouped product: choices, outputs, inner elements. Not measured yet."""

WARPS, STAGES = 4, 4

PICKS = 1024
"""Choices that are ordered at a time."""

SUM_BLOCK = 1024

SIGMOID_ROUTE_EPS = tl.constexpr(1e-20)


def moe_route_softmax(
    x: torch.Tensor, gate: torch.Tensor, *, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference. A row of NaN gives valid, distinct experts and NaN weights."""
    parts = narrow_parts(x, gate, squares=False)
    return _route(parts, gate.shape[0], top_k, x.dtype, None, 1.0, True)


def moe_route_sigmoid(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    scale: float,
    renormalise: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference. A row of NaN gives valid, distinct experts and NaN weights."""
    parts = narrow_parts(x, gate.float(), squares=False)
    return _route(parts, gate.shape[0], top_k, torch.float32, bias, scale, renormalise)


def _route(
    parts: torch.Tensor,
    num_experts: int,
    top_k: int,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    scale: float,
    renormalise: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = parts.shape[0]
    weights = torch.empty((tokens, top_k), dtype=dtype, device=parts.device)
    experts = torch.empty((tokens, top_k), dtype=torch.int64, device=parts.device)
    if tokens:
        _choose[(tokens,)](
            parts, parts if bias is None else bias, weights, experts, scale,
            SPLITS=parts.shape[1], E=num_experts, EP=power_of_two(num_experts),
            TOP_K=top_k, KP=power_of_two(top_k), SIGMOID=bias is not None, RENORMALISE=renormalise,
            num_warps=1, **LAUNCH,
        )  # fmt: skip
    return weights, experts


def grouped_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    limit: float | None = None,
) -> torch.Tensor:
    """As the reference, in four launches."""
    tokens, top_k = experts.shape
    num_experts, hidden, middle = down.shape
    picks = tokens * top_k
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    order = torch.empty((picks,), dtype=torch.int32, device=x.device)
    starts = torch.empty((num_experts + 1,), dtype=torch.int32, device=x.device)
    active = torch.empty((picks, middle), dtype=x.dtype, device=x.device)
    parts = torch.empty((picks, hidden), dtype=x.dtype, device=x.device)
    _order[(num_experts,)](
        experts.contiguous(), order, starts, picks,
        E=num_experts, BLOCK=PICKS, num_warps=4, **LAUNCH,
    )  # fmt: skip
    sizes = {"E": num_experts, "ROWS": ROWS, "COLUMNS": COLUMNS, "STEP": STEP}
    tuned = {"num_warps": WARPS, "num_stages": STAGES}
    room = picks // ROWS + num_experts
    _up[(room, triton.cdiv(middle, COLUMNS))](
        x, gate_up, active, order, starts, token_stride(x), slot_stride(gate_up),
        H=hidden, MIDDLE=middle, TOP_K=top_k, LIMIT=limit, **sizes, **tuned, **LAUNCH,
    )  # fmt: skip
    _down[(room, triton.cdiv(hidden, COLUMNS))](
        active, down, weights.contiguous(), parts, order, starts, slot_stride(down),
        H=hidden, MIDDLE=middle, **sizes, **tuned, **LAUNCH,
    )  # fmt: skip
    _sum_choices[(tokens, triton.cdiv(hidden, SUM_BLOCK))](
        parts, out, TOP_K=top_k, H=hidden, BLOCK=min(SUM_BLOCK, power_of_two(hidden)),
        num_warps=4, **LAUNCH,
    )  # fmt: skip
    return out


@live
def _choose(
    parts, bias, weights, experts, scale,
    SPLITS: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, TOP_K: tl.constexpr,
    KP: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    """The experts of one token, the largest first; equal ones by their index."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EP)
    logits = tl.zeros([EP], tl.float32)
    for split in range(SPLITS):
        logits += tl.load(parts + (token * SPLITS + split) * E + e, mask=e < E, other=0.0)
    if SIGMOID:
        scores = sigmoid(logits)
        ranked = scores + tl.load(bias + e, mask=e < E, other=0.0).to(tl.float32)
    else:
        logits = rounded(logits, weights.dtype.element_ty).to(tl.float32)
        logits = tl.where(e < E, logits, float("-inf"))
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
        ranked = scores
    open_ = e < E
    place = tl.arange(0, KP)
    chosen = tl.zeros([KP], tl.float32)
    for choice in tl.static_range(TOP_K):
        best = tl.max(tl.where(open_, ranked, float("-inf")), 0)
        index = tl.min(tl.where(open_ & (ranked == best), e, EP), 0)
        # Nothing equals a NaN: then the lowest that is left, so that indices stay indices.
        index = tl.where(index < EP, index, tl.min(tl.where(open_, e, EP), 0))
        score = tl.sum(tl.where(e == index, scores, 0.0), 0)
        chosen = tl.where(place == choice, score, chosen)
        open_ = open_ & (e != index)
        tl.store(experts + token * TOP_K + choice, index.to(tl.int64))
    if RENORMALISE:
        total = tl.sum(chosen, 0)
        if SIGMOID:
            total += SIGMOID_ROUTE_EPS
        chosen = chosen / total
    if SIGMOID:
        chosen = chosen * scale
    chosen = rounded(chosen, weights.dtype.element_ty)
    tl.store(weights + token * TOP_K + place, chosen, mask=place < TOP_K)


@live
def _order(experts, order, starts, count, E: tl.constexpr, BLOCK: tl.constexpr):
    """The choices that fell on one expert, in rising order, behind those of all experts before."""
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = 0
    own = 0
    for first in range(0, count, BLOCK):
        chosen = tl.load(experts + first + lane, mask=first + lane < count, other=E)
        before += tl.sum((chosen < expert).to(tl.int32), 0)
        own += tl.sum((chosen == expert).to(tl.int32), 0)
    tl.store(starts + expert, before)
    if expert == E - 1:
        tl.store(starts + E, before + own)
    for first in range(0, count, BLOCK):
        chosen = tl.load(experts + first + lane, mask=first + lane < count, other=E)
        mine = (chosen == expert).to(tl.int32)
        rank = tl.cumsum(mine, 0) - mine
        tl.store(order + before + rank, (first + lane).to(tl.int32), mask=mine != 0)
        before += tl.sum(mine, 0)


@triton.jit
def _block_of(starts, block, E: tl.constexpr, ROWS: tl.constexpr):
    """Expert, first ordered choice and number of choices of a block; none: a number below one."""
    expert = row_of_block(starts, E, block, ROWS)
    begin = tl.load(starts + expert)
    first = (block - (begin // ROWS + expert)) * ROWS
    return expert, begin + first, tl.load(starts + expert + 1) - begin - first


@live
def _up(
    x, gate_up, active, order, starts, x_stride, expert_stride,
    H: tl.constexpr, MIDDLE: tl.constexpr, TOP_K: tl.constexpr, LIMIT: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """ROWS choices of one expert by COLUMNS of its middle: both products, then the activation."""
    expert, first, left = _block_of(starts, tl.program_id(0), E, ROWS)
    if left > 0:
        KEPT: tl.constexpr = active.dtype.element_ty
        row = tl.arange(0, ROWS)
        token = tl.load(order + first + row, mask=row < left, other=0) // TOP_K
        lines = x + token.to(tl.int64)[:, None] * x_stride
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        gates = gate_up + expert.to(tl.int64) * expert_stride + column[:, None] * H
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for step in range(0, H, STEP):
            h = step + tl.arange(0, STEP)
            inside = (h < H)[None, :]
            a = tl.load(lines + h[None, :], mask=(row < left)[:, None] & inside, other=0.0)
            there = (column < MIDDLE)[:, None] & inside
            b = tl.load(gates + h[None, :], mask=there, other=0.0)
            c = tl.load(gates + MIDDLE * H + h[None, :], mask=there, other=0.0)
            gate += product(a, tl.trans(b), KEPT, "tf32x3")
            up += product(a, tl.trans(c), KEPT, "tf32x3")
        gate = rounded(gate, KEPT).to(tl.float32)
        up = rounded(up, KEPT).to(tl.float32)
        tl.store(
            active + (first + row).to(tl.int64)[:, None] * MIDDLE + column[None, :],
            bounded_swiglu(gate, up, LIMIT, KEPT),
            mask=(row < left)[:, None] & (column < MIDDLE)[None, :],
        )


@live
def _down(
    active, down, weights, parts, order, starts, expert_stride,
    H: tl.constexpr, MIDDLE: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """ROWS choices of one expert by COLUMNS outputs, weighted, to where the choices stand."""
    expert, first, left = _block_of(starts, tl.program_id(0), E, ROWS)
    if left > 0:
        KEPT: tl.constexpr = parts.dtype.element_ty
        row = tl.arange(0, ROWS)
        lines = active + (first + row).to(tl.int64)[:, None] * MIDDLE
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        factors = down + expert.to(tl.int64) * expert_stride + column[:, None] * MIDDLE
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for step in range(0, MIDDLE, STEP):
            i = step + tl.arange(0, STEP)
            inside = (i < MIDDLE)[None, :]
            a = tl.load(lines + i[None, :], mask=(row < left)[:, None] & inside, other=0.0)
            b = tl.load(factors + i[None, :], mask=(column < H)[:, None] & inside, other=0.0)
            total += product(a, tl.trans(b), KEPT, "tf32x3")
        pick = tl.load(order + first + row, mask=row < left, other=0).to(tl.int64)
        weight = tl.load(weights + pick, mask=row < left, other=0.0).to(tl.float32)
        total = rounded(total, KEPT).to(tl.float32) * weight[:, None]
        tl.store(
            parts + pick[:, None] * H + column[None, :],
            rounded(total, KEPT),
            mask=(row < left)[:, None] & (column < H)[None, :],
        )


@live
def _sum_choices(parts, out, TOP_K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    """The choices of one token, in their order."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + token * TOP_K * H + h, mask=h < H, other=0.0).to(tl.float32)
    for choice in tl.static_range(1, TOP_K):
        at = parts + (token * TOP_K + choice) * H + h
        total += tl.load(at, mask=h < H, other=0.0).to(tl.float32)
    tl.store(out + token * H + h, rounded(total, out.dtype.element_ty), mask=h < H)
