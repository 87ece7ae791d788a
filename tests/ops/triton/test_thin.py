"""Products of one token, with what stands before and behind them, and of logits."""

from __future__ import annotations

import pytest
import torch

from millpond.ops.reference import fused as reference
from millpond.ops.reference.linear import linear
from millpond.ops.triton.layer_choices import ThinChoice, WideChoice
from tests.ops.triton.layers import DTYPES, on, poisoned, view_of_wider
from tests.ops.triton.side_by_side import equal_bytes
from tests.ops.triton.tolerances import within

kernels = pytest.importorskip("millpond.ops.triton.thin")
pytestmark = pytest.mark.usefixtures(poisoned.__name__)

CHOICES = [ThinChoice(8, 64, 4, 2), ThinChoice(16, 128, 4, 3)]
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype, made: int = 7) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(made)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choice", CHOICES, ids=["8x64", "16x128"])
@pytest.mark.parametrize("sizes", [(40, 96), (64, 256)], ids=str)
def test_a_product_of_one_token(
    sizes: tuple[int, int], choice: ThinChoice, dtype: torch.dtype, device: torch.device
) -> None:
    outputs, inner = sizes
    weight = random(outputs, inner, dtype=dtype) / inner**0.5
    x = view_of_wider(1, inner, dtype=dtype, made=1)
    found = kernels.thin_linear(on(device, x), weight.to(device), choice)
    torch.testing.assert_close(found.cpu(), linear(x, weight), **within("products", dtype))
    full = kernels.thin_linear(on(device, x), weight.to(device), choice, dtype=torch.float32)
    assert equal_bytes(full.cpu(), found.float().cpu())
    pairs = reference.linear_swiglu(x, weight, limit=0.5)
    found = kernels.thin_linear_swiglu(on(device, x), weight.to(device), choice, limit=0.5)
    torch.testing.assert_close(found.cpu(), pairs, **within("experts", dtype))


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
    x, y = (view_of_wider(1, inner, dtype=dtype, made=made) for made in (1, 2))
    inputs, moved = (x, y if adding else None), (on(device, x), on(device, y) if adding else None)
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


def test_several_tokens_are_refused(device: torch.device) -> None:
    x, weight = torch.zeros(2, 64, device=device), torch.zeros(8, 64, device=device)
    with pytest.raises(ValueError, match="2 tokens"):
        kernels.thin_linear(x, weight, CHOICES[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(40, 96), (64, 256)], ids=str)
def test_logits_leave_their_product_in_fp32_and_no_row_depends_on_another(
    sizes: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    outputs, inner = sizes
    choice = WideChoice(16, 64, 4, 2)
    weight = random(outputs, inner, dtype=dtype) / inner**0.5
    x = view_of_wider(19, inner, dtype=dtype, made=1)
    expected = linear(x, weight)
    found = kernels.wide_linear(on(device, x), weight.to(device), choice, dtype=torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.to(dtype).cpu(), expected, **within("products", dtype))
    assert equal_bytes(found.to(dtype).float().cpu(), found.cpu())
    some = kernels.wide_linear(on(device, x)[:17], weight.to(device), choice, dtype=torch.float32)
    assert equal_bytes(some.cpu(), found[:17].cpu())
    assert kernels.wide_linear(
        x[:0].to(device), weight.to(device), choice, dtype=torch.float32
    ).shape == (0, outputs)
