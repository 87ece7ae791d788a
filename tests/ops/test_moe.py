"""Routing and experts against a loop over tokens in fp64."""

from __future__ import annotations

import pytest
import torch

from millpond.ops.reference.moe import grouped_experts, moe_route_sigmoid, moe_route_softmax

EXPERTS, HIDDEN, INNER, TOP_K = 9, 20, 12, 3


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_softmax_routing_renormalises_the_largest() -> None:
    x, gate = torch.randn(30, HIDDEN), torch.randn(EXPERTS, HIDDEN)
    weights, experts = moe_route_softmax(x, gate, top_k=TOP_K)
    top = (x.double() @ gate.double().T).softmax(-1).topk(TOP_K)
    assert torch.equal(experts, top.indices)
    expected = top.values / top.values.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), expected, atol=1e-6, rtol=1e-6)
    assert moe_route_softmax(x.bfloat16(), gate.bfloat16(), top_k=2)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("renormalise", [True, False])
def test_sigmoid_routing_uses_its_bias_for_the_choice_only(renormalise: bool) -> None:
    x, gate, bias = torch.randn(30, HIDDEN), torch.randn(EXPERTS, HIDDEN), torch.randn(EXPERTS)
    weights, experts = moe_route_sigmoid(
        x, gate, bias, top_k=TOP_K, scale=2.5, renormalise=renormalise
    )
    scores = (x.double() @ gate.double().T).sigmoid()
    assert torch.equal(experts, (scores + bias).topk(TOP_K).indices)
    expected = scores.gather(1, experts)
    if renormalise:
        expected = expected / (expected.sum(-1, keepdim=True) + 1e-20)
    torch.testing.assert_close(weights.double(), expected * 2.5, atol=2e-6, rtol=2e-6)


def test_equal_scores_go_to_the_lower_expert() -> None:
    x, gate = torch.ones(4, HIDDEN), torch.zeros(EXPERTS, HIDDEN)
    assert moe_route_softmax(x, gate, top_k=3)[1].tolist() == [[0, 1, 2]] * 4
    found = moe_route_sigmoid(x, gate, torch.zeros(EXPERTS), top_k=3, scale=1.0, renormalise=True)
    assert found[1].tolist() == [[0, 1, 2]] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [None, 1.5])
def test_experts_are_applied_to_the_tokens_that_chose_them(
    limit: float | None, dtype: torch.dtype
) -> None:
    x = torch.randn(37, HIDDEN).to(dtype)
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN).to(dtype)
    down = torch.randn(EXPERTS, HIDDEN, INNER).to(dtype)
    experts = torch.stack([torch.randperm(EXPERTS - 1)[:TOP_K] for _ in range(37)])
    weights = torch.rand(37, TOP_K)
    out = grouped_experts(x, weights, experts, gate_up, down, limit=limit)
    assert out.dtype == dtype
    for t in range(37):
        expected = torch.zeros(HIDDEN, dtype=torch.float64)
        for w, e in zip(weights[t].double(), experts[t].tolist(), strict=True):
            g, u = (gate_up[e].double() @ x[t].double()).split(INNER)
            if limit is not None:
                g, u = g.clamp(max=limit), u.clamp(-limit, limit)
            expected += w * (down[e].double() @ (g * g.sigmoid() * u))
        tolerance = 1e-5 if dtype == torch.float32 else 0.03
        scale = expected.abs().max()
        assert (out[t].double() - expected).abs().max() <= tolerance * scale
