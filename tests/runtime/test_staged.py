"""Arenas that a store reaches through a ring: the bytes are those of arenas reached directly."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import Refused
from millpond.memory import pinned
from millpond.memory.arena import Arena
from millpond.memory.host_ring import CudaLink
from millpond.memory.layout import EntrySpec, TensorSpec
from millpond.runtime import reach
from millpond.runtime.staged import StagedMemory
from millpond.state.lease import PageId, SlotId
from millpond.store.memory import Parts, batches
from millpond.units import MIB
from tests.store.worlds import World

SLOTS, PAGES = 6, 12
SLOT = EntrySpec((TensorSpec(0, "recurrent", (5, 4), torch.float32),))
PAGE = EntrySpec((TensorSpec(1, "key", (2, 8), torch.float32),))

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def made(device: str = "cpu", room: int = 2, seed: int = 0) -> StagedMemory:
    """Random bytes in both arenas; an area holds a slot and `room` pages."""
    where = torch.device(device)
    slots, pages = Arena(SLOT, SLOTS, where), Arena(PAGE, PAGES, where)
    dice = torch.Generator().manual_seed(seed)
    for arena in (slots, pages):
        drawn = torch.randint(0, 256, arena.storage.shape, generator=dice, dtype=torch.uint8)
        arena.storage.copy_(drawn)
    return StagedMemory(slots, pages, batch_bytes=SLOT.num_bytes + room * PAGE.num_bytes)


def parts(slot: int | None, pages: list[int]) -> Parts:
    named = None if slot is None else SlotId(slot)
    return Parts(named, tuple(PageId(page) for page in pages))


def bytes_in(memory: StagedMemory, wanted: Parts) -> list[bytes]:
    """As they lie in the arenas."""
    found = [] if wanted.slot is None else [memory._slots[wanted.slot]]
    found += [memory._pages[page] for page in wanted.pages]
    return [entry.cpu().numpy().tobytes() for entry in found]


@pytest.mark.parametrize("device", DEVICES)
@given(
    slot=st.none() | st.integers(0, SLOTS - 1),
    pages=st.lists(st.integers(0, PAGES - 1), unique=True),
    room=st.integers(1, 4),
    data=st.data(),
)
def test_what_is_lent_in_batches_is_what_lies_there_and_what_is_filled_lies_there(
    device, slot, pages, room, data
):
    if slot is None and not pages:
        return
    memory = made(device, room)
    expected = bytes_in(memory, parts(slot, pages))
    read: list[bytes] = []
    for batch in batches(memory, parts(slot, pages)):
        with memory.reading(batch) as views:
            read += [bytes(view) for view in views]
    assert read == expected

    others = [n for n in range(PAGES) if n not in pages]
    before = bytes_in(memory, parts(None, others))
    filled = [bytes([data.draw(st.integers(0, 255))]) * len(entry) for entry in expected]
    left = iter(filled)
    for batch in batches(memory, parts(slot, pages)):
        with memory.writing(batch) as views:
            for view in views:
                view[:] = next(left)
    assert bytes_in(memory, parts(slot, pages)) == filled
    assert bytes_in(memory, parts(None, others)) == before


def test_what_fails_while_it_is_filled_leaves_the_arenas_as_they_were():
    memory = made()
    wanted = parts(1, [2, 3])
    before = bytes_in(memory, wanted)
    with pytest.raises(KeyError):
        _fill_half(memory, wanted)
    assert bytes_in(memory, wanted) == before


def _fill_half(memory: StagedMemory, wanted: Parts) -> None:
    with memory.writing(wanted) as views:
        views[0][:] = bytes(len(views[0]))
        raise KeyError("the store is gone")


def test_neither_direction_waits_for_the_other_and_one_waits_for_itself():
    memory = made()
    order: list[str] = []
    with memory.reading(parts(0, [])) as lent:
        kept = bytes(lent[0])
        with memory.writing(parts(1, [])) as views:
            views[0][:] = bytes(len(views[0]))
        again = threading.Thread(target=lambda: order.append(_read(memory)))
        again.start()
        again.join(0.05)
        order.append("first")
        assert bytes(lent[0]) == kept
    again.join(10)
    assert order == ["first", "again"]


def _read(memory: StagedMemory) -> str:
    with memory.reading(parts(2, [])):
        return "again"


def test_all_views_lie_in_the_ring():
    memory = made()
    (ring,) = memory.regions()
    first = torch.frombuffer(ring, dtype=torch.uint8).data_ptr()
    for lend in (memory.reading, memory.writing):
        with lend(parts(0, [5, 3])) as views:
            for view in views:
                at = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
                assert first <= at <= first + ring.nbytes - view.nbytes


def test_more_than_an_area_holds_and_entries_that_are_not_there_are_errors():
    memory = made(room=1)
    with pytest.raises(ValueError, match="a batch has"), memory.reading(parts(0, [1, 2])):
        pass
    with pytest.raises(IndexError), memory.writing(parts(None, [PAGES])):
        pass
    slots, pages = Arena(SLOT, 2, torch.device("cpu")), Arena(PAGE, 2, torch.device("cpu"))
    with pytest.raises(Refused, match=r"store_staging.*at least"):
        StagedMemory(slots, pages, batch_bytes=SLOT.num_bytes - 1)


def test_host_memory_that_cannot_be_locked_is_refused_with_what_needs_less(monkeypatch):
    """The message says how much was wanted, what there is, and the setting that asks for less."""
    asked: list[int] = []

    def fails(num_bytes):
        asked.append(num_bytes)
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(pinned, "_allocate", fails)
    slots, pages = OnGpu(SLOT.num_bytes), OnGpu(PAGE.num_bytes)
    with pytest.raises(Refused) as refused:
        StagedMemory(slots, pages, batch_bytes=48 * MIB)
    assert asked == [96 * MIB]
    for words in ("96.0 MiB of page-locked", "out of memory", "free", "lock", "store_staging"):
        assert words in str(refused.value)
    assert "DSA" not in str(refused.value)
    with pytest.raises(Refused, match="leave it out"):  # less would not do
        StagedMemory(slots, pages, batch_bytes=max(SLOT.num_bytes, PAGE.num_bytes))
    with pytest.raises(Refused, match="max_prefill_token_num"):
        CudaLink().stage(1)


class OnGpu:
    """As much of an arena on a GPU as is looked at before memory is asked for."""

    def __init__(self, entry_bytes: int) -> None:
        self.count = 4
        self.spec = SimpleNamespace(num_bytes=entry_bytes)
        self.storage = SimpleNamespace(device=torch.device("cuda", 0))


def test_the_ring_is_as_large_as_was_said():
    arenas = SimpleNamespace(slots=OnGpu(96), pages=OnGpu(40))
    made_of: list[int | None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reach, "StagedMemory", lambda *_, batch_bytes: made_of.append(batch_bytes))
        reach.memory_of(arenas)
        reach.memory_of(arenas, 1000)
    assert made_of == [None, 500]


@pytest.mark.parametrize("device", DEVICES)
def test_records_come_and_go_through_the_ring_of_each_rank(device):
    memories = [made(device, room=1, seed=rank) for rank in range(2)]
    world = World(num_ranks=2, memories=memories)
    tokens = list(range(320))
    before = [bytes_in(memory, parts(1, [3, 4, 9, 10, 0])) for memory in memories]
    assert world.put(tokens, 1, [3, 4, 9, 10, 0]).why == ""
    assert world.get(world.lookup(tokens), 5, [1, 2, 5, 6, 7]).why == ""
    assert [bytes_in(memory, parts(5, [1, 2, 5, 6, 7])) for memory in memories] == before
    world.close()
