from __future__ import annotations

import pytest

from millpond.errors import Broken, Exhausted, LeaseError
from millpond.state.lease import Lease, Phase, ProducerLease, ReaderLease, SlotId
from millpond.state.pool import StatePool


def sealed(pool: StatePool, end: int = 64, holder: str = "request") -> ReaderLease:
    lease = pool.take(holder)
    pool.record_end(lease, end)
    return pool.seal(lease)


def test_a_slot_goes_through_its_phases_and_comes_back() -> None:
    pool = StatePool(1)
    producer = pool.take("request")
    assert pool.phase(producer.slot) is Phase.OPEN
    assert pool.end(producer) == 0
    pool.record_end(producer, 64)
    reader = pool.seal(producer)
    assert (pool.phase(reader.slot), pool.end(reader)) == (Phase.SEALED, 64)
    again = pool.reopen(reader)
    assert again is not None
    assert (pool.phase(again.slot), pool.end(again)) == (Phase.OPEN, 64)
    pool.release(again)
    assert (pool.phase(again.slot), pool.num_free) == (Phase.FREE, 1)
    assert pool.end(pool.take("next")) == 0


def test_a_sealed_slot_is_free_when_the_last_of_its_holders_leaves() -> None:
    pool = StatePool(1)
    reader = sealed(pool)
    index, put = pool.share(reader, "index"), pool.pin(reader, "put")
    assert pool.holders(reader.slot) == ("request", "index", "put")
    for lease in (reader, index):
        pool.release(lease)
        assert pool.num_free == 0
    pool.release(put)
    assert pool.num_free == 1


def test_reopen_waits_for_readers_and_for_transfers() -> None:
    pool = StatePool(1)
    reader = sealed(pool)
    for other in (pool.share(reader, "index"), pool.pin(reader, "put")):
        assert pool.reopen(reader) is None
        assert reader.live
        pool.release(other)
    assert isinstance(pool.reopen(reader), ProducerLease)
    assert not reader.live


def test_an_empty_pool_says_exhausted_and_changes_nothing() -> None:
    pool = StatePool(2)
    pool.take("a"), pool.take("b")
    with pytest.raises(Exhausted):
        pool.take("c")
    assert [pool.holders(SlotId(slot)) for slot in (0, 1)] == [("a",), ("b",)]


def test_a_spent_lease_raises_in_every_verb() -> None:
    pool = StatePool(2)
    producer = pool.take("request")
    pool.record_end(producer, 64)
    reader = pool.seal(producer)
    pool.release(reader)
    for verb in (pool.seal, pool.release, pool.end):
        with pytest.raises(LeaseError):
            verb(producer)
    for attempt in (
        lambda: pool.reopen(reader),
        lambda: pool.share(reader, "x"),
        lambda: pool.pin(reader, "x"),
        lambda: pool.release(reader),
        lambda: pool.record_end(producer, 128),
    ):
        with pytest.raises(LeaseError):
            attempt()
    assert pool.num_free == 2


def test_a_lease_of_another_kind_raises() -> None:
    pool = StatePool(2)
    producer = pool.take("request")
    with pytest.raises(LeaseError):
        pool.share(producer, "x")  # type: ignore[arg-type]
    reader = sealed(pool)
    with pytest.raises(LeaseError):
        pool.record_end(reader, 65)  # type: ignore[arg-type]
    put = pool.pin(reader, "put")
    with pytest.raises(LeaseError):
        pool.reopen(put)  # type: ignore[arg-type]


def test_a_forged_lease_of_an_earlier_tenancy_raises() -> None:
    pool = StatePool(1)
    first = pool.take("first")
    pool.release(first)
    second = pool.take("second")
    assert second.generation == first.generation + 1
    forged: Lease = ProducerLease(first.slot, first.generation, "first")
    with pytest.raises(LeaseError):
        pool.release(forged)
    with pytest.raises(LeaseError):
        StatePool(1).release(second)
    assert pool.holders(second.slot) == ("second",)


def test_an_end_only_grows_and_nothing_uncommitted_is_sealed() -> None:
    pool = StatePool(1)
    lease = pool.take("request")
    with pytest.raises(LeaseError):
        pool.seal(lease)
    pool.record_end(lease, 5)
    for end in (5, 4, 0):
        with pytest.raises(Broken):
            pool.record_end(lease, end)
    assert pool.end(lease) == 5


def test_freed_slots_are_told_once() -> None:
    pool = StatePool(3)
    leases = [pool.take("request") for _ in range(3)]
    assert pool.drain_freed() == ()
    pool.release(leases[1])
    pool.release(leases[0])
    assert pool.drain_freed() == (1, 0)
    assert pool.drain_freed() == ()
    pool.release(pool.take("brief"))
    pool.release(pool.take("brief"))
    assert sorted(pool.drain_freed()) == [0, 1]


def test_a_quarantined_slot_can_only_be_let_go() -> None:
    pool = StatePool(2)
    reader = sealed(pool)
    pool.quarantine(reader.slot, "freed while leased")
    for attempt in (
        lambda: pool.share(reader, "x"),
        lambda: pool.reopen(reader),
        lambda: pool.end(reader),
    ):
        with pytest.raises(LeaseError, match="freed while leased"):
            attempt()
    pool.release(reader)
    assert pool.phase(reader.slot) is Phase.QUARANTINED
    assert (pool.num_free, pool.drain_freed()) == (1, ())


def test_a_free_slot_in_quarantine_is_never_given() -> None:
    pool = StatePool(2)
    pool.quarantine(SlotId(0), "a write nobody owns")
    pool.quarantine(SlotId(0), "a second reason")
    assert pool.quarantined == {0: "a write nobody owns"}
    assert pool.take("request").slot == 1
    with pytest.raises(Exhausted):
        pool.take("request")
