"""Mixtures of experts: routing, and experts as one grouped product each way, without the host.

Contract and rounding: `millpond.ops.reference.moe`. Choices are ordered by expert, each expert's
choices are cut into blocks, and grids have room for as many blocks as there can be, so nothing is
read back. Few tokens or many, a sum has the same steps: a token's bytes depend on no neighbour.
"""

from __future__ import annotations

import torch
import triton.language as tl

from millpond.ops.triton.elementwise import bounded_swiglu
from millpond.ops.triton.layer_choices import experts_choice
from millpond.ops.triton.live import live
from millpond.ops.triton.narrow import narrow_parts
from millpond.ops.triton.shared import (
    LAUNCH,
    cdiv,
    power_of_two,
    product,
    rounded,
    sigmoid,
    slot_stride,
    token_stride,
)

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
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference, in four launches."""
    tokens, top_k = experts.shape
    num_experts, hidden, middle = down.shape
    picks = tokens * top_k
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    choice = experts_choice(picks, num_experts, x.dtype)
    room = min(picks, picks // choice.rows + num_experts)
    order = torch.empty((picks,), dtype=torch.int32, device=x.device)
    blocks = torch.empty((room, 3), dtype=torch.int32, device=x.device)
    active = torch.empty((picks, middle), dtype=x.dtype, device=x.device)
    parts = torch.empty((picks, hidden), dtype=x.dtype, device=x.device)
    _order[(num_experts,)](
        experts.contiguous(), order, blocks, picks, room,
        E=num_experts, EP=power_of_two(num_experts), ROWS=choice.rows, BLOCK=PICKS,
        num_warps=4, **LAUNCH,
    )  # fmt: skip
    tuned = {"STEP": choice.step, "num_warps": choice.warps, "num_stages": choice.stages}
    _up[(cdiv(middle, choice.middles), room)](
        x, gate_up, active, order, blocks, token_stride(x), slot_stride(gate_up),
        H=hidden, MIDDLE=middle, TOP_K=top_k, LIMIT=limit,
        ROWS=choice.rows, COLUMNS=choice.middles, **tuned, **LAUNCH,
    )  # fmt: skip
    _down[(cdiv(hidden, choice.outputs), room)](
        active, down, weights.contiguous(), parts, order, blocks, slot_stride(down),
        H=hidden, MIDDLE=middle, ROWS=choice.rows, COLUMNS=choice.outputs, **tuned, **LAUNCH,
    )  # fmt: skip
    more = out if shared is None else shared
    share = more if shared_gate is None else shared_gate
    _sum_choices[(tokens, cdiv(hidden, SUM_BLOCK))](
        parts, more, share, out, token_stride(more), token_stride(share),
        SHARED=shared is not None, GATED=shared_gate is not None,
        TOP_K=top_k, H=hidden, BLOCK=min(SUM_BLOCK, power_of_two(hidden)),
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
def _order(
    experts, order, blocks, count, room,
    E: tl.constexpr, EP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The choices that fell on one expert, in rising order, behind those of all experts before; and
    its blocks of them, behind theirs: expert, first ordered choice, how many."""
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    e = tl.arange(0, EP)
    counts = tl.zeros([EP], tl.int32)
    for first in range(0, count, BLOCK):
        here = first + lane < count
        chosen = tl.load(experts + first + lane, mask=here, other=0).to(tl.int32)
        counts += tl.histogram(chosen, EP, mask=here)
    earlier = tl.where(e < expert, counts, 0)
    before = tl.sum(earlier, 0)
    block = tl.sum((earlier + (ROWS - 1)) // ROWS, 0)
    own = tl.sum(tl.where(e == expert, counts, 0), 0)
    for first in range(0, own, ROWS):
        entry = blocks + (block + first // ROWS) * 3
        tl.store(entry, expert)
        tl.store(entry + 1, before + first)
        tl.store(entry + 2, tl.minimum(own - first, ROWS))
    if expert == E - 1:
        for empty in range(block + (own + ROWS - 1) // ROWS, room):
            tl.store(blocks + empty * 3 + 2, 0)
    for first in range(0, count, BLOCK):
        chosen = tl.load(experts + first + lane, mask=first + lane < count, other=E)
        mine = (chosen == expert).to(tl.int32)
        rank = tl.cumsum(mine, 0) - mine
        tl.store(order + before + rank, (first + lane).to(tl.int32), mask=mine != 0)
        before += tl.sum(mine, 0)


@live
def _up(
    x, gate_up, active, order, blocks, x_stride, expert_stride,
    H: tl.constexpr, MIDDLE: tl.constexpr, TOP_K: tl.constexpr, LIMIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """ROWS choices of one expert by COLUMNS of its middle: both products, then the activation."""
    block = blocks + tl.program_id(1) * 3
    left = tl.load(block + 2)
    if left > 0:
        expert = tl.load(block)
        first = tl.load(block + 1)
        KEPT: tl.constexpr = active.dtype.element_ty
        row = tl.arange(0, ROWS)
        token = tl.load(order + first + row, mask=row < left, other=0) // TOP_K
        lines = x + token.to(tl.int64)[:, None] * x_stride
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
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
    active, down, weights, parts, order, blocks, expert_stride,
    H: tl.constexpr, MIDDLE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """ROWS choices of one expert by COLUMNS outputs, weighted, to where the choices stand."""
    block = blocks + tl.program_id(1) * 3
    left = tl.load(block + 2)
    if left > 0:
        expert = tl.load(block)
        first = tl.load(block + 1)
        KEPT: tl.constexpr = parts.dtype.element_ty
        row = tl.arange(0, ROWS)
        lines = active + (first + row).to(tl.int64)[:, None] * MIDDLE
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
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
def _sum_choices(
    parts, shared, share, out, shared_stride, share_stride,
    SHARED: tl.constexpr, GATED: tl.constexpr, TOP_K: tl.constexpr, H: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The choices of one token, in their order, then what all tokens share."""
    KEPT: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + token * TOP_K * H + h, mask=h < H, other=0.0).to(tl.float32)
    for choice in tl.static_range(1, TOP_K):
        at = parts + (token * TOP_K + choice) * H + h
        total += tl.load(at, mask=h < H, other=0.0).to(tl.float32)
    if SHARED:
        more = tl.load(shared + token * shared_stride + h, mask=h < H, other=0.0).to(tl.float32)
        if GATED:
            passing = sigmoid(tl.load(share + token * share_stride).to(tl.float32))
            more = rounded(more * rounded(passing, KEPT).to(tl.float32), KEPT).to(tl.float32)
        total = rounded(total, KEPT).to(tl.float32) + more
    tl.store(out + token * H + h, rounded(total, KEPT), mask=h < H)
