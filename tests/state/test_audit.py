"""Every invariant says no to a house that breaks it, and only by its own name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from millpond.errors import Broken
from millpond.state import audit
from millpond.state.checkpoint import AnchorKind
from millpond.state.lease import ProducerLease, Seat, SlotId
from millpond.state.pages import PagePool
from millpond.state.pool import StatePool
from millpond.state.prefix import PrefixIndex
from millpond.state.running import RunningState

PAGE = 4


@dataclass(frozen=True)
class Row:
    seat: Seat
    start: int
    end: int
    state_in: SlotId | None
    state_out: SlotId


def a_house() -> audit.House:
    """One checkpoint at two pages, read by one running request that has gone on by one token."""
    pool, pages = StatePool(4), PagePool(8)
    index = PrefixIndex(pool, pages, PAGE)
    state = RunningState("request")
    state.start(None)
    state.plan_output(pool)
    state.commit(pool, 2 * PAGE)
    handles = pages.take(3)
    index.publish(
        range(2 * PAGE), 2 * PAGE, handles, state.publish(pool), AnchorKind.PROMPT_END, b"salt"
    )
    state.plan_output(pool)
    state.commit(pool, 2 * PAGE + 1)
    state_in, state_out = state.plan_output(pool)
    ahead = state.plan_ahead()
    return audit.House(
        pool=pool,
        pages=pages,
        index=index,
        running=[state],
        page_runs=[handles],
        flights=[
            [Row(Seat(0), 2 * PAGE + 1, 2 * PAGE + 3, state_in, state_out)],
            [Row(Seat(0), 2 * PAGE + 2, 2 * PAGE + 4, ahead, ahead)],
        ],
    )


def checkpoint_slot(house: audit.House) -> SlotId:
    return next(house.index.checkpoints()).lease.slot


def the_request(house: audit.House) -> RunningState:
    return next(iter(house.running))


def break_the_free_list(house: audit.House) -> audit.House:
    house.pool._free.pop()
    return house


def break_open(house: audit.House) -> audit.House:
    (lease,) = the_request(house).leases
    house.pool._grant(ProducerLease(lease.slot, lease.generation, "second"))
    return house


def break_sealed(house: audit.House) -> audit.House:
    slot = checkpoint_slot(house)
    house.pool._grant(ProducerLease(slot, 0, "writer"))
    return house


def break_free(house: audit.House) -> audit.House:
    slot = house.pool.free_slots()[0]
    house.pool._grant(ProducerLease(slot, 0, "ghost"))
    return house


def break_a_free_page(house: audit.House) -> audit.House:
    house.pages._count[house.pages.free_pages()[0]] = 1
    return house


def break_a_row(house: audit.House) -> audit.House:
    [[row], rows] = house.flights
    return replace(house, flights=[[replace(row, start=2 * PAGE)], rows])


def break_a_row_ahead(house: audit.House) -> audit.House:
    [rows, [row]] = house.flights
    return replace(house, flights=[rows, [replace(row, start=2 * PAGE + 4)]])


def break_a_row_of_another(house: audit.House) -> audit.House:
    [rows, [row]] = house.flights
    return replace(house, flights=[rows, [replace(row, seat=Seat(1))]])


def break_what_a_row_writes(house: audit.House) -> audit.House:
    [rows, [row]] = house.flights
    return replace(house, flights=[rows, [replace(row, state_out=house.pool.free_slots()[0])]])


def break_what_a_row_reads(house: audit.House) -> audit.House:
    [[row], _] = house.flights
    slot = house.pool.free_slots()[0]
    return replace(house, flights=[[replace(row, start=0, state_in=slot)]])


def break_a_sealed_end(house: audit.House) -> audit.House:
    house.pool._end[checkpoint_slot(house)] = 0
    return house


def break_a_checkpoint_end(house: audit.House) -> audit.House:
    house.pool._end[checkpoint_slot(house)] = PAGE
    return house


def break_a_checkpoint_page(house: audit.House) -> audit.House:
    handles = next(iter(house.page_runs or ()))
    house.pages.release([*handles, *handles][1:2])
    house.pages.release([*handles, *handles][1:2])
    return house


def break_a_page_path(house: audit.House) -> audit.House:
    next(house.index.nodes()).children.clear()
    return house


def break_a_lease_of_nobody(house: audit.House) -> audit.House:
    return replace(house, running=[])


def break_a_page_count(house: audit.House) -> audit.House:
    return replace(house, page_runs=[])


def break_a_key(house: audit.House) -> audit.House:
    next(house.index.nodes()).tokens = bytes(PAGE * 4)
    return house


def break_a_salt(house: audit.House) -> audit.House:
    next(house.index.nodes()).salt = b"another"
    return house


def break_sleep(house: audit.House) -> audit.House:
    return replace(house, asleep=True)


CASES: list[tuple[str, Callable[[audit.House], audit.House]]] = [
    ("every_slot_is_in_one_phase", break_the_free_list),
    ("open_means_one_producer_alone", break_open),
    ("sealed_means_readers_and_no_producer", break_sealed),
    ("free_means_nobody", break_free),
    ("free_means_nobody", break_a_free_page),
    ("a_row_starts_where_its_state_ends", break_a_row),
    ("a_row_starts_where_its_state_ends", break_a_row_ahead),
    ("a_row_starts_where_its_state_ends", break_a_row_of_another),
    ("what_is_in_flight_is_held", break_what_a_row_writes),
    ("what_is_in_flight_is_held", break_what_a_row_reads),
    ("only_committed_state_is_sealed", break_a_sealed_end),
    ("findable_means_sealed_and_whole", break_a_checkpoint_end),
    ("findable_means_sealed_and_whole", break_a_checkpoint_page),
    ("findable_means_sealed_and_whole", break_a_page_path),
    ("a_finished_request_holds_nothing", break_a_lease_of_nobody),
    ("a_finished_request_holds_nothing", break_a_page_count),
    ("keys_name_all_that_matters", break_a_key),
    ("keys_name_all_that_matters", break_a_salt),
    ("asleep_means_all_free", break_sleep),
]


def test_a_sound_house_passes() -> None:
    audit.run(a_house())
    sleeping = StatePool(2)
    sleeping.quarantine(SlotId(0), "a defect")
    pages = PagePool(1)
    index = PrefixIndex(sleeping, pages, PAGE)
    audit.run(audit.House(pool=sleeping, pages=pages, index=index, asleep=True))


@pytest.mark.parametrize("name, break_it", CASES)
def test_a_broken_house_is_told_by_name(
    name: str, break_it: Callable[[audit.House], audit.House]
) -> None:
    with pytest.raises(Broken, match=f"^{name}: "):
        audit.run(break_it(a_house()))


def test_every_invariant_has_a_case() -> None:
    assert {check.__name__ for check in audit.ALL} == {name for name, _ in CASES}
