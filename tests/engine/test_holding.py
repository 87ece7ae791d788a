"""Who waits for whom, and what ends it."""

from __future__ import annotations

import random

import pytest

from millpond.state.checkpoint import AnchorKind
from tests.support.symbolic import step_failure
from tests.support.towers import Tower, collect

SHARED = list(range(500))  # 448 tokens of whole pages


def tail(number: int, length: int = 100) -> list[int]:
    return random.Random(number).choices(range(50), k=length)


def cached(tower: Tower, *requests) -> list[int]:
    return [tower.outcomes[request.request_id].cached_tokens for request in requests]


def slow_tower(budget: int) -> Tower:
    """Cut at every anchor, a prompt is folded a page a step, though the budget offers more."""
    return Tower(
        max_prefill_tokens=budget,
        checkpoint_mode="split",
        checkpoint_interval=64,
        checkpoint_budget=30,
        num_slots=40,
        num_pages=200,
    )


def computed(tower: Tower) -> int:
    return sum(len(row.tokens) for plan in tower.executor.plans for row in plan.prefill)


def test_the_second_of_two_prompts_in_the_queue_hits_what_the_first_one_computes():
    tower = Tower(max_prefill_tokens=5000)
    first, second = (tower.request(SHARED + tail(n)) for n in (1, 2))
    assert tower.answers([first, second]) == [tower.naive(first), tower.naive(second)]
    assert cached(tower, first, second) == [0, 448]
    outcome = tower.outcomes[second.request_id]
    assert outcome.kind == "branch_coming"
    assert outcome.queued_seconds >= outcome.held_seconds > 0
    assert tower.outcomes[first.request_id].queued_seconds < outcome.queued_seconds
    stats = tower.engine.stats()
    assert stats.holds == {"published": 1}
    assert stats.prefix_hits == {"branch_coming": 1}
    assert stats.prefix_hit_tokens == {"branch_coming": 448}


def test_switched_off_both_compute_and_one_of_them_keeps_what_they_share():
    tower = Tower(max_prefill_tokens=5000, hold_and_join=False)
    requests = [tower.request(SHARED + tail(n)) for n in (1, 2)]
    tower.answers(requests)
    assert cached(tower, *requests) == [0, 0]
    exports = [e.end for p in tower.executor.plans for row in p.prefill for e in row.exports]
    assert exports.count(448) == 1
    assert tower.engine.stats().checkpoints_skipped == {"duplicate": 1}
    third = tower.request(SHARED + tail(3))
    tower.answers([third])
    assert cached(tower, third) == [448]


@pytest.mark.parametrize("mode", ["interior", "split"])
def test_the_third_hits_where_the_second_came_too_late_to_be_waited_for(mode):
    """The first is past the place where they part when the second arrives."""
    tower = Tower(
        max_prefill_tokens=512, checkpoint_interval=0, checkpoint_mode=mode, num_pages=200
    )
    requests = [tower.request(SHARED + tail(n, 900)) for n in (1, 2, 3)]
    streams = [tower.engine.submit(requests[0])]
    tower.step()
    for request in requests[1:]:
        streams.append(tower.engine.submit(request))
        tower.run()
    for stream in streams:
        collect(stream, tower.outcomes)
    assert cached(tower, *requests) == [0, 0, 448]


def test_a_branch_that_the_index_shows_is_kept_by_the_second_for_the_third():
    tower = Tower(checkpoint_interval=0)
    for n, hit in ((1, 0), (2, 0), (3, 448), (4, 448)):
        request = tower.request(SHARED + tail(n))
        tower.answers([request])
        assert cached(tower, request) == [hit]
    kinds = {c.end: c.kind for c in tower.engine._ledger.index.checkpoints()}
    assert kinds[448] is AnchorKind.BRANCH_SEEN
    assert tower.engine.stats().prefix_hits == {"branch_seen": 2}


def test_one_that_arrives_while_its_prefix_is_being_computed_waits_for_it():
    tower = slow_tower(budget=128)
    first, second = (tower.request(SHARED + tail(n)) for n in (1, 2))
    streams = [tower.engine.submit(first)]
    tower.step()
    streams.append(tower.engine.submit(second))
    tower.step()
    assert tower.engine.stats().requests_held == 1
    tower.run()
    for stream in streams:
        collect(stream, tower.outcomes)
    assert cached(tower, first, second) == [0, 448]


def test_a_held_request_has_nothing_and_those_behind_it_go_on():
    tower = slow_tower(budget=128)
    streams = [
        tower.engine.submit(tower.request(tokens))
        for tokens in (SHARED + tail(1), SHARED + tail(2), range(3, 40))
    ]
    tower.step()
    [(held, hold)] = tower.engine._scheduler.holds.items()
    assert held.request.spec.request_id == "r1"
    assert (held.state.leases, held.pages, held.seat) == ((), [], -1)
    assert hold.leader in tower.engine._scheduler.running
    assert {row.request for row in tower.executor.plans[0].prefill} == {"r0", "r2"}
    stats = tower.engine.stats()
    assert (stats.requests_running, stats.requests_waiting, stats.requests_held) == (2, 1, 1)
    tower.run()
    assert all(list(stream)[-1].finish_reason == "length" for stream in streams)


