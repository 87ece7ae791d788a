"""Slots by id: none is negative, high ids and large arenas are reached, and writes are reported."""

from __future__ import annotations

import pytest
import torch

from millpond.ops.batch import WriteLog
from millpond.ops.reference.conv import conv_decode, conv_prefill
from millpond.ops.reference.delta import Gate, delta_decode, delta_prefill
from millpond.ops.reference.slots import boundary_store, read_slots, write_slots
from tests.ops.batches import ints, make_rows, strided_bank


def test_a_negative_id_reads_zero_and_writes_nothing() -> None:
    bank = torch.full((3, 2, 2), float("nan"))
    assert not read_slots(bank, ints([-1, -7])).any()
    write_slots(bank, ints([-1, 1]), torch.ones(2, 2, 2))
    assert bank[1].eq(1).all()
    assert bank[[0, 2]].isnan().all()


def test_a_read_is_a_copy() -> None:
    bank = strided_bank(3, (2,))
    read = read_slots(bank, ints([1]))
    write_slots(bank, ints([1]), torch.zeros(1, 2))
    assert read.any()


def test_the_boundary_vector_is_that_of_the_last_folded_token() -> None:
    bank = strided_bank(6, (3,))
    before = bank.clone()
    x = torch.randn(70, 3)
    rows = make_rows([66, 4], [-1, 2], [0, -1], [(0, 64, 5), (1, 1, 3)])
    boundary_store(x, bank=bank, rows=rows)
    assert torch.equal(bank[[0, 5, 3]], x[[65, 63, 66]])
    assert torch.equal(bank[[1, 2, 4]], before[[1, 2, 4]])
    assert rows.written.agreed() == {(0, 66), (5, 64), (3, 1)}


def test_only_what_every_call_wrote_is_agreed() -> None:
    log = WriteLog()
    assert log.agreed() == frozenset()
    log.record(ints([3, -1, 5]), ints([64, 10, 7]))
    log.record(ints([3, -1, 5]), ints([65, 10, 7]))
    assert log.agreed() == {(5, 7)}
    assert log.common().tolist() == [[-1, -1, 5], [-1, -1, 7]]
    log.record(ints([3, -1, 6]), ints([64, 10, 7]))
    assert log.agreed() == frozenset()


def test_slots_beyond_two_to_the_31_elements_are_reached() -> None:
    """Four GiB of address space, of which a few pages are touched."""
    channels, slots = 1 << 16, (1 << 31) // (3 << 16) + 9
    bank = torch.empty(slots, channels, 3, dtype=torch.bfloat16)
    assert bank.numel() > 1 << 31
    last = slots - 1
    x = torch.randn(3, channels).bfloat16()
    conv_prefill(x, torch.randn(channels, 4), bank=bank, rows=make_rows([3], [-1], [last]))
    assert torch.equal(bank[last], x.T)
    assert torch.equal(read_slots(bank, ints([last])), bank[last:])


def test_slot_ids_above_4096_are_not_confused() -> None:
    bank = torch.zeros(9000, 1, 4, 4)
    bank[8999] = 1.0
    inputs = [torch.randn(1, 1, 4) for _ in range(3)] + [torch.randn(1, 1) for _ in range(2)]
    gate = Gate(torch.zeros(1), torch.zeros(1))
    delta_decode(*inputs, gate=gate, bank=bank, rows=make_rows([1], [8999], [4097]))
    assert bank[4097].any()
    assert bank.flatten(1).any(1).nonzero().flatten().tolist() == [4097, 8999]


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_form_without_rows_is_no_work(kind: str) -> None:
    bank, window = torch.zeros(2, 3, 8, 16), torch.zeros(2, 5, 3)
    q, v, beta = torch.zeros(0, 3, 16), torch.zeros(0, 3, 8), torch.zeros(0, 3)
    decay = beta if kind == "gdn" else q
    gate = Gate(torch.zeros(3), torch.zeros(3 if kind == "gdn" else 48))
    for op in (delta_prefill, delta_decode):
        rows = make_rows([])
        assert op(q, q, v, decay, beta, gate=gate, bank=bank, rows=rows).shape == (0, 3, 8)
        assert rows.written.agreed() == frozenset()
    for op in (conv_prefill, conv_decode):
        y = op(torch.zeros(0, 5), torch.zeros(5, 4), bank=window, rows=make_rows([]))
        assert y.shape == (0, 5)
    boundary_store(torch.zeros(0, 4), bank=torch.zeros(2, 4), rows=make_rows([]))
