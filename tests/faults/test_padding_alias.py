"""Kind: rows that only fill up a batch read or write something that belongs to a request."""

from __future__ import annotations

import pytest
import torch

from millpond.ops.reference.conv import conv_decode, conv_prefill
from tests.faults.delta_rule import FORMS, HEADS, K, V, layer, packed
from tests.support.counting import changed_entries, snapshot
from tests.support.twins import SEATS, Twins, texts

NAN = float("nan")
SIZES = (2, 3, 7, 26, 33)
"""Pools whose size is no power of two, and one that is: an id taken modulo any of them shows."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])
def test_a_negative_slot_is_read_as_the_zero_state_and_never_written(form, by_channel):
    """-1 as an index would be the last slot, clamped it would be the first: both hold NaN here."""
    sequence = layer(9, by_channel=by_channel)
    bank = torch.full((3, HEADS, V, K), NAN)
    out = sequence.fold(form, bank, packed([9, 9], [-1, -1], [-1, 1]), [(0, 9), (0, 9)])
    assert out.isfinite().all()
    assert torch.equal(out[:9], out[9:])
    assert bank[[0, 2]].isnan().all()
    assert torch.equal(bank[1], sequence.state_after(9, form))


@pytest.mark.parametrize("form", [conv_prefill, conv_decode])
def test_a_negative_slot_is_an_empty_convolution_window(form):
    x, weight = torch.randn(5, 6), torch.randn(6, 4)
    bank = torch.full((3, 6, 3), NAN)
    out = form(torch.cat((x, x)), weight, bank=bank, rows=packed([5, 5], [-1, -1], [-1, 1]))
    assert out.isfinite().all()
    assert bank[[0, 2]].isnan().all()
    assert bank[1].isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_slot_zero_is_a_slot_like_any_other(form):
    sequence = layer(5, by_channel=False)
    bank = torch.full((2, HEADS, V, K), NAN)
    sequence.fold(form, bank, packed([5], [-1], [0]), [(0, 5)])
    kept = bank[0].clone()
    sequence.fold(form, bank, packed([5, 5], [-1, -1], [-1, 1]), [(0, 5), (0, 5)])
    assert torch.equal(bank[0], kept)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_pools_of_any_size_keep_every_other_slot_untouched(form, size):
    """Live rows use the two ends of the pool; padding rows stand before, between and after them."""
    sequence = layer(3, by_channel=True)
    bank = torch.randn(size, HEADS, V, K)
    before = bank.clone()
    live = (size - 1, 0)
    rows = packed([3] * 5, [-1, live[0], -1, live[1], -1], [-1, live[0], -1, live[1], -1])
    sequence.fold(form, bank, rows, [(0, 3)] * 5)
    changed = {s for s in range(size) if not torch.equal(bank[s], before[s])}
    assert changed == set(live)


def test_fewer_rows_than_before_leave_nobody_in_the_tail():
    """Recordings of all sizes read one buffer; after a full batch it is full of ids."""
    twins = Twins("glm", 2)
    pairs = [twins.begin(i) for i in range(SEATS)]
    twins.verify(pairs, right=2)
    for some in ([0, 1, 2], [3], [4, 2, 0]):
        twins.verify([pairs[i] for i in some], right=1)
        size = next(b for b in (1, 2, 4, 5) if b >= len(some))
        numbers = twins.runner._steady._buckets[size, 16].numbers
        assert (numbers[:3, len(some) :] == -1).all()
        assert (numbers[0, : len(some)] >= 0).all()
    twins.verify(pairs, right=1)
    for index, (_, run) in enumerate(pairs):
        assert tuple(run.tokens) == texts("glm")[index][: len(run.tokens)]


def test_padding_shares_nothing_with_sequences_that_wait():
    """Two run in a recording for four; what the three others hold stays as it is, to the byte."""
    twins = Twins("qwen", 2)
    pairs = [twins.begin(i) for i in range(SEATS)]
    twins.verify(pairs, right=2, export=True)
    arenas, counters = twins.runner.arenas, twins.runner.staging.counters
    before = [snapshot(a) for a in (arenas.slots, arenas.pages, arenas.seats)]
    kept = counters.table.clone()
    running = [pairs[i] for i in (1, 3, 4)]
    for _ in range(3):
        twins.verify(running, right=1)
    own = [pair[1] for pair in running]
    seats = {run.seat for run in own}
    allowed = ({run.slot for run in own}, {p for run in own for p in run.pages}, seats)
    for arena, old, mine in zip(
        (arenas.slots, arenas.pages, arenas.seats), before, allowed, strict=True
    ):
        assert set(changed_entries(arena, old)) <= mine
    others = [seat for seat in range(SEATS) if seat not in seats]
    assert torch.equal(counters.table[:, others], kept[:, others])
    twins.verify(pairs, right=1)


def test_recordings_for_other_numbers_of_drafts_have_numbers_of_their_own():
    several = [Twins("qwen", k) for k in (0, 1, 3)]
    pairs = [[twins.begin(i) for i in (0, 1, 2)] for twins in several]
    for step in range(4):
        for twins, live in zip(several, pairs, strict=True):
            twins.verify(live, right=min(step, twins.num_drafts))
    for live in pairs:
        for index, (_, run) in enumerate(live):
            assert tuple(run.tokens) == texts("qwen")[index][: len(run.tokens)]
