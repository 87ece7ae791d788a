"""Layers by themselves: rows do not depend on each other, whatever their number."""

from __future__ import annotations

import pytest
import torch

from millpond.models.weights import Dummy, Weights
from millpond.nn.linear import Linear
from millpond.nn.residual import RMSNorm
from millpond.ops.bind import Bound, bind
from tests.support.oracle import CPU

ROWS = range(1, 66)


@pytest.fixture(scope="module")
def ops() -> Bound:
    return bind(CPU)


@pytest.fixture
def weights() -> Weights:
    return Weights(Dummy(lambda *_: None), dtype=torch.float32, device=CPU)


def test_stacked_matrices_give_each_its_own_product(weights: Weights, ops: Bound) -> None:
    parts = (("a.weight", 24), ("b", 40), ("c.weight", 8))
    x, y = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(0))
    layer = Linear(weights, parts, 48, ops)
    norm = RMSNorm(weights, "norm.weight", 48, 1e-6, ops)
    inner = norm(x + y)
    split, total = layer.split(norm, x, y)
    assert torch.equal(total, x + y)
    for got, (name, rows) in zip(split, parts, strict=True):
        torch.testing.assert_close(got, inner @ weights.take(name, (rows, 48)).T)
        assert got.stride() == (72, 1)  # a view: nothing was copied
    first, total = layer.split(norm, x + y, None, 2)
    assert [tuple(part.shape) for part in first] == [(5, 24), (5, 40)]
    torch.testing.assert_close(first[1], split[1])
    assert torch.equal(total, x + y)


def test_per_head_products_are_those_of_each_head(ops: Bound) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(s, generator=generator) for s in ((33, 4, 24), (4, 24, 40)))
    expected = torch.einsum("thk,hkn->thn", x, weight)
    torch.testing.assert_close(ops.linear_by_head(x, weight), expected)


def test_per_head_products_do_not_depend_on_the_number_of_rows(ops: Bound) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(s, generator=generator) for s in ((65, 4, 24), (4, 24, 40)))
    whole = ops.linear_by_head(x, weight)
    for rows in ROWS:
        assert torch.equal(ops.linear_by_head(x[:rows].clone(), weight), whole[:rows]), rows
