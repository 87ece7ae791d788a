"""The arenas: where an entry's bytes are, what poison does, and that views are views."""

from __future__ import annotations

import pytest
import torch

from millpond.memory.arena import Arena, Arenas
from millpond.memory.layout import ALIGNMENT, EntrySpec, ModelLayout, TensorSpec

CPU = torch.device("cpu")
SPEC = EntrySpec(
    (
        TensorSpec(0, "recurrent", (2, 3, 5), torch.float32),
        TensorSpec(0, "conv", (7, 3), torch.bfloat16),
        TensorSpec(2, "recurrent", (2, 3, 5), torch.float32),
        TensorSpec(-1, "boundary_hidden", (9,), torch.float16),
    )
)


def test_every_tensor_of_an_entry_is_a_view_of_its_own_bytes() -> None:
    arena = Arena(SPEC, 4, CPU)
    for number, tensor in enumerate(SPEC.tensors, start=1):
        arena.view(tensor.layer, tensor.name)[2] = number
    entry = arena.storage[2]
    for number, (tensor, offset) in enumerate(
        zip(SPEC.tensors, SPEC.offsets(), strict=True), start=1
    ):
        read = entry[offset : offset + tensor.num_bytes].view(tensor.dtype)
        assert torch.equal(read, torch.full_like(read, number))
        assert offset % ALIGNMENT == 0
    assert not arena.storage[[0, 1, 3]].any()


def test_an_entry_is_one_contiguous_range_of_bytes() -> None:
    arena = Arena(SPEC, 3, CPU)
    assert arena.storage[1].is_contiguous()
    assert arena.storage.stride() == (SPEC.num_bytes, 1)


def test_poison_reads_nan_in_every_dtype_and_touches_no_neighbour() -> None:
    arena = Arena(SPEC, 5, CPU)
    arena.fill_nan([1, 3])
    for tensor in SPEC.tensors:
        view = arena.view(tensor.layer, tensor.name)
        assert view[[1, 3]].isnan().all()
        assert not view[[0, 2, 4]].any()


def test_an_id_outside_the_arena_raises_instead_of_wrapping() -> None:
    arena = Arena(SPEC, 5, CPU)
    for ids in ([5], [-1], [0, 7]):
        with pytest.raises(IndexError):
            arena.fill_nan(ids)
        with pytest.raises(IndexError):
            arena.copy([0] * len(ids), ids)
    assert not arena.storage.any()


def test_one_source_is_copied_to_several_targets_whole() -> None:
    arena = Arena(SPEC, 5, CPU)
    arena.storage[0] = torch.arange(SPEC.num_bytes) % 251
    arena.copy([0, 0], [2, 4])
    assert torch.equal(arena.storage[2], arena.storage[0])
    assert torch.equal(arena.storage[4], arena.storage[0])
    assert not arena.storage[[1, 3]].any()


def test_a_model_without_seat_data_has_a_seat_arena_of_no_bytes() -> None:
    layout = ModelLayout(slot=SPEC, page=SPEC, seat=EntrySpec(()))
    arenas = Arenas.allocate(layout, num_slots=3, num_pages=2, num_seats=4, device=CPU)
    arenas.seats.fill_nan([0, 3])
    arenas.seats.copy([0], [1])
    assert arenas.num_bytes == 5 * SPEC.num_bytes
    assert not arenas.slots.has(1, "recurrent")


def test_offsets_beyond_two_to_the_31_elements_reach_their_own_slot() -> None:
    # Untouched memory of this allocation is never backed, so that its size costs nothing.
    spec = EntrySpec((TensorSpec(0, "recurrent", (1 << 20,), torch.float32),))
    arena = Arena(spec, 2100, CPU)
    bank = arena.view(0, "recurrent")
    last = torch.tensor([2099])
    bank[last] = 3.0
    assert bank.numel() > 2**31
    assert bank[2099].eq(3.0).all()
    wrapped = (2099 << 20) - 2**31  # where a 32-bit element offset would land
    assert not bank[wrapped >> 20 : (wrapped >> 20) + 2].any()
