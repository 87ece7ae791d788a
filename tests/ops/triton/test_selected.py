"""A token that selects all it folds attends as one that does not select at all, byte for byte.

Whether a forward selects follows from its longest row, so the bytes of short ones would depend on
who is beside them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millpond.ops.batch import ForwardBatch
from tests.ops.triton.layers import DTYPES, mixed_batch, poisoned, to
from tests.ops.triton.side_by_side import equal_bytes

kernels = pytest.importorskip("millpond.ops.triton.latent")
pytestmark = pytest.mark.usefixtures(poisoned.__name__)

VERIFY = [(5, 2), (64, 1)]
TABLES = [[1, 0], [2, 3], [4, 5], [6, 7], [8, 9]]
HEADS = {"cpu": (2,), "cuda": (1, 2, 5, 64)}

LENGTHS = (1, 2, 3, 4, 5, 16, 31, 32, 33, 62, 63, 64, 65, 66, 68, 95, 96, 97, 128, 129, 192)
"""Around the limits of groups, tiles, pages and splits."""
PAST = [7, 2, 9, 4]
AT = 250
"""Where those stand that select so many; all see the same pages."""

SPLITS = {
    "as chosen": {},
    "of one tile": {"split_tiles": 1, "max_splits": 64},
    "few": {"split_tiles": 1, "max_splits": 3},
    "of halves of tiles": {"split_tiles": 3, "single_tile": 32},
}


def attend(
    q: torch.Tensor, pages: torch.Tensor, batch: ForwardBatch, selected: torch.Tensor | None
) -> torch.Tensor:
    """Latent attention where q is."""
    mask = None if selected is None else selected.to(q.device)
    return kernels.paged_mla(q, pages, batch=to(batch, q.device), scale=0.2, selected=mask).cpu()


@pytest.mark.parametrize("dtype", DTYPES)
def test_selecting_everything_is_not_selecting(dtype: torch.dtype, device: torch.device) -> None:
    for heads in HEADS[device.type]:
        check(heads, dtype, device)


def check(heads: int, dtype: torch.dtype, device: torch.device) -> None:
    """Both ways, over the same pages; some beside one that selects a part."""
    batch = mixed_batch([(0, 67), (64, 5)], [(100, 1)], VERIFY, tables=TABLES)
    made = torch.Generator().manual_seed(heads)
    pages = torch.randn(10, 64, 32, generator=made).to(dtype).to(device)
    q = torch.randn(len(batch.positions), heads, 32, generator=made).to(dtype).to(device)
    everything = torch.ones(len(q), 128, dtype=torch.bool)
    everything &= torch.arange(128) <= batch.positions[:, None]
    dense, selected = (attend(q, pages, batch, mask) for mask in (None, everything))
    rows = batch.verify
    assert rows is not None
    real = torch.ones(len(q), dtype=torch.bool)
    real[batch.first_verify_token :] = rows.filled.flatten()
    assert equal_bytes(selected[real], dense[real])
    everything[[70, 72], 50] = False
    real[[70, 72]] = False
    assert equal_bytes(attend(q, pages, batch, everything)[real], dense[real])


def drawn(
    tokens: int, dtype: torch.dtype, device: torch.device, heads: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, and pages."""
    made = torch.Generator().manual_seed(tokens)
    pages = torch.randn(10, 64, dim, generator=made).to(dtype).to(device)
    return torch.randn(tokens, heads, dim, generator=made).to(dtype).to(device), pages


def firsts(counts: list[int]) -> torch.Tensor:
    """[T, 256]: every token selects so many of the first positions."""
    return torch.arange(256) < torch.tensor(counts)[:, None]


def sizes(dtype: torch.dtype, device: torch.device) -> list[tuple[int, int]]:
    """Heads and latent sizes: the published ones only where they are fast and fit."""
    published = device.type == "cuda" and dtype == torch.bfloat16
    return [(2, 32), (64, 512)] if published else [(2, 32)]


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_selecting_the_first_positions_is_standing_at_the_last_of_them(
    dtype: torch.dtype, splits: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MLA", replace(kernels.MLA, **SPLITS[splits]))
    count = len(LENGTHS)
    for heads, dim in sizes(dtype, device):
        q, pages = drawn(count, dtype, device, heads, dim)
        here = mixed_batch(decode=[(n - 1, 1) for n in LENGTHS], tables=[PAST] * count)
        there = mixed_batch(decode=[(AT, 1)] * count, tables=[PAST] * count)
        dense = attend(q, pages, here, None)
        assert equal_bytes(attend(q, pages, there, firsts([*LENGTHS])), dense)
        for index in (0, 9, 11, count - 1):
            lone = mixed_batch(decode=[(LENGTHS[index] - 1, 1)], tables=[PAST])
            assert equal_bytes(attend(q[index : index + 1], pages, lone, None)[0], dense[index])


@pytest.mark.parametrize("dtype", DTYPES)
def test_drafts_and_prompts_select_the_same_way(dtype: torch.dtype, device: torch.device) -> None:
    """Verify rows of several queries and prompt rows, beside each other and by themselves."""
    starts, prompt = (1, 30, 62, 63, 127), (60, 11)
    verify = [(start, drafts) for start in starts for drafts in (2, 1)]
    tables = [PAST] * (1 + len(verify))
    here = mixed_batch(prefill=[prompt], verify=verify, tables=tables)
    there = mixed_batch(
        prefill=[(AT - 20, prompt[1])], verify=[(AT, drafts) for _, drafts in verify], tables=tables
    )
    for heads, dim in sizes(dtype, device):
        q, pages = drawn(len(here.positions), dtype, device, heads, dim)
        dense = attend(q, pages, here, None)
        selected = attend(q, pages, there, firsts((here.positions + 1).tolist()))
        assert here.verify is not None
        real = torch.ones(len(q), dtype=torch.bool)
        real[here.first_verify_token :] = here.verify.filled.flatten()
        assert equal_bytes(selected[real], dense[real])
        alone = mixed_batch(verify=verify[3:4], tables=[PAST])
        at = here.first_verify_token + 3 * 3
        part = attend(q[at : at + 3], pages, alone, None)
        assert equal_bytes(part[:2], dense[at : at + 2])
