"""Norms, activations, rotary positions and hyper-connections against their formulas in fp64."""

from __future__ import annotations

import pytest
import torch

from millpond.ops.reference import dense
from millpond.ops.reference.hyper import hyper_mean, hyper_post, hyper_pre

EPS = 1e-5


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def unit(x: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(7, 3, 40) * 2


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(40, generator=torch.Generator().manual_seed(1))


def test_norms_are_their_formulas(x: torch.Tensor, weight: torch.Tensor) -> None:
    gate, bias = torch.randn_like(x), torch.randn(40)
    close(dense.rms_norm(x, weight, EPS), unit(x) * weight)
    close(dense.zero_centred_rms_norm(x, weight, EPS), unit(x) * (1 + weight.double()))
    centred = x.double() - x.double().mean(-1, keepdim=True)
    close(dense.layer_norm(x, weight, bias, EPS), unit(centred) * weight + bias)
    g = gate.double()
    close(dense.gated_rms_norm_silu(x, gate, weight, EPS), unit(x) * weight * g * g.sigmoid())
    close(dense.gated_rms_norm_sigmoid(x, gate, weight, EPS), unit(x) * weight * g.sigmoid())


def test_each_norm_rounds_where_its_family_does(x: torch.Tensor, weight: torch.Tensor) -> None:
    """In bf16 the order of rounding shows: these are the families' own expressions."""
    x, weight = x.bfloat16(), weight.bfloat16()
    gate = torch.randn(x.shape).bfloat16()
    n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    early, late = weight * n.bfloat16(), (n * weight.float()).bfloat16()
    assert torch.equal(dense.rms_norm(x, weight, EPS), early)
    assert not torch.equal(early, late)
    centred = (n * (1.0 + weight.float())).bfloat16()
    assert torch.equal(dense.zero_centred_rms_norm(x, weight, EPS), centred)
    silu = gate.float() / (1 + torch.exp(-gate.float()))
    for w in (weight, weight.float()):  # some checkpoints keep this weight in fp32
        expected = ((w * n.bfloat16()) * silu).bfloat16()
        assert torch.equal(dense.gated_rms_norm_silu(x, gate, w, EPS), expected)
    sigmoid = 1 / (1 + torch.exp(-gate.float()))
    expected = (n * weight.float() * sigmoid).bfloat16()
    assert torch.equal(dense.gated_rms_norm_sigmoid(x, gate, weight, EPS), expected)


def test_swiglu_clamps_the_gate_from_above_only() -> None:
    gate = torch.tensor([20.0, -20.0, 1.0])
    up = torch.tensor([3.0, 3.0, -30.0])
    g, u = torch.tensor([10.0, -20.0, 1.0]).double(), torch.tensor([3.0, 3.0, -10.0]).double()
    close(dense.swiglu(gate, up, 10.0), g * g.sigmoid() * u)
    g, u = gate.double(), up.double()
    close(dense.swiglu(gate, up), g * g.sigmoid() * u)
    close(dense.sigmoid_gate(up, gate), u * g.sigmoid())


def test_rotation_turns_the_first_dimensions_in_pairs_half_apart() -> None:
    positions = torch.tensor([0, 5, 70_000])
    cos, sin = dense.rope_tables(positions, 8, 1e7)
    x = torch.randn(3, 2, 20)
    out = dense.rotate_partial(x, cos, sin)
    inverse = 1e7 ** (-torch.arange(0, 8, 2, dtype=torch.float32) / 8)
    angle = (positions[:, None].float() * inverse).double()[:, None]
    pair = torch.complex(x[..., :4].double(), x[..., 4:8].double())
    turned = pair * torch.polar(torch.ones_like(angle), angle)
    close(out[..., :4], turned.real, 2e-2)  # the angle itself is fp32: 70 000 rad to 4e-3
    close(out[:2, :, :4], turned[:2].real)
    close(out[:2, :, 4:8], turned[:2].imag)
    assert torch.equal(out[..., 8:], x[..., 8:])
    assert torch.equal(out[0], x[0])
    assert dense.rotate_partial(x.bfloat16(), cos, sin).dtype == torch.bfloat16


def test_embedding_picks_rows() -> None:
    table = torch.randn(9, 4)
    assert torch.equal(dense.embedding(torch.tensor([8, 0, 8]), table), table[[8, 0, 8]])


STREAMS, HIDDEN, ITERATIONS, HYPER_EPS = 4, 24, 20, 1e-6


def test_hyper_connections_are_their_formula() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, STREAMS, HIDDEN)
    fn = torch.randn(24, STREAMS * HIDDEN) * 0.3
    base, scale = torch.randn(24), torch.rand(3) + 0.5
    post, mix, collapsed = hyper_pre(
        x, fn, base, scale, iterations=ITERATIONS, hyper_eps=HYPER_EPS, norm_eps=EPS
    )
    m = unit(x.flatten(1)) @ fn.double().T
    pre = (m[:, :4] * scale[0] + base[:4]).sigmoid() + HYPER_EPS
    expected_post = 2 * (m[:, 4:8] * scale[1] + base[4:8]).sigmoid()
    c = (m[:, 8:] * scale[2] + base[8:]).view(5, 4, 4).softmax(-1) + HYPER_EPS
    c = c / (c.sum(1, keepdim=True) + HYPER_EPS)
    for _ in range(ITERATIONS - 1):
        c = c / (c.sum(2, keepdim=True) + HYPER_EPS)
        c = c / (c.sum(1, keepdim=True) + HYPER_EPS)
    close(post, expected_post)
    close(mix, c, 5e-6)
    close(collapsed, torch.einsum("tn,tnh->th", pre, x.double()), 5e-6)
    y = torch.randn(5, HIDDEN)
    expected = expected_post[..., None] * y[:, None] + torch.einsum("tjk,tjh->tkh", c, x.double())
    close(hyper_post(y, x, post, mix), expected, 1e-5)
    close(hyper_mean(x), x.double().mean(1))


def test_hyper_weights_are_rounded_to_the_model_dtype_before_they_mix() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 4, HIDDEN).bfloat16(), torch.randn(5, HIDDEN).bfloat16()
    post, mix = torch.rand(5, 4) * 2, torch.rand(5, 4, 4).softmax(-1)
    mixed = torch.einsum("tjk,tjh->tkh", mix.bfloat16().double(), x.double()).bfloat16()
    expected = post.bfloat16()[..., None] * y[:, None] + mixed
    assert torch.equal(hyper_post(y, x, post, mix), expected)
