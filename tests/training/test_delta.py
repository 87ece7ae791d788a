"""The delta rule: the chunked form and the kernels against the recurrence written out."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from training.delta import CLEAR, chunked
from training.sinkhorn import sinkhorn


def inputs(tokens: int, width: int = 16, heads: int = 2) -> list[Tensor]:
    """q, k, v, g, beta as the model makes them, strong decays included."""
    torch.manual_seed(tokens)
    q, k = (torch.nn.functional.normalize(torch.randn(tokens, heads, width), dim=-1) for _ in "qk")
    g = -5 * torch.rand(tokens, heads, width) ** 2
    return [q * width**-0.5, k, torch.randn(tokens, heads, width), g, torch.rand(tokens, heads)]


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Token by token, in float64."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    state = q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
    out = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, :, None]
        error = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * error[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(out)


def in_rows(*parts: Tensor) -> list[Tensor]:
    """[N, H, ...] as one row [1, H, N, ...]."""
    return [x[None].transpose(1, 2) for x in parts]


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 100])
def test_the_chunked_form_equals_the_recurrence(tokens: int) -> None:
    parts = inputs(tokens)
    got = chunked(*in_rows(*parts)).transpose(1, 2)[0]
    torch.testing.assert_close(got.double(), recurrence(*parts), atol=2e-6, rtol=1e-5)


def test_a_cleared_token_starts_from_nothing() -> None:
    parts = inputs(50)
    parts[3][20] = CLEAR
    got = chunked(*in_rows(*parts)).transpose(1, 2)[0]
    alone = recurrence(*(x[20:] for x in parts))
    torch.testing.assert_close(got[20:].double(), alone, atol=2e-6, rtol=1e-5)


def test_sinkhorn_ends_on_columns_after_a_fixed_count() -> None:
    torch.manual_seed(0)
    matrix = torch.softmax(3 * torch.randn(64, 4, 4), -1) + 1e-6
    done = sinkhorn(matrix, 20, 1e-6)
    torch.testing.assert_close(done.sum(-2), torch.ones(64, 4), atol=1e-5, rtol=0)
    assert (
        done.sum(-1) - 1
    ).abs().max() > 1e-4  # extreme rows have not converged; that is the model
    assert not torch.equal(done, sinkhorn(matrix, 21, 1e-6))


_KERNELS = """
import torch
from training.delta import chunked
from training.delta_cuda import DeltaRule
from tests.training.test_delta import in_rows, inputs
from training.sinkhorn import sinkhorn
starts = torch.tensor([0, 5, 21, 24, 24], dtype=torch.int32)
parts = inputs(24)
parts[3][[0, 5, 21]] = -60.0
both = [[x.clone().requires_grad_() for x in parts] for _ in range(2)]
outs = [DeltaRule.apply(*both[0], starts), chunked(*in_rows(*both[1])).transpose(1, 2)[0]]
torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-4)
weight = torch.randn_like(outs[0])
for out in outs:
    (out * weight).sum().backward()
for a, b in zip(*both):
    torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-3)
matrix = torch.softmax(torch.randn(70, 2, 2), -1) + 1e-6
both = [matrix.clone().requires_grad_() for _ in range(2)]
outs = [torch.ops.millpond_training.sinkhorn(both[0], 20, 1e-6), sinkhorn(both[1], 20, 1e-6)]
torch.testing.assert_close(*outs, atol=1e-6, rtol=1e-5)
weight = torch.randn_like(matrix)
for out in outs:
    (out * weight).sum().backward()
torch.testing.assert_close(both[0].grad, both[1].grad, atol=1e-4, rtol=1e-3)
"""


@pytest.mark.interpreter
def test_the_kernels_and_their_gradients_equal_the_plain_forms() -> None:
    pytest.importorskip("triton")
    where = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": "."}
    subprocess.run([sys.executable, "-c", _KERNELS], env=where, check=True, timeout=110)
