"""The convolution of prompt rows against the reference: outputs, windows and reports."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millpond.ops.batch import WriteLog
from millpond.ops.reference.conv import conv_prefill
from tests.ops.batches import make_rows, strided_bank
from tests.ops.triton.side_by_side import NAN, bank_copy, equal_bytes, run
from tests.ops.triton.tolerances import within

pytestmark = pytest.mark.usefixtures("poisoned")

CHANNELS, WIDTH = 150, 4  # two blocks of channels, the second with a tail
DTYPES = [torch.float32, torch.bfloat16]


def inputs(
    tokens: int, dtype: torch.dtype, width: int = WIDTH
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, a view of wider rows as the projections give it, and the weight."""
    made = torch.Generator().manual_seed(tokens)
    wide = torch.full((tokens, CHANNELS + 30), NAN, dtype=dtype)
    wide[:, :CHANNELS] = torch.randn(tokens, CHANNELS, generator=made).to(dtype)
    return wide[:, :CHANNELS], torch.randn(CHANNELS, width, generator=made)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_rows_of_any_length_give_the_outputs_windows_and_report_of_the_reference(
    dtype: torch.dtype, device: torch.device
) -> None:
    lengths = [130, 1, 0, 2, 3, 0, 64, 33]
    sources = [3, 3, 3, -1, 5, -1, 6, 2]
    targets = [7, 8, 13, 9, 5, 1, -1, 2]
    exports = [
        (0, 64, 10), (0, 128, 11), (0, 1, 12), (3, 1, 14), (4, 2, -1), (6, 64, 4), (4, 3, 15),
    ]  # fmt: skip
    x, weight = inputs(sum(lengths), dtype)
    bank = strided_bank(16, (CHANNELS, WIDTH - 1), dtype)
    bank[[7, 8, 9, 10, 11, 12, 13, 14, 15, 1, 4]] = NAN
    expected_bank, found_bank = bank_copy(bank), bank_copy(bank)
    rows = make_rows(lengths, sources, targets, exports)
    other = replace(rows, written=WriteLog())
    expected = conv_prefill(x, weight, bank=expected_bank, rows=rows)
    found = run("conv_prefill", device, x, weight, bank=found_bank, rows=other)
    torch.testing.assert_close(found, expected, **within("conv", dtype))
    assert equal_bytes(found_bank, expected_bank)
    assert other.written.agreed() == rows.written.agreed()


@pytest.mark.parametrize("width", [2, 3])
def test_a_narrower_convolution_is_one_with_taps_of_zero(width: int, device: torch.device) -> None:
    x, weight = inputs(8, torch.float32, width)
    bank = strided_bank(8, (CHANNELS, width - 1))
    bank[[5, 6]] = NAN
    banks = [bank_copy(bank) for _ in "ab"]
    rows = make_rows([1, 2, 5], [3, -1, 4], [3, 5, -1], [(0, 1, 6), (2, 4, 7)])
    other = replace(rows, written=WriteLog())
    expected = conv_prefill(x, weight, bank=banks[0], rows=rows)
    found = run("conv_prefill", device, x, weight, bank=banks[1], rows=other)
    torch.testing.assert_close(found, expected, **within("conv", torch.float32))
    assert equal_bytes(banks[1], banks[0])
    assert other.written.agreed() == rows.written.agreed()


def test_a_wider_convolution_than_there_are_kernels_for_is_refused(device: torch.device) -> None:
    x, weight = inputs(1, torch.float32, 5)
    with pytest.raises(ValueError, match="over 5 tokens: the kernels go up to 4"):
        run("conv_prefill", device, x, weight, bank=strided_bank(1, (CHANNELS, 4)),
            rows=make_rows([1]))  # fmt: skip
