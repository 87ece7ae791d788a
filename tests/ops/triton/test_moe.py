"""Routing and grouped experts against the reference; ties, NaN, experts of nobody and of many."""

from __future__ import annotations

import pytest
import torch

from millpond.ops.reference import moe as reference
from millpond.ops.triton import layer_choices
from tests.ops.triton.layers import DTYPES, NAN, far, on, poisoned
from tests.ops.triton.side_by_side import equal_bytes
from tests.ops.triton.tolerances import within

kernels = pytest.importorskip("millpond.ops.triton.moe")
pytestmark = pytest.mark.usefixtures(poisoned.__name__)

TOP_K = 3


def random(*shape: int, dtype: torch.dtype, made: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(made)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", [6, 70])
def test_softmax_routes_as_the_reference(
    experts: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, gate = random(5, 600, dtype=dtype, made=1), random(experts, 600, dtype=dtype, made=2) / 20
    expected = reference.moe_route_softmax(x, gate, top_k=TOP_K)
    found = kernels.moe_route_softmax(x.to(device), gate.to(device), top_k=TOP_K)
    assert torch.equal(found[1].cpu(), expected[1])
    torch.testing.assert_close(found[0].cpu(), expected[0], **within("routes", dtype))
    alone = kernels.moe_route_softmax(x[-1:].to(device), gate.to(device), top_k=TOP_K)
    assert equal_bytes(alone[0].cpu(), found[0][-1:].cpu())


@pytest.mark.parametrize("renormalise", [False, True])
def test_sigmoid_routes_as_the_reference(renormalise: bool, device: torch.device) -> None:
    x = random(5, 100, dtype=torch.bfloat16, made=1)
    gate = random(20, 100, dtype=torch.float32, made=2) / 10
    bias = random(20, dtype=torch.float32, made=3)
    named = {"top_k": TOP_K, "scale": 2.5, "renormalise": renormalise}
    expected = reference.moe_route_sigmoid(x, gate, bias, **named)
    found = kernels.moe_route_sigmoid(x.to(device), gate.to(device), bias.to(device), **named)
    assert torch.equal(found[1].cpu(), expected[1])
    torch.testing.assert_close(found[0].cpu(), expected[0], **within("routes", torch.float32))


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of NaN
def test_equal_scores_go_to_the_lower_expert_and_nan_to_valid_ones(device: torch.device) -> None:
    x = torch.ones(2, 16)
    x[1] = NAN
    gate = torch.zeros(6, 16)
    gate[4] = 1.0
    bias = torch.zeros(6)
    for found in (
        kernels.moe_route_softmax(x.to(device), gate.to(device), top_k=TOP_K),
        kernels.moe_route_sigmoid(
            x.to(device), gate.to(device), bias.to(device), top_k=TOP_K, scale=1.0, renormalise=True
        ),
    ):
        weights, experts = (part.cpu() for part in found)
        assert experts.tolist() == [[4, 0, 1], [0, 1, 2]]
        assert weights[0].isfinite().all()
        assert weights[1].isnan().all()


@pytest.mark.parametrize("crowd", [0, 1000], ids=["many", "few"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [None, 0.5])
def test_experts_equal_the_reference(
    limit: float | None, dtype: torch.dtype, crowd: int, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(layer_choices, "CROWD", crowd)
    tokens, hidden, middle, count = 75, 72, 40, 5
    x = random(tokens, hidden, dtype=dtype, made=1)
    gate_up = random(count, 2 * middle, hidden, dtype=dtype, made=2) / 8
    down = random(count, hidden, middle, dtype=dtype, made=3) / 6
    # Expert 2 is nobody's, expert 3 everybody's: two blocks of it, the second with a tail.
    order = torch.rand(tokens, 2, generator=torch.Generator().manual_seed(4)).argsort(1)
    experts = torch.cat((torch.full((tokens, 1), 3), torch.tensor([0, 4])[order]), 1)
    experts[0] = torch.tensor([1, 4, 0])
    weights = random(tokens, TOP_K, dtype=torch.float32, made=5).sigmoid()
    weights = weights.to(dtype if limit is None else torch.float32)
    gate_up[2], down[2] = NAN, NAN
    expected = reference.grouped_experts(x, weights, experts, gate_up, down, limit=limit)
    inputs = [v.to(device) for v in (weights, experts, gate_up, down)]
    found = kernels.grouped_experts(x.to(device), *inputs, limit=limit)
    torch.testing.assert_close(found.cpu(), expected, **within("experts", dtype))

    shared = random(tokens, hidden + 3, dtype=dtype, made=6)[:, :hidden]
    for gate in (None, random(tokens, 1, dtype=dtype, made=7)):
        also = {"limit": limit, "shared": shared, "shared_gate": gate}
        expected = reference.grouped_experts(x, weights, experts, gate_up, down, **also)
        also |= {
            "shared": on(device, shared),
            "shared_gate": gate if gate is None else gate.to(device),
        }
        both = kernels.grouped_experts(x.to(device), *inputs, **also)
        torch.testing.assert_close(both.cpu(), expected, **within("experts", dtype))

    few = slice(70, 73)
    alone = kernels.grouped_experts(
        x[few].to(device), inputs[0][few], inputs[1][few], *inputs[2:], limit=limit
    )
    assert equal_bytes(alone.cpu(), found[few].cpu())
    nobody = kernels.grouped_experts(x[:0].to(device), inputs[0][:0], inputs[1][:0], *inputs[2:])
    assert nobody.shape == (0, hidden)


def test_a_broken_token_stays_alone(device: torch.device) -> None:
    x = random(4, 16, dtype=torch.float32, made=1)
    gate_up = random(2, 32, 16, dtype=torch.float32, made=2)
    down = random(2, 16, 16, dtype=torch.float32, made=3)
    weights, experts = torch.ones(4, 1), torch.tensor([[0], [1], [0], [0]])
    inputs = [v.to(device) for v in (weights, experts, gate_up, down)]
    clean = kernels.grouped_experts(x.to(device), *inputs).cpu()
    x[2] = NAN
    broken = kernels.grouped_experts(x.to(device), *inputs).cpu()
    assert broken[2].isnan().all()
    assert equal_bytes(broken[[0, 1, 3]], clean[[0, 1, 3]])


def test_weights_may_begin_beyond_two_to_the_31_elements(device: torch.device) -> None:
    dtype = torch.bfloat16
    x = random(3, 16, dtype=dtype, made=1)
    gate_up, down = random(3, 32, 16, dtype=dtype, made=2), random(3, 16, 16, dtype=dtype, made=3)
    weights, experts = torch.ones(3, 1, dtype=dtype), torch.tensor([[2], [0], [2]])
    expected = reference.grouped_experts(x, weights, experts, gate_up, down)
    inputs = x.to(device), weights.to(device), experts.to(device)
    found = kernels.grouped_experts(*inputs, far(gate_up.to(device)), far(down.to(device)))
    torch.testing.assert_close(found.cpu(), expected, **within("experts", dtype))
