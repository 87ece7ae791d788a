"""CUDA kernels of the delta rule for training: one program a document and head, token by token.

The forward keeps the state after every token, so that the backward needs no recomputation.
"""

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _forward(q, k, v, g, beta, starts, out, states, H: tl.constexpr, D: tl.constexpr):
    document = tl.program_id(0) // H
    head = tl.program_id(0) % H
    first = tl.load(starts + document)
    end = tl.load(starts + document + 1)
    d = tl.arange(0, D)
    tile = d[:, None] * D + d[None, :]
    state = tl.zeros([D, D], tl.float32)
    for t in range(first, end):
        at = t * H + head
        b_q = tl.load(q + at * D + d)
        b_k = tl.load(k + at * D + d)
        b_v = tl.load(v + at * D + d)
        b_g = tl.load(g + at * D + d)
        b_beta = tl.load(beta + at)
        state *= tl.exp(b_g)[:, None]
        error = b_beta * (b_v - tl.sum(state * b_k[:, None], 0))
        state += b_k[:, None] * error[None, :]
        tl.store(out + at * D + d, tl.sum(state * b_q[:, None], 0))
        tl.store(states + at.to(tl.int64) * D * D + tile, state)


@triton.jit
def _backward(
    q, k, v, g, beta, starts, states, d_out, d_q, d_k, d_v, d_g, d_beta,
    H: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    document = tl.program_id(0) // H
    head = tl.program_id(0) % H
    first = tl.load(starts + document)
    end = tl.load(starts + document + 1)
    d = tl.arange(0, D)
    tile = d[:, None] * D + d[None, :]
    d_state = tl.zeros([D, D], tl.float32)
    after = tl.zeros([D, D], tl.float32)
    coming = tl.zeros([D, D], tl.float32)
    if first < end:
        at = (end - 1) * H + head
        after = tl.load(states + at.to(tl.int64) * D * D + tile)
        coming = tl.load(states + tl.maximum(at - H, head).to(tl.int64) * D * D + tile)
    for step in range(end - first):
        t = end - 1 - step
        at = t * H + head
        before = tl.where(t > first, coming, 0.0)
        coming = tl.load(states + tl.maximum(at - 2 * H, head).to(tl.int64) * D * D + tile)
        b_q = tl.load(q + at * D + d)
        b_k = tl.load(k + at * D + d)
        b_v = tl.load(v + at * D + d)
        b_g = tl.load(g + at * D + d)
        b_do = tl.load(d_out + at * D + d)
        b_beta = tl.load(beta + at)
        decayed = before * tl.exp(b_g)[:, None]
        gap = b_v - tl.sum(decayed * b_k[:, None], 0)
        error = b_beta * gap
        tl.store(d_q + at * D + d, tl.sum(after * b_do[None, :], 1))
        d_state += b_q[:, None] * b_do[None, :]
        d_error = tl.sum(d_state * b_k[:, None], 0)
        d_gap = b_beta * d_error
        key = tl.sum(d_state * error[None, :], 1) - tl.sum(decayed * d_gap[None, :], 1)
        tl.store(d_k + at * D + d, key)
        tl.store(d_v + at * D + d, d_gap)
        tl.store(d_beta + at, tl.sum(d_error * gap, 0))
        d_state -= b_k[:, None] * d_gap[None, :]
        tl.store(d_g + at * D + d, tl.sum(d_state * decayed, 1))
        d_state *= tl.exp(b_g)[:, None]
        after = before


class DeltaRule(torch.autograd.Function):
    """`training.delta.delta_rule` with hand-written gradients; all tensors float32."""

    @staticmethod
    def forward(ctx: Any, *args: torch.Tensor) -> torch.Tensor:
        *tensors, starts = args
        q, k, v, g, beta = (x.contiguous() for x in tensors)
        tokens, heads, width = q.shape
        out = torch.zeros_like(v)
        states = q.new_empty(tokens, heads, width, width)
        grid = ((starts.numel() - 1) * heads,)
        _forward[grid](q, k, v, g, beta, starts, out, states, heads, width, num_warps=1)
        ctx.save_for_backward(q, k, v, g, beta, starts, states)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, g, beta, starts, states = ctx.saved_tensors
        _, heads, width = q.shape
        outs = [torch.zeros_like(x) for x in (q, k, v, g, beta)]
        grid = ((starts.numel() - 1) * heads,)
        _backward[grid](
            q,
            k,
            v,
            g,
            beta,
            starts,
            states,
            grads[0].contiguous(),
            *outs,
            heads,
            width,
            num_warps=1,
        )
        return (*outs, None)