def test_higher_priority_never_waits_on_lower():
    tower = slow_tower(budget=128)
    low, high = tower.request(SHARED + tail(1)), tower.request(SHARED + tail(2), priority=1)
    streams = [tower.engine.submit(low)]
    tower.step()
    streams.append(tower.engine.submit(high))
    tower.run()
    for stream in streams:
        collect(stream, tower.outcomes)
    assert cached(tower, high) == [64], "what was there when it came, and no more"
    assert tower.outcomes[high.request_id].held_seconds == 0


def test_lower_priority_waits_on_higher():
    tower = Tower(max_prefill_tokens=5000)
    requests = [tower.request(SHARED + tail(n), priority=n) for n in (1, 2)]
    tower.answers(requests)
    assert cached(tower, *requests) == [448, 0]


@pytest.mark.parametrize("how", ["abort", "fail", "preempt", "flush"])
def test_a_hold_ends_when_its_leader_stops(how):
    tower = slow_tower(budget=128)
    first, second = (tower.request(SHARED + tail(n)) for n in (1, 2))
    streams = [tower.engine.submit(request) for request in (first, second)]
    tower.step()
    scheduler = tower.engine._scheduler
    assert len(scheduler.holds) == 1
    if how == "abort":
        streams[0].abort()
        tower.engine._read_inbox()
        tower.engine._end_aborted()
    elif how == "fail":
        tower.executor.fail = lambda plan: step_failure(plan) if plan.step == 1 else None
        tower.step()
    elif how == "preempt":
        scheduler.preempt(scheduler.running[0])
    else:
        tower.engine.flush_cache()
    assert len(scheduler.holds) == 0
    tower.run()
    assert collect(streams[1]) == tower.naive(second)
    ended = tower.engine.stats().holds
    assert ended[{"flush": "epoch"}.get(how, "leader_stopped")] == 1
    tower.assert_nothing_is_held()


def test_a_hold_ends_when_its_anchor_is_reported_unwritten():
    tower = Tower(max_prefill_tokens=5000)
    tower.executor.writes = lambda slot, end: end != 448
    requests = [tower.request(SHARED + tail(n)) for n in (1, 2)]
    assert tower.answers(requests) == [tower.naive(request) for request in requests]
    assert tower.engine.stats().holds == {"unwritten": 1}
    assert cached(tower, *requests) == [0, 0]


def test_a_hold_ends_when_its_anchor_is_left_out():
    tower = Tower(max_prefill_tokens=5000, num_slots=1)
    requests = [tower.request(SHARED + tail(n)) for n in (1, 2)]
    assert tower.answers(requests) == [tower.naive(request) for request in requests]
    assert tower.engine.stats().holds == {"skipped": 1}


def test_a_hold_ends_when_waiting_has_cost_as_much_as_computing():
    tower = slow_tower(budget=256)
    requests = [tower.request(SHARED + tail(n)) for n in (1, 2)]
    assert tower.answers(requests) == [tower.naive(request) for request in requests]
    assert tower.engine.stats().holds == {"cost": 1}
    # In two steps the second could have folded 384 of 448 tokens, in the third all of them.
    starts = {
        row.request: plan.step for plan in reversed(tower.executor.plans) for row in plan.prefill
    }
    assert starts == {"r0": 0, "r1": 3}


def test_waiting_in_vain_again_and_again_costs_no_more_than_once():
    """Nothing can be kept, so whoever waits is disappointed; all together finish soon anyway."""
    tower = Tower(
        max_prefill_tokens=50_000, num_slots=20, max_batch_size=8, num_seats=8, num_pages=200
    )
    tower.executor.writes = lambda slot, end: end != 448
    requests = [tower.request(SHARED + tail(n), max_tokens=1) for n in range(8)]
    tower.answers(requests)
    assert sum(1 for plan in tower.executor.plans if plan.prefill) == 2


def test_a_prompt_that_must_be_computed_waits_for_nobody():
    tower = Tower(max_prefill_tokens=5000)
    requests = [tower.request(SHARED, prompt_logprobs=logprobs) for logprobs in (None, 0)]
    tower.answers(requests)
    assert tower.engine.stats().holds == {}
    assert tower.outcomes[requests[1].request_id].reason == "needs_prompt_logits"


def test_samples_of_one_prompt_fold_it_once():
    tower = Tower(max_batch_size=16, num_seats=16, num_slots=40, max_prefill_tokens=5000)
    request = tower.request(SHARED, n=16)
    assert tower.answers([request]) == [tower.naive(request)]
    assert computed(tower) == len(SHARED)


@pytest.mark.parametrize("hold", [True, False])
def test_a_burst_that_shares_half_computes_little_more_than_the_unique_tokens(hold, capsys):
    """256 prompts at once, half of each the same."""
    count, half = 256, 500
    tower = Tower(
        max_batch_size=count,
        num_seats=count,
        num_slots=count + 40,
        num_pages=6000,
        max_prefill_tokens=65_536,
        checkpoint_budget=32,
        hold_and_join=hold,
        debug_audit=False,
    )
    requests = [tower.request(SHARED[:half] + tail(n, half), max_tokens=1) for n in range(count)]
    unique = half + count * half
    tower.answers(requests)
    bound = unique + 64 * count
    with capsys.disabled():
        print(f"\nhold_and_join={hold}: {computed(tower)} tokens computed, bound {bound}")
    assert (computed(tower) <= bound) is hold
