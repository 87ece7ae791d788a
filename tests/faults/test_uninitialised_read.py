"""Kind: something is read that its present owner has not written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from millpond.memory.arena import Arenas
from millpond.ops.batch import ForwardBatch
from tests.faults.house import House, prompt
from tests.support.fake_model import FakeModel


def traffic(house: House) -> None:
    """Three rounds of prompts over two shared prefixes, more than the slots can hold."""
    for turn in range(3):
        asks = [
            house.ask(prompt(200 + 64 * (n % 2), n % 2) + prompt(20 + n, 10 * turn + n), 4)
            for n in range(5)
        ]
        house.run(*asks)
        assert all(ask.is_right for ask in asks)


def test_a_slot_that_changes_hands_is_poisoned_before_its_next_forward():
    """A slot that a row writes was never used, belongs to the request already, or was poisoned."""
    house = House(slots=5, seats=3, pages=40)
    traffic(house)
    owner: dict[int, str] = {}
    handed_on = 0
    for plan in house.executor.plans:
        for slot in plan.poison_slots:
            owner.pop(slot, None)
            handed_on += 1
        for row in (*plan.prefill, *plan.decode):
            for slot in (row.state_out, *(e.slot for e in row.exports)):
                assert owner.setdefault(slot, row.request) == row.request
    assert handed_on


def test_a_cold_row_reads_no_slot_at_all():
    house = House(slots=5, seats=3, pages=40)
    traffic(house)
    rows = house.executor.rows()
    assert any(row.start == 0 for row in rows)
    for row in rows:
        assert (row.state_in is None) == (row.start == 0)


def test_a_resumed_row_reads_the_checkpoints_own_slot():
    """In place: the slot in which the first request left the state, not a copy nor a fresh one."""
    house = House(budget=1_024)
    tokens = prompt(400)
    house.served(tokens)
    (checkpoint,) = house.ledger.index.checkpoints()
    again = house.served(tokens)
    first = house.executor.rows(again.name)[0]
    assert again.cached == first.start == checkpoint.end == 384
    assert first.state_in == checkpoint.lease.slot
    assert first.state_out != first.state_in
    assert again.is_right


class Watched(FakeModel):
    """Looks at the slots that nobody holds whenever a forward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.free_slots: Callable[[], Sequence[int]] = tuple
        self.clean: list[bool] = []

    def forward(self, batch: ForwardBatch, arenas: Arenas) -> torch.Tensor:
        states = arenas.slots.view(0, "recurrent")[list(self.free_slots())]
        self.clean.append(bool(states.isnan().all()))
        return super().forward(batch, arenas)


def test_nan_in_every_free_slot_reaches_no_output():
    """Every slot starts as NaN, and is NaN again before the next forward when it was given back."""
    model = Watched()
    house = House(slots=5, seats=3, pages=40, model=model)
    model.free_slots = house.ledger.pool.free_slots
    traffic(house)
    assert all(model.clean)
    assert house.engine.stats().nonfinite == 0
