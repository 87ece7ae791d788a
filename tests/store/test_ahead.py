"""Transfers while two steps are in flight: they write beside the order of steps."""

from __future__ import annotations

import pytest

from millpond.engine.transfers import Transfers
from millpond.store.jobs import Get, Lookup
from tests.store.test_tiers import TEXT, fill
from tests.store.towers import Shelf, StoredTower
from tests.support.towers import collect


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_get_begins_with_nothing_in_flight_and_steps_go_ahead_beside_it(
    late, num_drafts, monkeypatch
):
    shelf = Shelf()
    fill(shelf)
    tower = StoredTower(shelf, eager=False, runs_ahead=True, num_draft_tokens=num_drafts)
    tower.executor.is_late = lambda plan: late
    busy = tower.request(range(70), max_tokens=200, ignore_eos=True)
    stream = tower.engine.submit(busy)
    for _ in range(4):
        tower.step()
    flying: list[int] = []
    receive = Transfers.receive

    def looking(self, *given):
        flying.append(len(tower.executor.flights))
        return receive(self, *given)

    monkeypatch.setattr(Transfers, "receive", looking)
    wanted = tower.request(TEXT[:300])
    waiting = tower.engine.submit(wanted)
    tower.step()
    assert tower.under_way(Lookup) == 1
    before = tower.engine.stats().steps_ahead
    for _ in range(3):
        tower.step()
    assert tower.engine.stats().steps_ahead == before + 3, "a lookup holds up nobody"
    tower.settle()
    for _ in range(3):
        tower.step()
    assert tower.under_way(Get) == 1
    before = tower.engine.stats().steps_ahead
    for _ in range(3):
        tower.step()
    assert tower.engine.stats().steps_ahead == before + 3, "nor does a get that has begun"
    tower.settle()
    tower.run()
    assert flying == [0]
    assert collect(stream) == tower.naive(busy)
    assert collect(waiting, tower.outcomes) == tower.naive(wanted)
    assert tower.outcomes[wanted.request_id].loaded_tokens == 256
    tower.assert_nothing_is_held()


def test_what_is_published_is_stored_while_a_step_is_in_flight():
    tower = StoredTower(eager=True, runs_ahead=True, decode_checkpoint_interval=64)
    tower.executor.is_late = lambda plan: True
    request = tower.request(range(70), max_tokens=150, ignore_eos=True)
    other = tower.request(range(1, 71), max_tokens=300, ignore_eos=True, seed=4)
    assert tower.answers([request, other]) == [tower.naive(request), tower.naive(other)]
    shelf = tower.shelf
    tower.settle()
    tower.engine.close()
    again = StoredTower(shelf, runs_ahead=True, decode_checkpoint_interval=64)
    said = tower.naive(request)[0][0]
    turn = again.request([*request.tokens, *said, 1, 2, 3])
    assert again.answers([turn]) == [again.naive(turn)]
    assert again.outcomes[turn.request_id].loaded_tokens == (70 + 149) // 64 * 64
    again.assert_nothing_is_held()
