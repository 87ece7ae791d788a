"""Norms, gates, activations and rotary positions against the reference; rows by themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from millpond.ops.reference import dense as reference
from millpond.ops.reference import fused
from tests.ops.triton.layers import DTYPES, NAN, on, poisoned, view_of_wider
from tests.ops.triton.side_by_side import equal_bytes
from tests.ops.triton.tolerances import within

norms = pytest.importorskip("millpond.ops.triton.norms")
elements = pytest.importorskip("millpond.ops.triton.elementwise")
pytestmark = pytest.mark.usefixtures(poisoned.__name__)

EPS = 1e-5


def check(
    device: torch.device,
    found: Callable[..., torch.Tensor],
    expected: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
    rest: tuple[object, ...],
    line: str,
) -> None:
    """All tokens against the reference, and the last token by itself: `inputs` are by token."""
    moved = [on(device, x) for x in inputs]
    others = tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in rest)
    out = found(*moved, *others)
    wanted = expected(*inputs, *rest)
    assert out.dtype == wanted.dtype
    torch.testing.assert_close(out.cpu(), wanted, **within(line, wanted.dtype))
    alone = found(*[x[-1:] for x in moved], *others)
    assert equal_bytes(alone.cpu(), out[-1:].cpu())
    assert found(*[x[:0] for x in moved], *others).shape == wanted[:0].shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=["w32", "w16"])
@pytest.mark.parametrize("shape", [(5, 100), (3, 5, 24), (2, 3000)], ids=str)
def test_norms_equal_the_reference(
    shape: tuple[int, ...], weight_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    x, gate = (view_of_wider(*shape, dtype=dtype, made=made) for made in (1, 2))
    made = torch.Generator().manual_seed(3)
    weight, bias = (torch.randn(shape[-1], generator=made).to(weight_dtype) for _ in "ab")
    for name in ("rms_norm", "zero_centred_rms_norm"):
        ops = getattr(norms, name), getattr(reference, name)
        check(device, *ops, [x], (weight, EPS), "norms")
    check(device, norms.layer_norm, reference.layer_norm, [x], (weight, bias, EPS), "norms")
    if dtype == torch.float32 and weight_dtype == torch.bfloat16:
        return  # no model gates an fp32 value with less precise weights
    for name in ("gated_rms_norm_silu", "gated_rms_norm_sigmoid"):
        ops = getattr(norms, name), getattr(reference, name)
        check(device, *ops, [x, gate], (weight, EPS), "norms")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centred", [False, True])
def test_a_sum_is_given_back_and_normalised(
    zero_centred: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, y = (view_of_wider(5, 100, dtype=dtype, made=made) for made in (1, 2))
    norm = torch.randn(100, generator=torch.Generator().manual_seed(3)).to(dtype)
    named = {"eps": EPS, "zero_centred": zero_centred}
    expected = fused.add_norm(x, y, norm, **named)
    found = norms.add_norm(on(device, x), on(device, y), norm.to(device), **named)
    torch.testing.assert_close(found[0].cpu(), expected[0], **within("norms", dtype))
    assert equal_bytes(found[1].cpu(), expected[1])
    there = on(device, x)
    alone = norms.add_norm(there, None, norm.to(device), **named)
    assert alone[1] is there
    expected = fused.add_norm(x, None, norm, **named)
    torch.testing.assert_close(alone[0].cpu(), expected[0], **within("norms", dtype))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, of silu(-100)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_and_activations_equal_the_reference(
    dtype: torch.dtype, device: torch.device
) -> None:
    x, gate = (view_of_wider(4, 3, 350, dtype=dtype, made=made) for made in (1, 2))
    gate[1, 0, :3] = torch.tensor([100.0, -100.0, 0.0])
    check(device, elements.sigmoid_gate, reference.sigmoid_gate, [x, gate], (), "elements")
    for limit in (None, 2.5, 0.3):
        check(device, elements.swiglu, reference.swiglu, [gate, x], (limit,), "elements")
    x[0, 0, 0] = NAN
    gate[0, 0, 1] = NAN
    found = elements.swiglu(on(device, gate), on(device, x), 2.5).cpu()
    assert found[0, 0, :2].isnan().all()


def test_rotations_far_out_are_those_of_the_reference(device: torch.device) -> None:
    positions = torch.tensor([0, 1, 5, 70_000, 262_143, 1_010_000] * 5)
    expected = reference.rope_tables(positions, 12, 1e7)
    found = elements.rope_tables(positions.to(device), 12, 1e7)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-6, rtol=0.0)
    nothing = elements.rope_tables(positions[:0].to(device), 12, 1e7)
    assert [tuple(x.shape) for x in nothing] == [(0, 6)] * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(5, 20, 3), (6, 32, 8), (1, 16, 8)], ids=str)
def test_the_first_dimensions_are_rotated_the_others_pass(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    heads, dim, half = sizes
    x = view_of_wider(4, heads, dim, dtype=dtype, made=1)
    cos, sin = reference.rope_tables(torch.tensor([0, 5, 1000, 131071]), 2 * half, 1e6)
    check(device, elements.rotate_partial, reference.rotate_partial, [x, cos, sin], (), "elements")
    found = elements.rotate_partial(on(device, x), cos.to(device), sin.to(device)).cpu()
    assert equal_bytes(found[..., 2 * half :], x[..., 2 * half :].contiguous())
