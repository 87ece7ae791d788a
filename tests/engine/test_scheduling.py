"""Order, room and preemption, on pools with too little of everything."""

from __future__ import annotations

import pytest

from tests.support.symbolic import step_failure
from tests.support.towers import Tower


def order_of_first_rows(tower: Tower) -> list[str]:
    """Requests in the order of their first row."""
    return list(dict.fromkeys(row.request for plan in tower.executor.plans for row in plan.prefill))


def test_higher_priority_goes_first_and_older_among_equals():
    tower = Tower(max_batch_size=1)
    requests = [tower.request(range(9), priority=priority) for priority in (0, 1, 0, 2)]
    tower.answers(requests)
    assert order_of_first_rows(tower) == ["r3", "r1", "r0", "r2"]


def test_nobody_overtakes_the_head_of_the_queue():
    tower = Tower(num_pages=10)
    big = 64 * 8
    requests = [tower.request(range(length), max_tokens=2) for length in (big, big, 10, 10)]
    assert tower.answers(requests) == [tower.naive(request) for request in requests]
    assert order_of_first_rows(tower) == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize("num_slots", [1, 2, 3, 4])
@pytest.mark.parametrize("num_pages", [5, 6, 9])
def test_too_few_slots_and_pages_slow_everything_and_stop_nothing(num_slots, num_pages):
    tower = Tower(num_slots=num_slots, num_pages=num_pages)
    requests = [
        tower.request(range(seed, seed + 200), seed=seed, max_tokens=100, n=1 + seed % 2)
        for seed in range(6)
    ]
    assert tower.answers(requests) == [tower.naive(request) for request in requests]
    tower.assert_nothing_is_held()


def test_the_oldest_pushes_out_the_youngest_and_both_texts_stay_the_same():
    tower = Tower(num_pages=5)
    old, young = tower.request(range(60), max_tokens=130), tower.request(range(61), max_tokens=130)
    assert tower.answers([old, young]) == [tower.naive(old), tower.naive(young)]
    stats = tower.engine.stats()
    assert stats.preemptions > 0
    recomputed = [row for p in tower.executor.plans for row in p.decode if len(row.tokens) > 1]
    assert {row.request for row in recomputed} == {"r1"}
    assert all(row.start >= 61 for row in recomputed)


def test_a_recomputed_answer_is_cut_under_the_budget():
    tower = Tower(num_pages=7, max_prefill_tokens=64)
    requests = [tower.request(range(60), max_tokens=200) for _ in range(2)]
    assert tower.answers(requests) == [tower.naive(request) for request in requests]
    lengths = [len(row.tokens) for plan in tower.executor.plans for row in plan.decode]
    assert max(lengths) == 64


def test_a_checkpoint_without_a_slot_is_skipped_and_counted():
    tower = Tower(num_slots=1, checkpoint_interval=64)
    request = tower.request(range(250))
    assert tower.answers([request]) == [tower.naive(request)]
    assert tower.engine.stats().checkpoints_skipped == {"no_slot": 3}


def test_a_resume_without_a_spare_slot_takes_its_checkpoint_over():
    tower = Tower(num_slots=1)
    first, second = tower.request(range(128)), tower.request(range(200))
    assert tower.answers([first, second]) == [tower.naive(first), tower.naive(second)]
    third, fourth = tower.request(range(128), max_tokens=1), tower.request(range(200))
    tower.answers([third])
    assert tower.engine.stats().slots_free == 0, "the checkpoint holds the only slot"
    assert tower.answers([fourth]) == [tower.naive(fourth)]
    assert tower.outcomes[fourth.request_id].cached_tokens == 128
    rows = [row for plan in tower.executor.plans for row in plan.prefill]
    assert rows[-1].state_in == rows[-1].state_out


def test_samples_without_slots_of_their_own_take_turns():
    tower = Tower(num_slots=3)
    request = tower.request(range(70), n=3, max_tokens=8)
    assert tower.answers([request]) == [tower.naive(request)]
    assert tower.engine.stats().preemptions == 0


def test_a_prompt_that_fails_every_step_takes_nobody_with_it():
    tower = Tower()
    good = [tower.request(range(seed, seed + 80), seed=seed) for seed in range(3)]
    bad = tower.request(range(99))
    tower.executor.fail = lambda plan: (
        step_failure(plan) if any(row.request == "r3" for row in plan.prefill) else None
    )
    answers = tower.answers([*good, bad])
    assert answers[:3] == [tower.naive(request) for request in good]
    assert answers[3] == {0: ([], "error")}
    tower.assert_nothing_is_held()


def test_a_prompt_that_fails_in_a_later_chunk_is_not_tried_for_ever():
    tower = Tower()
    request = tower.request(range(600))
    tower.executor.fail = lambda plan: (
        step_failure(plan) if any(row.start == 256 for row in plan.prefill) else None
    )
    assert tower.answers([request]) == [{0: ([], "error")}]
    assert tower.engine.stats().steps_failed == 2
