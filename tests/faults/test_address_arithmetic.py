"""Kind: an offset overflows, or is computed in another unit or stride than the memory has."""

from __future__ import annotations

import pytest
import torch

from millpond.memory.arena import Arena
from millpond.memory.layout import EntrySpec, TensorSpec
from millpond.nn.batch import Staging
from millpond.ops.reference.delta import delta_decode
from millpond.ops.reference.indexer import pool_keys
from millpond.plan.step import PageUpdate, Row, StepPlan
from tests.faults.delta_rule import HEADS, K, V, layer, packed

CPU = torch.device("cpu")
BIG = EntrySpec(
    (
        TensorSpec(0, "recurrent", (HEADS, V, K), torch.float32),
        TensorSpec(0, "filler", (520_000,), torch.float32),
        TensorSpec(1, "recurrent", (HEADS, V, K), torch.float32),
    )
)
COUNT = 4_200
"""Slots of `BIG`: ids beyond 4,096 and, in fp32 elements, an arena beyond 2**31.

Memory is backed when it is first touched, so the test needs little of it."""


@pytest.fixture(scope="module")
def big_arena() -> Arena:
    return Arena(BIG, COUNT, CPU)


def test_the_last_slot_of_an_arena_beyond_two_to_the_31_elements_is_its_own(big_arena):
    bank = big_arena.view(1, "recurrent")
    assert (COUNT - 1) * bank.stride(0) > 2**31
    big_arena.fill_nan([COUNT - 1])
    assert bank[COUNT - 1].isnan().all()
    for other in (0, 1, COUNT // 2, COUNT - 2):
        assert not bank[other].isnan().any()


def test_recurrent_ops_reach_slots_beyond_two_to_the_31_elements(big_arena):
    sequence = layer(6, by_channel=True)
    bank = big_arena.view(1, "recurrent")
    high, higher = COUNT - 3, COUNT - 2
    sequence.fold(delta_decode, bank, packed([3], [-1], [high]), [(0, 3)])
    sequence.fold(delta_decode, bank, packed([3], [high], [higher]), [(3, 6)])
    assert torch.equal(bank[higher], sequence.state_after(6))
    assert torch.equal(bank[high], sequence.state_after(3))


def test_views_of_an_arena_do_not_overlap_and_follow_its_strides():
    """Mixed widths, odd sizes: every tensor of every entry keeps the value it alone was given."""
    spec = EntrySpec(
        (
            TensorSpec(0, "recurrent", (2, 4, 8), torch.float32),
            TensorSpec(0, "conv", (7, 3), torch.bfloat16),
            TensorSpec(2, "conv", (1,), torch.bfloat16),
            TensorSpec(2, "recurrent", (2, 4, 8), torch.float32),
            TensorSpec(-1, "boundary_hidden", (9,), torch.bfloat16),
        )
    )
    arena = Arena(spec, 5, CPU)
    arena.fill_nan(range(5))
    marks = {}
    for entry in range(5):
        for index, tensor in enumerate(spec.tensors):
            marks[entry, index] = float(entry * len(spec.tensors) + index)
            arena.view(tensor.layer, tensor.name)[entry] = marks[entry, index]
    for entry in range(5):
        for index, tensor in enumerate(spec.tensors):
            view = arena.view(tensor.layer, tensor.name)[entry]
            assert view.shape == tensor.shape
            assert (view == marks[entry, index]).all()


@pytest.mark.parametrize("bad", [-1, 5, 5 + 2**32])
def test_an_id_outside_the_pool_is_an_error_not_another_slot(bad):
    arena = Arena(EntrySpec((TensorSpec(0, "recurrent", (2,), torch.float32),)), 5, CPU)
    with pytest.raises(IndexError):
        arena.fill_nan([bad])


def test_pooled_keys_of_a_page_lie_in_the_page_of_their_tokens():
    """Two sequences on scattered pages; a key is its own position, so a pool's mean is known."""
    pool, per_page, count = 4, 16, 9
    tables = ((7, 2, 5), (0, 8, 3))
    lengths = (190, 131)
    staging = Staging(num_seats=2, max_pages=3, device=CPU)
    staging.update([PageUpdate(seat, 0, table) for seat, table in enumerate(tables)])
    rows = tuple(
        Row(request=str(seat), seat=seat, start=0, tokens=(0,) * n, state_in=None, state_out=seat)
        for seat, n in enumerate(lengths)
    )
    batch = staging.batch(StepPlan(step=0, prefill=rows), [])
    position = torch.cat([torch.arange(n) for n in lengths]).float()
    sequence = torch.repeat_interleave(torch.tensor([0.0, 1000.0]), torch.tensor(lengths))
    key = (position + sequence)[:, None]
    pooled = torch.full((count, per_page, 1), float("nan"))
    pool_keys(
        key,
        torch.zeros_like(key),
        torch.zeros(pool, 1),
        pooled_pages=pooled,
        tails=torch.zeros(2, pool, 2, 1),
        batch=batch,
    )
    written = 0
    for seat, table in enumerate(tables):
        for index in range(lengths[seat] // pool):
            found = pooled[table[index // per_page], index % per_page, 0]
            assert found == 1000 * seat + index * pool + 1.5
            written += 1
    assert int(pooled.isfinite().sum()) == written
