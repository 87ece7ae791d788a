"""Two steps in flight: when the second is planned, and what becomes of it."""

from __future__ import annotations

import pytest

from millpond.engine.types import Delta
from millpond.plan.step import PAGE_SIZE, Ended, StepPlan, StepResult
from tests.engine.ahead_tower import KS, in_flight, tower, until_live
from tests.support.symbolic import as_state, step_failure
from tests.support.towers import Tower, collect


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("num_drafts", KS)
def test_every_step_of_an_answer_is_planned_while_another_is_in_flight(num_drafts, late):
    made = tower(num_drafts, late=late)
    request = made.request(range(70), max_tokens=60)
    assert made.answers([request]) == [made.naive(request)]
    stats = made.engine.stats()
    assert stats.steps_ahead == stats.steps - 1, "all but that of the prompt"
    assert stats.steps_waited == {"rows": 1}, "after the last token there is nothing to plan"
    assert not made.executor.flights
    made.assert_nothing_is_held()


def test_an_executor_that_does_not_run_ahead_has_one_step_in_flight():
    made = Tower()
    flying: list[int] = []
    made.executor.during = lambda plan: flying.append(len(made.executor.flights))
    made.answers([made.request(range(70), max_tokens=20)])
    assert (set(flying), made.engine.stats().steps_ahead) == ({1}, 0)


@pytest.mark.parametrize("num_drafts", KS)
def test_a_row_ahead_is_told_where_it_starts_and_what_it_may_come_to(num_drafts):
    made = tower(num_drafts, right=num_drafts)
    made.engine.submit(made.request(range(70), max_tokens=60))
    until_live(made)
    [before] = in_flight(made)
    made.step()
    [after] = in_flight(made)
    [first], [second] = before.verify, after.verify
    assert second.state_in == second.state_out == first.state_out
    # All drafts turned out to be right, so it comes to the most it was told.
    known = len(made.engine._scheduler.running[0].tokens)
    assert (second.start, second.pending, second.end) == (first.end, num_drafts, known)


@pytest.mark.parametrize("num_drafts", KS)
def test_a_sample_that_is_sure_to_end_gets_no_further_row(num_drafts):
    made = tower(num_drafts, right=0)
    request = made.request(range(70), max_tokens=9)
    assert made.answers([request]) == [made.naive(request)]
    assert made.engine.stats().rows_wasted == 0
    assert len(made.executor.plans) == 9


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("num_drafts", KS)
def test_a_stop_token_wastes_one_row_and_publishes_nothing_beyond_it(num_drafts, late):
    made = tower(num_drafts, late=late, right=num_drafts, decode_checkpoint_interval=64)
    probe = made.request(range(60), max_tokens=80, ignore_eos=True)
    [(text, _)] = made.naive(probe).values()
    at = next(i for i in range(12, 80) if text.index(text[i]) == i)
    request = made.request(
        range(60), max_tokens=80, ignore_eos=True, stop_token_ids=(text[at],), n=1
    )
    [answer] = made.answers([request])
    assert answer == {0: (text[: at + 1], "stop")}
    assert made.engine.stats().rows_wasted == 1
    tokens = [*request.tokens, *text[: at + 1]]
    for checkpoint in made.engine._ledger.index.checkpoints():
        assert checkpoint.end < len(tokens)
        held = made.executor.slots[checkpoint.lease.slot]
        assert held == as_state(tokens, 60)[: checkpoint.end]
    made.assert_nothing_is_held()


