"""Boundary vectors: the kernels copy the reference's bytes to the same slots, rings and places."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millpond.ops.batch import WriteLog
from millpond.ops.reference import slots, verify
from tests.ops.batches import make_rows, strided_bank
from tests.ops.triton.delta_rows import DTYPES, verify_case
from tests.ops.triton.side_by_side import NAN, bank_copy, equal_bytes, run

pytestmark = pytest.mark.usefixtures("poisoned")
HIDDEN = 1030  # two programs a vector, the second with a tail


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_the_last_vector_of_every_row_and_export_is_stored(
    dtype: torch.dtype, device: torch.device
) -> None:
    lengths = [70, 1, 3]
    x = random(sum(lengths), HIDDEN, dtype=dtype)
    bank = strided_bank(9, (HIDDEN,), dtype).fill_(NAN)
    banks = [bank_copy(bank) for _ in "ab"]
    rows = make_rows(lengths, None, [3, -1, 5], [(0, 64, 7), (2, 2, 0), (0, 1, -1), (0, 70, 8)])
    other = replace(rows, written=WriteLog())
    slots.boundary_store(x, bank=banks[0], rows=rows)
    run("boundary_store", device, x, bank=banks[1], rows=other)
    assert equal_bytes(banks[1], banks[0])
    assert other.written.agreed() == rows.written.agreed()
    assert len(rows.written.agreed()) == 5


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("most", [0, 1, 3])
def test_verify_rows_read_the_vector_before_them_and_leave_their_own(
    most: int, dtype: torch.dtype, device: torch.device
) -> None:
    rows = verify_case(most)
    x = random(rows.num_tokens, HIDDEN, dtype=dtype)
    x[~rows.filled.flatten()] = NAN
    bank, ring = (
        strided_bank(25, (HIDDEN,), dtype),
        strided_bank(most + 2, (2, most, HIDDEN), dtype),
    )
    bank[10:] = NAN
    made = []
    for kernels in (False, True):
        named = dict(
            bank=bank_copy(bank), ring=bank_copy(ring), rows=replace(rows, written=WriteLog())
        )
        if kernels:
            before = run("hidden_before_verify", device, x, **named)
            run("boundary_verify", device, x, **named)
        else:
            before = verify.hidden_before_verify(x, **named)
            verify.boundary_verify(x, **named)
        made.append((before, named["bank"], named["ring"], named["rows"].written.agreed()))
    (before, state, left, report), (before_found, state_found, left_found, found) = made
    filled = rows.filled.flatten()
    assert equal_bytes(before_found[filled], before[filled])
    assert before_found.isfinite()[:: most + 1].all()
    assert equal_bytes(state_found, state)
    assert found == report
    for row in range(most + 1):
        at = int(rows.seats[row]), 1 - int(rows.parity[row]), slice(int(rows.num_drafts[row]))
        assert equal_bytes(left_found[at], left[at])
