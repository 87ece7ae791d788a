from __future__ import annotations

import pytest

from millpond.errors import Broken, Exhausted, LeaseError
from millpond.state.lease import Phase, ReaderLease, SlotId
from millpond.state.pool import StatePool
from millpond.state.running import RunningState


def started(pool: StatePool, end: int = 0, holder: str = "request") -> RunningState:
    state = RunningState(holder)
    state.start(None)
    if end:
        step(pool, state, end)
    return state


def step(pool: StatePool, state: RunningState, end: int) -> tuple[int | None, int]:
    slots = state.plan_output(pool)
    state.commit(pool, end)
    return slots


def checkpoint(pool: StatePool, end: int = 64) -> ReaderLease:
    """A published state whose request is gone: the index is its only holder."""
    state = started(pool, end)
    lease = state.publish(pool)
    state.close(pool)
    return lease


def test_decode_runs_in_place_in_one_slot() -> None:
    pool = StatePool(3)
    state = started(pool)
    assert step(pool, state, 100) == (None, 0)
    for end in range(101, 110):
        assert step(pool, state, end) == (0, 0)
    assert (state.end(pool), pool.num_free) == (109, 2)


def test_after_publishing_the_next_state_goes_to_a_fresh_slot() -> None:
    pool = StatePool(3)
    state = started(pool, 64)
    lease = state.publish(pool)
    assert pool.holders(lease.slot) == ("request", "index")
    assert step(pool, state, 65) == (0, 1)
    assert pool.holders(lease.slot) == ("index",)
    assert pool.end(lease) == 64
    assert step(pool, state, 66) == (1, 1)


def test_a_published_state_is_overwritten_in_place_once_the_index_let_go() -> None:
    pool = StatePool(1)
    state = started(pool, 64)
    lease = state.publish(pool)
    with pytest.raises(Exhausted):
        state.plan_output(pool)
    assert not state.in_flight
    pool.release(lease)
    assert step(pool, state, 65) == (0, 0)


def test_a_resume_reads_its_checkpoint_in_place_and_writes_a_fresh_slot() -> None:
    pool = StatePool(2)
    lease = checkpoint(pool)
    state = RunningState("resumed")
    state.start(pool.share(lease, "resumed"))
    assert state.end(pool) == 64
    assert step(pool, state, 80) == (0, 1)
    assert pool.holders(lease.slot) == ("index",)


def test_with_no_spare_slot_a_resume_reopens_the_checkpoint_it_took_out_of_the_index() -> None:
    pool = StatePool(1)
    lease = checkpoint(pool)
    state = RunningState("resumed")
    state.start(pool.share(lease, "resumed"))
    with pytest.raises(Exhausted):
        state.plan_output(pool)
    pool.release(lease)  # the index drops it
    assert step(pool, state, 80) == (0, 0)


def test_a_transfer_keeps_a_resume_from_reopening() -> None:
    pool = StatePool(1)
    lease = checkpoint(pool)
    put = pool.pin(lease, "put")
    state = RunningState("resumed")
    state.start(pool.share(lease, "resumed"))
    pool.release(lease)
    with pytest.raises(Exhausted):
        state.plan_output(pool)
    pool.release(put)
    assert state.plan_output(pool) == (0, 0)


def test_only_exports_in_the_report_are_sealed() -> None:
    pool = StatePool(4)
    state = started(pool)
    state.plan_output(pool)
    deep, shallow, lost = (state.plan_export(pool, end) for end in (192, 64, 128))
    exported = state.commit(pool, 200, {(shallow, 64), (deep, 192), (lost, 64)})
    assert [(pool.end(x.lease), x.end, x.lease.slot) for x in exported] == [
        (64, 64, shallow),
        (192, 192, deep),
    ]
    assert pool.phase(lost) is Phase.FREE
    assert (state.end(pool), pool.num_free) == (200, 1)


def test_one_position_is_exported_once() -> None:
    pool = StatePool(3)
    state = started(pool)
    state.plan_output(pool)
    state.plan_export(pool, 64)
    with pytest.raises(LeaseError):
        state.plan_export(pool, 64)


def test_a_failed_step_in_place_loses_the_state() -> None:
    pool = StatePool(2)
    state = started(pool, 64)
    assert state.plan_output(pool) == (0, 0)
    state.plan_export(pool, 128)
    state.discard(pool)
    assert (state.end(pool), state.slot, pool.num_free) == (0, None, 2)
    state.start(None)


def test_a_failed_step_elsewhere_keeps_the_state_it_read() -> None:
    pool = StatePool(2)
    lease = checkpoint(pool)
    state = RunningState("resumed")
    state.start(pool.share(lease, "resumed"))
    assert state.plan_output(pool) == (0, 1)
    state.discard(pool)
    assert (state.end(pool), state.slot, pool.num_free) == (64, 0, 1)


def test_a_step_that_never_ran_changes_nothing() -> None:
    pool = StatePool(2)
    state = started(pool, 64)
    state.plan_output(pool)
    state.plan_export(pool, 128)
    state.cancel(pool)
    assert (state.end(pool), state.slot, pool.num_free) == (64, 0, 1)
    cold = started(pool)
    cold.plan_output(pool)
    cold.cancel(pool)
    assert (cold.end(pool), pool.num_free) == (0, 1)


def test_a_step_in_flight_keeps_what_it_touches() -> None:
    pool = StatePool(2)
    lease = checkpoint(pool)
    state = RunningState("resumed")
    state.start(pool.share(lease, "resumed"))
    state.plan_output(pool)
    pool.release(lease)  # evicted meanwhile
    for attempt in (
        lambda: state.close(pool),
        lambda: state.publish(pool),
        lambda: state.fan_out(pool, 2),
        lambda: state.start(None),
        lambda: state.plan_output(pool),
    ):
        with pytest.raises(LeaseError):
            attempt()
    assert pool.num_free == 0
    state.commit(pool, 65)
    assert pool.num_free == 1


