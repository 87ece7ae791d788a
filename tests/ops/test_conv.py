"""The short convolution against its formula in fp64, and where its windows go."""

from __future__ import annotations

import pytest
import torch

from millpond.ops.reference.conv import conv_decode, conv_prefill
from tests.ops.batches import make_rows, strided_bank

CHANNELS, WIDTH = 10, 4


def formula(window: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """window [C, W - 1], x [T, C] -> y [T, C], all fp64: the definition, token by token."""
    series = torch.cat((window.T, x)).double()
    out = []
    for t in range(len(x)):
        total = sum(weight[:, j].double() * series[t + j] for j in range(WIDTH))
        out.append(total / (1 + torch.exp(-total)))
    return torch.stack(out)


@pytest.mark.parametrize("op", [conv_prefill, conv_decode])
def test_it_is_the_formula_and_windows_are_the_last_raw_inputs(op) -> None:
    torch.manual_seed(1)
    lengths = [130, 1, 2, 3, 64]
    sources, targets = [3, 3, -1, 5, 6], [7, 8, 9, 5, -1]
    exports = [(0, 64, 10), (0, 128, 11), (0, 1, 12), (3, 2, -1), (4, 64, 0)]
    bank = strided_bank(14, (CHANNELS, WIDTH - 1))
    before = bank.clone()
    x, weight = torch.randn(sum(lengths), CHANNELS), torch.randn(CHANNELS, WIDTH)
    rows = make_rows(lengths, sources, targets, exports)
    y = op(x, weight, bank=bank, rows=rows)
    at, expected_windows = 0, {}
    for row, length in enumerate(lengths):
        source = sources[row]
        window = before[source] if source >= 0 else torch.zeros(CHANNELS, WIDTH - 1)
        part = x[at : at + length]
        torch.testing.assert_close(
            y[at : at + length].double(), formula(window, part, weight), atol=3e-6, rtol=1e-5
        )
        series = torch.cat((window, part.T), 1)
        ends = [(length, targets[row])] + [(e, s) for r, e, s in exports if r == row]
        expected_windows |= {s: series[:, e : e + WIDTH - 1] for e, s in ends if s >= 0}
        at += length
    for slot in range(14):
        expected = expected_windows.get(slot, before[slot])
        assert torch.equal(bank[slot].nan_to_num(9.0), expected.nan_to_num(9.0))
    assert rows.written.agreed() == {
        (7, 130), (8, 1), (9, 2), (5, 3), (10, 64), (11, 128), (12, 1), (0, 64),
    }  # fmt: skip


def test_no_slot_reads_zero_even_where_the_arena_holds_nan() -> None:
    bank = torch.full((2, CHANNELS, WIDTH - 1), float("nan"))
    x, weight = torch.randn(5, CHANNELS), torch.randn(CHANNELS, WIDTH)
    y = conv_prefill(x, weight, bank=bank, rows=make_rows([5], [-1], [-1]))
    assert y.isfinite().all()
    assert bank.isnan().all()


def test_model_dtype_rounds_the_output_once() -> None:
    x = torch.randn(70, CHANNELS).bfloat16()
    weight = torch.randn(CHANNELS, WIDTH)
    bank = torch.zeros(1, CHANNELS, WIDTH - 1, dtype=torch.bfloat16)
    y = conv_prefill(x, weight, bank=bank, rows=make_rows([70], [-1], [0]))
    exact = formula(torch.zeros(CHANNELS, WIDTH - 1), x.float(), weight)
    assert y.dtype == torch.bfloat16
    assert (y.double() - exact).abs().max() <= exact.abs().max() * 2**-8
    assert torch.equal(bank[0], x[-3:].T)
