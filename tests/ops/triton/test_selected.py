"""A token that selects all of its past attends as one that does not select at all, byte for byte.

Whether a forward selects follows from its longest row, so the bytes of short ones would depend on
who is beside them.
"""

from __future__ import annotations

import pytest
import torch

from tests.ops.triton.layers import DTYPES, mixed_batch, poisoned, to
from tests.ops.triton.side_by_side import equal_bytes

kernels = pytest.importorskip("millpond.ops.triton.latent")
pytestmark = pytest.mark.usefixtures(poisoned.__name__)

VERIFY = [(5, 2), (64, 1)]
TABLES = [[1, 0], [2, 3], [4, 5], [6, 7], [8, 9]]


HEADS = {"cpu": (2,), "cuda": (1, 2, 5, 64)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_selecting_everything_is_not_selecting(dtype: torch.dtype, device: torch.device) -> None:
    for heads in HEADS[device.type]:
        check(heads, dtype, device)


def check(heads: int, dtype: torch.dtype, device: torch.device) -> None:
    """Both ways, over the same pages."""
    batch = mixed_batch([(0, 70), (64, 20)], [(100, 1)], VERIFY, tables=TABLES)
    made = torch.Generator().manual_seed(heads)
    pages = torch.randn(10, 64, 32, generator=made).to(dtype).to(device)
    q = torch.randn(len(batch.positions), heads, 32, generator=made).to(dtype).to(device)
    everything = torch.ones(len(q), 128, dtype=torch.bool, device=device)
    everything &= torch.arange(128, device=device) <= batch.positions.to(device)[:, None]
    dense, selected = (
        kernels.paged_mla(q, pages, batch=to(batch, device), scale=0.2, selected=mask)
        for mask in (None, everything)
    )
    rows = batch.verify
    assert rows is not None
    real = torch.ones(len(q), dtype=torch.bool)
    real[batch.first_verify_token :] = rows.filled.flatten()
    assert equal_bytes(selected.cpu()[real], dense.cpu()[real])
