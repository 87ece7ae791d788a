"""Products of few tokens, with what stands before and behind them, against the reference."""

from __future__ import annotations

import pytest
import torch

from millpond.ops.reference import fused as reference
from millpond.ops.reference.linear import linear
from millpond.ops.triton.layer_choices import ThinChoice, WideChoice
from tests.ops.triton.layers import DTYPES, poisoned
from tests.ops.triton.side_by_side import equal_bytes
from tests.ops.triton.test_dense import on, view_of_wider
from tests.ops.triton.tolerances import within

kernels = pytest.importorskip("millpond.ops.triton.thin")
pytestmark = pytest.mark.usefixtures(poisoned.__name__)

CHOICES = [ThinChoice(8, 64, 4, 2), ThinChoice(16, 128, 4, 3)]
TOKENS = [1, 3]
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype, made: int = 7) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(made)).to(dtype)


@pytest.fixture(params=CHOICES, ids=["8x64", "16x128"])
def choice(request: pytest.FixtureRequest) -> ThinChoice:
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(40, 96), (64, 256)], ids=str)
def test_a_thin_product_is_the_product_and_no_row_depends_on_another(
    sizes: tuple[int, int], dtype: torch.dtype, choice: ThinChoice, device: torch.device
) -> None:
    outputs, inner = sizes
    weight = random(outputs, inner, dtype=dtype) / inner**0.5
    for tokens in TOKENS:
        x = view_of_wider(tokens, inner, dtype=dtype, made=1)
        found = kernels.thin_linear(on(device, x), weight.to(device), choice)
        torch.testing.assert_close(found.cpu(), linear(x, weight), **within("products", dtype))
        some = kernels.thin_linear(on(device, x)[-1:], weight.to(device), choice)
        assert equal_bytes(some.cpu(), found[-1:].cpu())
        full = kernels.thin_linear(on(device, x), weight.to(device), choice, dtype=torch.float32)
        assert equal_bytes(full.cpu(), found.float().cpu())
    nothing = kernels.thin_linear(x[:0].to(device), weight.to(device), choice)
    assert nothing.shape == (0, outputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("adding", [False, True])
def test_sum_norm_product_and_activation_in_one(
    adding: bool, zero_centred: bool, dtype: torch.dtype, device: torch.device
) -> None:
    outputs, inner, choice = 12, 200, CHOICES[adding]
    norm = random(inner, dtype=dtype, made=3) / 4
    if not zero_centred:
        norm = norm + 1
    weight = random(2 * outputs, inner, dtype=dtype) / inner**0.5
    named = {"eps": EPS, "zero_centred": zero_centred}
    for tokens in TOKENS:
        x, y = (view_of_wider(tokens, inner, dtype=dtype, made=made) for made in (1, 2))
        inputs, moved = (x, y if adding else None), (on(device, x), on(device, y))
        if not adding:
            moved = (moved[0], None)
        rest = norm.to(device), weight.to(device)
        expected = reference.norm_linear(*inputs, norm, weight, **named)
        found = kernels.thin_norm_linear(*moved, *rest, choice, **named)
        torch.testing.assert_close(found[0].cpu(), expected[0], **within("products", dtype))
        assert equal_bytes(found[1].cpu().contiguous(), expected[1].contiguous())
        for limit in (None, 0.5):
            expected = reference.norm_swiglu(*inputs, norm, weight, limit=limit, **named)
            found = kernels.thin_norm_swiglu(*moved, *rest, choice, limit=limit, **named)
            torch.testing.assert_close(found[0].cpu(), expected[0], **within("experts", dtype))
            assert equal_bytes(found[1].cpu().contiguous(), expected[1].contiguous())


def test_a_product_and_its_activation_in_one(choice: ThinChoice, device: torch.device) -> None:
    dtype, outputs, inner = torch.bfloat16, 12, 96
    weight = random(2 * outputs, inner, dtype=dtype) / inner**0.5
    x = view_of_wider(4, inner, dtype=dtype, made=1)
    for limit in (None, 0.5):
        expected = reference.linear_swiglu(x, weight, limit=limit)
        found = kernels.thin_linear_swiglu(on(device, x), weight.to(device), choice, limit=limit)
        torch.testing.assert_close(found.cpu(), expected, **within("experts", dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("silu", [False, True])
def test_a_gated_norm_by_heads_and_a_product_in_one(
    silu: bool, dtype: torch.dtype, device: torch.device
) -> None:
    outputs, heads, size, choice = 12, 5, 32, CHOICES[silu]
    weight = random(outputs, heads * size, dtype=dtype) / (heads * size) ** 0.5
    for norm in (random(size, dtype=torch.float32, made=3), random(size, dtype=dtype, made=3)):
        for tokens in TOKENS:
            x, gate = (
                view_of_wider(tokens, heads, size, dtype=dtype, made=made) for made in (1, 2)
            )
            named = {"eps": EPS, "silu": silu}
            (expected,) = reference.gated_norm_linear(x, gate, norm, weight, **named)
            found = kernels.thin_gated_norm_linear(
                on(device, x), on(device, gate), norm.to(device), weight.to(device), choice, **named
            )
            torch.testing.assert_close(found.cpu(), expected, **within("products", dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(40, 96), (64, 256)], ids=str)
def test_a_wide_product_is_the_product_whole_or_in_parts(
    sizes: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    outputs, inner = sizes
    choice = WideChoice(16, 64, 4, 2, 8)
    weight = random(2 * outputs, inner, dtype=dtype) / inner**0.5
    there = weight.to(device)
    x = view_of_wider(19, inner, dtype=dtype, made=1)
    expected = linear(x, weight)
    found = kernels.wide_linear(on(device, x), there, choice)
    torch.testing.assert_close(found.cpu(), expected, **within("products", dtype))
    full = kernels.wide_linear(on(device, x), there, choice, dtype=torch.float32)
    assert equal_bytes(full.cpu(), found.float().cpu())
    alone = kernels.wide_linear(on(device, x)[-3:], there, choice)
    if device.type == "cpu":
        assert equal_bytes(alone.cpu(), found[-3:].cpu())
    parts = kernels.wide_parts(on(device, x), there[:outputs], choice)
    assert parts.shape == (2, 19, outputs)
    joined = reference.whole(parts.cpu(), dtype)
    torch.testing.assert_close(joined, expected[:, :outputs], **within("products", dtype))
    for limit in (None, 0.5):
        active = reference.linear_swiglu(x, weight, limit=limit)
        found = kernels.wide_linear(on(device, x), there, choice, swiglu=True, limit=limit)
        torch.testing.assert_close(found.cpu(), active, **within("experts", dtype))