def test_the_last_of_a_fan_out_writes_in_place() -> None:
    pool = StatePool(3)
    state = started(pool, 100)
    others = state.fan_out(pool, 3)
    assert pool.holders(state.leases[0].slot) == ("request", "request/1", "request/2")
    assert step(pool, others[0], 101) == (0, 1)
    assert step(pool, state, 101) == (0, 2)
    assert step(pool, others[1], 101) == (0, 0)
    for one in (state, *others):
        one.close(pool)
    assert pool.num_free == 3


def test_a_fan_out_of_one_goes_on_in_place() -> None:
    pool = StatePool(1)
    state = started(pool, 100)
    assert state.fan_out(pool, 1) == []
    assert step(pool, state, 101) == (0, 0)


def test_the_zero_state_cannot_be_given_away() -> None:
    pool = StatePool(1)
    state = started(pool)
    for attempt in (lambda: state.publish(pool), lambda: state.fan_out(pool, 2)):
        with pytest.raises(LeaseError):
            attempt()


def test_a_commit_that_folds_nothing_is_refused() -> None:
    pool = StatePool(2)
    state = started(pool, 64)
    with pytest.raises(LeaseError):
        state.commit(pool, 65)
    state.plan_output(pool)
    with pytest.raises(Broken):
        state.commit(pool, 64)
    assert state.in_flight


def test_closing_gives_everything_back_and_may_be_repeated() -> None:
    pool = StatePool(2)
    state = started(pool, 64)
    with pytest.raises(LeaseError):
        state.start(None)
    state.close(pool)
    state.close(pool)
    assert (pool.num_free, state.leases) == (2, ())


def test_a_request_does_not_start_from_a_spent_lease() -> None:
    pool = StatePool(1)
    lease = checkpoint(pool)
    pool.release(lease)
    with pytest.raises(LeaseError):
        RunningState("resumed").start(lease)


def test_a_step_planned_ahead_goes_on_in_place_and_is_committed_second() -> None:
    pool = StatePool(1)
    state = started(pool, 64)
    assert state.plan_output(pool) == (0, 0)
    assert state.plan_ahead() == 0
    assert (state.is_ahead, state.in_place, len(state.leases)) == (True, True, 1)
    state.commit(pool, 65)
    assert (state.is_ahead, state.in_flight, state.in_place) == (False, True, True)
    with pytest.raises(LeaseError):
        state.publish(pool)
    state.commit(pool, 66)
    assert (state.end(pool), state.in_flight) == (66, False)


def test_at_most_two_steps_are_planned_and_the_second_needs_a_first() -> None:
    pool = StatePool(1)
    state = started(pool, 64)
    with pytest.raises(LeaseError):
        state.plan_ahead()
    state.plan_output(pool)
    state.plan_ahead()
    for attempt in (state.plan_ahead, lambda: state.plan_output(pool)):
        with pytest.raises(LeaseError):
            attempt()


def test_what_a_step_ahead_starts_from_is_kept_once_it_is_committed() -> None:
    pool = StatePool(3)
    state = started(pool, 63)
    state.plan_output(pool)
    assert state.plan_ahead() == 0
    assert state.keep_input(pool) == 1
    assert state.anchor is None
    assert pool.phase(SlotId(0)) is Phase.OPEN
    state.commit(pool, 64)
    assert state.anchor is not None
    assert (state.anchor.end, state.anchor.lease.slot, pool.phase(SlotId(0))) == (
        64,
        0,
        Phase.SEALED,
    )
    state.commit(pool, 65)
    assert (state.slot, state.end(pool), pool.holders(SlotId(0))) == (1, 65, ("request",))
    state.close(pool)
    assert pool.num_free == 3


def test_exports_belong_to_the_step_they_were_planned_for() -> None:
    pool = StatePool(3)
    state = started(pool, 60)
    state.plan_output(pool)
    unreached = state.plan_export(pool, 64)
    with pytest.raises(LeaseError):
        state.plan_export(pool, 64)
    state.plan_ahead()
    reached = state.plan_export(pool, 64)
    assert state.exports == (64, 64)
    assert state.commit(pool, 62, {(0, 62)}) == ()
    assert pool.phase(unreached) is Phase.FREE
    [export] = state.commit(pool, 66, {(0, 66), (reached, 64)})
    assert (export.end, export.lease.slot) == (64, reached)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("committed", [False, True])
def test_a_failure_ends_the_step_ahead_too(keep: bool, committed: bool) -> None:
    pool = StatePool(4)
    state = started(pool, 64)
    state.plan_output(pool)
    state.plan_ahead()
    if keep:
        state.keep_input(pool)
    state.plan_export(pool, 128)
    if committed:
        state.commit(pool, 65)
    state.discard(pool)
    stands = keep and committed
    assert (state.in_flight, state.slot, state.end(pool)) == (
        False,
        *((0, 65) if stands else (None, 0)),
    )
    state.close(pool)
    assert pool.num_free == 4


@pytest.mark.parametrize("keep", [False, True])
def test_two_steps_that_never_ran_leave_the_state_as_it_was(keep: bool) -> None:
    pool = StatePool(2)
    state = started(pool, 64)
    state.plan_output(pool)
    state.plan_ahead()
    if keep:
        state.keep_input(pool)
    state.cancel(pool)
    assert (state.slot, state.end(pool), state.in_flight, pool.num_free) == (0, 64, False, 1)
