"""Steps with rows of prompts, planned while another is in flight."""

from __future__ import annotations

import pytest

from tests.engine.ahead_tower import KS, in_flight, tower, until_live
from tests.support.symbolic import step_failure
from tests.support.towers import collect


@pytest.mark.parametrize("num_drafts", KS)
def test_a_piece_of_a_prompt_that_was_not_written_takes_all_samples_with_it(num_drafts):
    made = tower(num_drafts, max_prefill_tokens=64)
    request = made.request(range(128), max_tokens=9, n=3)
    lost = iter([True])
    made.executor.writes = lambda slot, end: not next(lost, False)
    assert made.answers([request]) == [made.naive(request)]
    assert made.engine.stats().rows_wasted >= 1
    made.assert_nothing_is_held()


@pytest.mark.parametrize("num_drafts", KS)
def test_whoever_comes_while_a_step_is_in_flight_joins_the_one_planned_next(num_drafts):
    made = tower(num_drafts)
    made.engine.submit(made.request(range(70), max_tokens=500))
    until_live(made)
    late = made.request(range(100, 170), max_tokens=3)
    stream = made.engine.submit(late)
    [before] = in_flight(made)
    made.step()
    [joined] = in_flight(made)
    assert (before.prefill, len(joined.prefill), len(joined.verify)) == ((), 1, 1)
    made.step()
    [after] = in_flight(made)
    assert [row.request for row in after.verify] == ["r0", "r1"], "its first token is under way"
    for _ in range(4):
        made.step()
    assert collect(stream) == made.naive(late)
    assert made.engine.stats().steps_waited == {}


@pytest.mark.parametrize("num_drafts", KS)
@pytest.mark.parametrize("mode", ["interior", "split"])
@pytest.mark.parametrize("late", [False, True])
def test_rows_of_a_prompt_follow_each_other_and_save_what_they_would_one_by_one(
    num_drafts, mode, late
):
    found = []
    for runs_ahead in (False, True):
        made = tower(
            num_drafts,
            late=late,
            max_prefill_tokens=192,
            checkpoint_mode=mode,
            checkpoint_interval=128,
            num_slots=40,
            checkpoint_budget=30,
        )
        if not runs_ahead:
            made.engine._ahead._runs_ahead = False
        requests = [made.request(range(i, 700 + 9 * i), max_tokens=9, seed=i) for i in range(3)]
        assert made.answers(requests) == [made.naive(request) for request in requests]
        stats = made.engine.stats()
        assert (stats.steps_ahead == stats.steps - 1) == runs_ahead
        assert stats.checkpoints_skipped == {}
        index = made.engine._ledger.index
        rows = [
            (row.request, row.start, row.end, tuple(export.end for export in row.exports))
            for plan in made.executor.plans
            for row in plan.prefill
        ]
        found.append((rows, {(c.end, c.kind) for c in index.checkpoints()}))
        made.assert_nothing_is_held()
    assert found[0] == found[1]


def test_a_state_to_be_published_is_left_alone_by_the_row_that_follows():
    made = tower(0, max_prefill_tokens=128, checkpoint_mode="split", checkpoint_interval=128)
    made.engine.submit(made.request(range(400), max_tokens=3))
    made.step()
    [second] = in_flight(made)
    [first] = made.executor.plans or [made.executor.flights[0].plan]
    [row], [before] = second.prefill, first.prefill
    assert (row.state_in, row.start) == (before.state_out, before.end)
    assert row.state_out != row.state_in
    index = made.engine._ledger.index
    [checkpoint] = index.checkpoints()
    assert (checkpoint.end, checkpoint.lease.slot) == (128, before.state_out)
    made.run()
    made.assert_nothing_is_held()


def test_nothing_of_a_step_in_flight_can_be_found():
    made = tower(
        0, max_prefill_tokens=128, checkpoint_interval=64, num_slots=20, checkpoint_budget=16
    )
    made.engine.submit(made.request(range(600), max_tokens=3))
    ended = 0
    while made.step():
        ended += sum(len(row.tokens) for row in made.executor.plans[-1].prefill)
        assert {c.end for c in made.engine._ledger.index.checkpoints()} == {
            *range(64, ended + 1, 64)
        } - {0}