@pytest.mark.parametrize("num_drafts", KS)
@pytest.mark.parametrize("at", range(3, 9))
def test_an_answer_that_stops_where_its_state_was_worth_keeping_is_found_again(num_drafts, at):
    """Its last state is being written over: the row ahead went to another slot instead."""
    made = tower(num_drafts, right=num_drafts, decode_checkpoint_interval=64)
    probe = made.request(range(60), max_tokens=80, ignore_eos=True)
    [(text, _)] = made.naive(probe).values()
    if text.index(text[at]) != at:
        pytest.skip("said before")
    stop = (text[at],)
    request = made.request(range(60), max_tokens=80, ignore_eos=True, stop_token_ids=stop)
    [answer] = made.answers([request])
    # The state at 64 is worth keeping once token 64 is folded: it is known, and one is drawn after.
    folded = 60 + at
    ends = {checkpoint.end for checkpoint in made.engine._ledger.index.checkpoints()}
    turn = made.request([*request.tokens, *answer[0][0], 1, 2, 3])
    assert made.answers([turn]) == [made.naive(turn)]
    sync = Tower(num_draft_tokens=num_drafts, decode_checkpoint_interval=64)
    sync.executor.right = lambda: num_drafts
    sync.answers([sync.request(range(60), max_tokens=80, ignore_eos=True, stop_token_ids=stop)])
    assert ends == {checkpoint.end for checkpoint in sync.engine._ledger.index.checkpoints()}
    assert folded < 64 or num_drafts or ends == {64}


@pytest.mark.parametrize("late", [False, True])
def test_who_is_aborted_hears_of_it_at_once_and_gives_back_when_its_last_row_has_ended(late):
    made = tower(0, late=late)
    stream = made.engine.submit(made.request(range(70), max_tokens=500))
    until_live(made)
    stream.abort()
    slots, pages = made.engine.stats().slots_free, made.engine.stats().pages_free
    during: list[int] = []
    made.executor.during = lambda plan: during.append(made.engine.stats().slots_free)
    assert made.step()
    assert collect(stream)[0][1] == "abort"
    assert all(free == slots for free in during)
    stats = made.engine.stats()
    assert (stats.slots_free, stats.pages_free > pages, stats.rows_wasted) == (slots + 1, True, 1)
    assert not made.step()
    made.assert_nothing_is_held()


@pytest.mark.parametrize("num_drafts", KS)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", range(2, 8))
def test_a_step_fails_with_the_one_before_and_both_are_recomputed_once(num_drafts, late, at):
    made = tower(num_drafts, late=late)
    requests = [made.request(range(i, 70 + i), max_tokens=30, seed=i) for i in range(2)]
    failing = iter([step == at for step in range(9)])
    made.executor.fail = lambda plan: step_failure(plan) if next(failing, False) else None
    assert made.answers(requests) == [made.naive(request) for request in requests]
    stats = made.engine.stats()
    assert stats.steps_failed == 1
    # With drafts a sample may turn out to have reached its length: one row more each.
    assert stats.rows_wasted == 2 if num_drafts == 0 else 2 <= stats.rows_wasted <= 4
    made.assert_nothing_is_held()


@pytest.mark.parametrize("late", [False, True])
def test_a_state_that_was_not_written_takes_the_row_ahead_with_it(late):
    made = tower(0, late=late)
    requests = [made.request(range(i, 70 + i), max_tokens=30, seed=i) for i in range(2)]
    lost = iter([False] * 9 + [True])
    made.executor.writes = lambda slot, end: not next(lost, False)
    assert made.answers(requests) == [made.naive(request) for request in requests]
    stats = made.engine.stats()
    assert (stats.steps_failed, stats.rows_wasted) == (0, 1)
    made.assert_nothing_is_held()


def test_whoever_finds_no_seat_stops_nobody_from_going_ahead():
    made = tower(0, max_batch_size=2)
    requests = [made.request(range(i, 70 + i), max_tokens=40, seed=i) for i in range(3)]
    assert made.answers(requests) == [made.naive(request) for request in requests]
    stats = made.engine.stats()
    assert stats.steps_ahead > stats.steps - 10


def test_a_seat_that_somebody_waits_for_is_free_one_step_after_it_was_left():
    made = tower(0, max_batch_size=2)
    probe = made.request(range(70), max_tokens=40, ignore_eos=True)
    stop = made.naive(probe)[0][0][6]
    made.engine.submit(made.request(range(70), max_tokens=40, stop_token_ids=(stop,)))
    made.engine.submit(made.request(range(1, 71), max_tokens=400, seed=5))
    made.engine.submit(made.request(range(2, 72), max_tokens=4))
    while not made.engine.stats().finished:
        made.step()
    [with_both] = in_flight(made)
    assert len(with_both.verify) == 2, "one of them for nothing"
    made.step()
    [alone] = in_flight(made)
    assert (len(alone.verify), alone.prefill) == (1, ()), "the seat is kept until then"
    made.step()
    [joined] = in_flight(made)
    assert joined.prefill, "the third is let in"


