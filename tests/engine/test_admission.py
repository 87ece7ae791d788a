"""All or nothing: what an admission takes, and that a refused one takes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.engine import admission
from millpond.engine.admission import admit, meet, missing_pages, take_pages
from millpond.engine.request import Sequence
from millpond.errors import Exhausted
from tests.support.towers import Tower


def waiting(tower: Tower, *args: Any, **how: Any) -> Sequence:
    """A sequence at the head of the queue, before any step."""
    tower.engine.submit(tower.request(*args, **how))
    tower.engine._read_inbox()
    return tower.engine._scheduler.waiting[-1]


def snapshot(tower: Tower) -> tuple[Any, ...]:
    """Everything an admission could take."""
    ledger = tower.engine._ledger
    return (
        [ledger.pool.holders(slot) for slot in range(ledger.pool.size)],
        [ledger.pages.count_of(page) for page in range(ledger.pages.size)],
        list(ledger.seats),
        [(c.key, c.uses, c.last_used) for c in ledger.index.checkpoints()],
    )


def end_of_row(sequence: Sequence, start: int) -> int:
    return sequence.prompt_len


def test_an_admission_takes_start_output_pages_and_all_seats():
    tower = Tower()
    tower.answers([tower.request(range(200))])
    ledger, sequence = tower.engine._ledger, waiting(tower, range(250), n=3)
    slots, pages, seats = ledger.pool.num_free, ledger.pages.num_free, len(ledger.seats)
    admitted = admit(ledger, sequence, meet(ledger, sequence), [], end_of_row)
    assert admitted is not None
    assert sequence.folded == sequence.resumed_end == 192
    assert admitted.state_in == sequence.state.slot != admitted.state_out
    assert slots - ledger.pool.num_free == 1
    assert pages - ledger.pages.num_free == 3, "one more page, and two copies of it"
    assert seats - len(ledger.seats) == 3


@pytest.mark.parametrize("missing", ["seat", "slot", "page"])
@pytest.mark.parametrize("cached", [False, True])
def test_one_thing_too_few_refuses_and_changes_nothing(missing, cached):
    tower = Tower(num_slots=4, num_pages=12)
    if cached:
        tower.answers([tower.request(range(200))])
    ledger, sequence = tower.engine._ledger, waiting(tower, range(260), n=2)
    others = [waiting(tower, [1])]
    if missing == "seat":
        ledger.seats = ledger.seats[:1]
    elif missing == "slot":
        if cached:
            for checkpoint in ledger.index.checkpoints():
                ledger.pool.share(checkpoint.lease, "somebody")
        while ledger.pool.num_free:
            ledger.pool.take("somebody")
    else:
        wanted = sum(missing_pages(sequence, 260)) - (3 if cached else 0)
        others[0].pages = [node.page for node in ledger.index.nodes()]
        ledger.pages.retain(others[0].pages)
        others[0].pages += ledger.pages.take(ledger.pages.num_free - wanted + 1)
    before = snapshot(tower)
    assert admit(ledger, sequence, meet(ledger, sequence), others, end_of_row) is None
    assert snapshot(tower) == before


def test_an_admission_that_breaks_off_gives_everything_back(monkeypatch):
    tower = Tower()
    tower.answers([tower.request(range(200))])
    ledger, sequence = tower.engine._ledger, waiting(tower, range(260), n=2)
    before = snapshot(tower)[:3]

    def broken(self: Sequence, seat: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(Sequence, "sit", broken)
    with pytest.raises(RuntimeError):
        admit(ledger, sequence, meet(ledger, sequence), [], end_of_row)
    after = snapshot(tower)[:3]
    assert after[:2] == before[:2]


def test_room_that_turns_out_not_to_be_there_makes_a_sequence_wait(monkeypatch):
    tower = Tower(num_pages=5)
    tower.answers([tower.request(range(200))])
    ledger, sequence = tower.engine._ledger, waiting(tower, range(300))
    ledger.pages.retain(node.page for node in ledger.index.nodes())
    ledger.pages.take(1)
    monkeypatch.setattr(admission, "_has_room", lambda *_: True)
    before = snapshot(tower)[:3]
    assert admit(ledger, sequence, meet(ledger, sequence), [], end_of_row) is None
    assert snapshot(tower)[:3] == before
    assert sequence.request.outcome is None


def test_pages_of_a_row_that_did_not_run_are_not_taken_again():
    tower = Tower()
    ledger, sequence = tower.engine._ledger, waiting(tower, range(70), n=3)
    free = ledger.pages.num_free
    for _ in range(2):
        take_pages(ledger, sequence, 70)
    assert free - ledger.pages.num_free == 4
    assert [one.pages[0] for one in sequence.group] == [sequence.pages[0]] * 3
    assert len({one.pages[1] for one in sequence.group}) == 3
    ledger.vacate(sequence)
    assert ledger.pages.num_free == free


def test_pages_are_taken_all_or_none():
    tower = Tower(num_pages=4)
    ledger, sequence = tower.engine._ledger, waiting(tower, range(130), n=2)
    ledger.pages.take(1)
    with pytest.raises(Exhausted):
        take_pages(ledger, sequence, 130)
    assert ledger.pages.num_free == 3
    assert not any(one.pages for one in sequence.group)


def test_a_prompt_that_would_be_pushed_out_at_once_waits():
    tower = Tower(num_pages=8)
    first, second = tower.request(range(400), max_tokens=60), tower.request(range(200))
    assert tower.answers([first, second]) == [tower.naive(first), tower.naive(second)]
    assert tower.engine.stats().preemptions == 0