@pytest.mark.parametrize("num_drafts", KS)
def test_samples_of_one_prompt_sit_out_one_step_where_their_states_part(num_drafts):
    made = tower(num_drafts)
    requests = [
        made.request(range(70), max_tokens=30),
        made.request(range(100, 170), max_tokens=9, n=3, seed=2),
    ]
    assert made.answers(requests) == [made.naive(request) for request in requests]
    [at] = [plan.step for plan in made.executor.plans if plan.fan_outs]
    rows = [{row.request for row in plan.verify} for plan in made.executor.plans]
    assert [rows[at + 1], rows[at + 2]] == [{"r0"}, {"r0", "r1"}]
    stats = made.engine.stats()
    assert stats.steps_ahead == stats.steps - 1


@pytest.mark.parametrize("num_drafts", KS)
def test_whoever_shares_what_is_being_computed_waits_for_the_step_in_flight(num_drafts):
    """And begins at what that step published, though another was planned meanwhile."""
    made = tower(num_drafts, max_prefill_tokens=1000)
    shared = list(range(320))
    requests = [made.request([*shared, i, i], max_tokens=20, seed=i) for i in range(3)]
    assert made.answers(requests) == [made.naive(request) for request in requests]
    assert [made.outcomes[r.request_id].cached_tokens for r in requests] == [0, 320, 320]
    stats = made.engine.stats()
    assert stats.holds == {"published": 2}
    assert stats.steps_ahead == stats.steps - 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("steps", range(1, 7))
def test_a_prompt_aborted_with_a_row_in_flight_keeps_what_it_holds_until_that_has_ended(
    late, steps
):
    """Its samples, too: the last row copies a page for each and fills their seats."""
    made = tower(0, late=late, max_prefill_tokens=64, checkpoint_interval=0, num_slots=5)
    stream = made.engine.submit(made.request(range(400), max_tokens=9, n=2))
    other = made.request(range(7, 500), max_tokens=9)
    for _ in range(steps):
        made.step()
    [flying] = in_flight(made)
    assert bool(flying.fan_outs) == (steps == 6)
    stream.abort()
    answer = made.engine.submit(other)
    made.step()
    assert {reason for _, reason in collect(stream).values()} == {"abort"}
    free = made.engine._ledger.pool.free_slots()
    assert not {row.state_out for plan in in_flight(made) for row in plan.prefill} & {*free}
    made.run()
    assert collect(answer) == made.naive(other)
    assert made.engine.stats().rows_wasted == 1
    made.assert_nothing_is_held()


def test_who_ends_with_the_first_token_wastes_the_row_that_followed_the_prompt():
    made = tower(0)
    probe = made.request(range(70), max_tokens=9, ignore_eos=True)
    stop = made.naive(probe)[0][0][0]
    request = made.request(range(70), max_tokens=9, stop_token_ids=(stop,))
    assert made.answers([request]) == [{0: ([stop], "stop")}]
    assert made.engine.stats().rows_wasted == 1
    made.assert_nothing_is_held()


def test_one_token_is_all_so_no_row_follows_the_prompt():
    made = tower(0)
    requests = [made.request(range(i, 70 + i), max_tokens=1) for i in range(3)]
    assert made.answers(requests) == [made.naive(request) for request in requests]
    assert made.engine.stats().rows_wasted == 0
    assert not any(plan.verify for plan in made.executor.plans)


@pytest.mark.parametrize("late", [False, True])
def test_who_was_in_the_second_step_alone_has_not_failed_with_the_first(late):
    made = tower(0, late=late)
    first = made.request(range(70), max_tokens=40)
    second = made.request(range(100, 170), max_tokens=9)
    stream = made.engine.submit(first)
    until_live(made)
    made.executor.fail = lambda plan: step_failure(plan) if not plan.prefill else None
    other = made.engine.submit(second)
    made.step()
    made.executor.fail = None
    waiting = {one.request.spec.request_id: one.failures for one in made.engine._scheduler.waiting}
    running = {one.request.spec.request_id: one.failures for one in made.engine._scheduler.running}
    assert {**waiting, **running} in ({"r0": 1, "r1": 0}, {"r0": 0, "r1": 0})
    made.run()
    assert [collect(stream), collect(other)] == [made.naive(first), made.naive(second)]
    made.assert_nothing_is_held()