def test_a_higher_priority_that_finds_no_seat_pushes_out_a_lower_one():
    made = tower(0, max_batch_size=1)
    made.engine.submit(made.request(range(70), max_tokens=400))
    until_live(made)
    urgent = made.request(range(100, 150), max_tokens=3, priority=1)
    stream = made.engine.submit(urgent)
    for _ in range(8):
        made.step()
    assert collect(stream) == made.naive(urgent)
    assert made.engine.stats().preemptions == 1


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 0},
        {"min_tokens": 3},
        {"logit_bias": ((3, 1.0),)},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.5},
    ],
)
def test_rows_that_ask_more_of_the_sampler_go_ahead_like_any_other(params):
    """Counts, positions and biases are on the device; log probabilities are told later."""
    made = tower(0)
    requests = [
        made.request(range(70), max_tokens=20),
        made.request(range(1, 71), max_tokens=10, **params),
    ]
    assert made.answers(requests) == [made.naive(request) for request in requests]
    stats = made.engine.stats()
    assert stats.steps_ahead == stats.steps - 1


def test_nobody_is_pushed_out_for_a_row_ahead():
    made = tower(0, num_pages=4, num_slots=4)
    requests = [made.request(range(i, 60 + i), max_tokens=100, seed=i) for i in range(2)]
    assert made.answers(requests) == [made.naive(request) for request in requests]
    stats = made.engine.stats()
    assert stats.preemptions > 0
    for plan, flying in zip(made.executor.plans[1:], made.executor.plans, strict=False):
        if plan.seat_loads:
            assert plan.step == flying.step + 1
    assert stats.steps_ahead > 0


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
@pytest.mark.parametrize("length", range(57, 66))
def test_pages_are_there_for_the_most_that_a_row_ahead_may_come_to(num_drafts, length):
    made = tower(num_drafts, right=num_drafts)
    request = made.request(range(length), max_tokens=40, ignore_eos=True)
    assert made.answers([request]) == [made.naive(request)]
    limit = length + 40
    for plan in made.executor.plans:
        for row in plan.verify:
            assert row.end <= limit
            assert row.end + row.num_drafts <= -(-limit // PAGE_SIZE) * PAGE_SIZE


@pytest.mark.parametrize("late", [False, True])
def test_a_flush_with_two_steps_in_flight_lets_nothing_older_be_found(late):
    made = tower(0, late=late, decode_checkpoint_interval=64)
    request = made.request(range(60), max_tokens=150, ignore_eos=True)
    stream = made.engine.submit(request)
    until_live(made)
    for _ in range(20):
        made.step()
    made.executor.during = lambda plan: made.engine.flush_cache()
    made.step()
    made.executor.during = None
    made.run()
    assert collect(stream) == made.naive(request)
    assert made.engine.stats().slots_checkpoint == 0
    again = made.request(range(60), max_tokens=1)
    made.answers([again])
    assert made.outcomes[again.request_id].cached_tokens == 0


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("threaded", [False, True])
def test_closing_with_a_step_in_flight_waits_for_it(drain, threaded):
    made = tower(0)
    request = made.request(range(70), max_tokens=60)
    stream = made.engine.submit(request)
    if threaded:
        made.engine.start()
    else:
        until_live(made)
    made.engine.close(drain=drain)
    assert not made.executor.flights
    [(tokens, reason)] = collect(stream).values()
    [(text, _)] = made.naive(request).values()
    assert tokens == text[: len(tokens)]
    assert (tokens == text) == drain or reason == "length"
    stats = made.engine.stats()
    assert (stats.slots_free, stats.pages_free) == (stats.slots_total, stats.pages_total)


def test_an_executor_that_breaks_with_two_steps_in_flight_ends_every_stream():
    made = tower(0)
    stream = made.engine.submit(made.request(range(70), max_tokens=60))
    until_live(made)
    made.executor.fail = lambda plan: OSError("gone")
    made.step()
    assert not made.engine.healthy
    assert collect(stream)[0][1] == "error"
    made.engine.close()


def test_tokens_come_in_order_and_each_once():
    made = tower(3, right=2)
    request = made.request(range(60), max_tokens=40, n=3)
    stream = made.engine.submit(request)
    made.run()
    deltas: list[Delta] = list(stream)
    for index, (tokens, _) in made.naive(request).items():
        mine = [delta for delta in deltas if delta.sample_index == index]
        assert [out.token for delta in mine for out in delta.tokens] == tokens
        assert [delta.finish_reason for delta in mine[:-1]] == [None] * (len(mine) - 1)


def test_a_step_ahead_is_timed_from_the_end_of_the_one_before():
    made = tower(0)
    now = 0.0

    def clock() -> float:
        return now

    def run(plan: StepPlan) -> None:
        nonlocal now
        now += 1.0

    made.engine._flights._clock = clock
    made.executor.during = run
    seconds: list[float] = []
    made.engine._ledger.measured = lambda plan, took: seconds.append(took)
    made.answers([made.request(range(70), max_tokens=10)])
    assert seconds == [1.0] * 10


@pytest.mark.parametrize("num_drafts", KS)
@pytest.mark.parametrize("right", [0, 1, 3])
@pytest.mark.parametrize("length", [60, 100, 127, 128])
def test_anchors_along_an_answer_are_those_of_one_step_at_a_time(num_drafts, right, length):
    found = []
    for runs_ahead in (False, True):
        made = Tower(
            num_draft_tokens=num_drafts, runs_ahead=runs_ahead, decode_checkpoint_interval=64
        )
        made.executor.right = lambda: right
        made.executor.is_late = lambda plan: True
        requests = [made.request(range(length), max_tokens=m) for m in (200, 190, 3)]
        assert made.answers(requests) == [made.naive(request) for request in requests]
        assert (made.engine.stats().steps_ahead > 0) == runs_ahead
        index = made.engine._ledger.index
        found.append({(checkpoint.end, checkpoint.kind) for checkpoint in index.checkpoints()})
        assert made.engine.stats().checkpoints_skipped == {}
    assert found[0] == found[1]


@pytest.mark.parametrize("num_drafts", KS)
def test_whoever_finds_no_room_stops_nobody_though_anchors_are_kept(num_drafts):
    """What is kept along an answer gives nothing back that somebody could wait for."""
    made = tower(num_drafts, num_pages=14, num_slots=12, decode_checkpoint_interval=64)
    requests = [
        made.request(range(i, 70 + i), max_tokens=180, seed=i, ignore_eos=True) for i in range(3)
    ]
    requests.append(made.request(range(9, 699), max_tokens=3))
    assert made.answers(requests) == [made.naive(request) for request in requests]
    stats = made.engine.stats()
    assert stats.preemptions == 0
    assert stats.checkpoints_published["decode"] > 0
    # The first prompt, and the fourth once it has all the room.
    assert stats.steps - stats.steps_ahead == 2


def test_a_step_in_flight_that_breaks_the_engine_while_it_is_closed_leaves_nobody_waiting():
    made = tower(0, late=False)
    stream = made.engine.submit(made.request(range(70), max_tokens=500))
    until_live(made)
    flight = made.executor.flights[0]
    flight.outcome = Ended(StepResult(step=10**6))
    made.engine.close(drain=False)
    assert collect(stream)[0][1] == "error"
    assert made.executor.closed
    assert made.engine.failure is not None


def test_a_sequence_overtaken_often_enough_with_a_row_in_flight_goes_first_when_it_comes_back():
    made = tower(0, max_batch_size=2, max_overtakes=0)
    low = made.request(range(200), max_tokens=30)
    stream = made.engine.submit(low)
    made.step()
    scheduler = made.engine._scheduler
    [sequence] = scheduler.running
    scheduler.preempt(sequence)
    assert scheduler.leaving == [sequence]
    sequence.due = 0
    scheduler.turns._due.append((0, 0, sequence))
    other = made.request(range(7, 300), max_tokens=30, priority=5)
    answer = made.engine.submit(other)
    made.run()
    assert sequence.is_first
    assert [collect(stream), collect(answer)] == [made.naive(low), made.naive(other)]
    made.assert_nothing_is_held()
