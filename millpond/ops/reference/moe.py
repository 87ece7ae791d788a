"""Mixtures of experts: two ways to route, and experts applied to the tokens that chose them."""

from __future__ import annotations

import torch

from millpond.ops.reference.dense import sigmoid_gate, swiglu
from millpond.ops.reference.elementwise import row_sum, sigmoid
from millpond.ops.reference.linear import linear

SIGMOID_ROUTE_EPS = 1e-20


def moe_route_softmax(
    x: torch.Tensor, gate: torch.Tensor, *, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, the `top_k` largest, renormalised: x [T, H], gate [E, H].

    Logits in model dtype, softmax in fp32. -> weights [T, k] in model dtype, experts [T, k] int64;
    equal probabilities go to the lower expert.
    """
    logits = linear(x, gate).float()
    likely = torch.exp(logits - logits.amax(-1, keepdim=True))
    likely = likely / row_sum(likely)
    experts = _largest(likely, top_k)
    weights = likely.gather(-1, experts)
    return (weights / row_sum(weights)).to(x.dtype), experts


def moe_route_sigmoid(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    scale: float,
    renormalise: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sigmoid scores; the bias [E] takes part in the choice only: x [T, H], gate [E, H], all fp32.

    -> weights [T, k] fp32 (normalised to sum 1 if asked, then times `scale`), experts [T, k] int64.
    """
    scores = sigmoid(linear(x.float(), gate.float()))
    experts = _largest(scores + bias.float(), top_k)
    weights = scores.gather(-1, experts)
    if renormalise:
        weights = weights / (row_sum(weights) + SIGMOID_ROUTE_EPS)
    return weights * scale, experts


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
    """Sum over a token's experts of weight * down(swiglu(gate_up x)): x [T, H] -> [T, H].

    weights, experts [T, k]; gate_up [E, 2 I, H] (gate rows first), down [E, H, I]. Each expert's
    output is weighted and rounded to the model dtype; the k of a token are added in the order of
    `experts`, in fp32. To their sum, rounded, is added what all tokens share [T, H], if given,
    after `sigmoid_gate` with `shared_gate` [T, 1], if given.
    """
    tokens, top_k = experts.shape
    order = torch.sort(experts.reshape(-1), stable=True).indices
    counts = torch.bincount(experts.reshape(-1), minlength=gate_up.shape[0]).tolist()
    parts = x.new_empty((tokens * top_k, x.shape[1]))
    for expert, picks in enumerate(order.split(counts)):
        if picks.numel():
            hidden = linear(x[picks // top_k], gate_up[expert])
            gate, up = hidden.chunk(2, -1)
            parts[picks] = linear(swiglu(gate, up, limit), down[expert])
    weighted = (parts.view(tokens, top_k, -1) * weights[..., None]).to(x.dtype).float()
    total = weighted[:, 0]
    for choice in range(1, top_k):
        total = total + weighted[:, choice]
    routed = total.to(x.dtype)
    if shared is None:
        return routed
    return routed + (shared if shared_gate is None else sigmoid_gate(shared, shared_gate))


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices [T, count] of each row's largest scores, largest first; ties to the lower index."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]
