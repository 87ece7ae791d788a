"""From submission to the last token, on the symbolic executor."""

from __future__ import annotations

from tests.support.towers import Tower, collect


def test_a_prompt_is_answered_as_a_plain_loop_would():
    tower = Tower()
    requests = [tower.request(range(length), max_tokens=20) for length in (1, 63, 64, 65, 300)]
    answers = tower.answers(requests)
    assert answers == [tower.naive(request) for request in requests]
    tower.assert_nothing_is_held()


def test_a_repeated_prompt_starts_from_its_checkpoint_and_reads_the_same():
    tower = Tower()
    first, second = tower.request(range(200)), tower.request(range(200))
    assert tower.answers([first]) == tower.answers([second]) == [tower.naive(first)]
    assert tower.outcomes[second.request_id].reason == "hit"
    assert tower.outcomes[second.request_id].cached_tokens == 192
    assert [row.start for plan in tower.executor.plans for row in plan.prefill] == [0, 192]


def test_samples_of_one_prompt_share_its_forward():
    tower = Tower()
    request = tower.request(range(100), n=3, max_tokens=9)
    assert tower.answers([request]) == [tower.naive(request)]
    prefill = [row for plan in tower.executor.plans for row in plan.prefill]
    assert len(prefill) == 1
    assert len(prefill[0].emit_seats) == 3
    tower.assert_nothing_is_held()


def test_an_engine_in_its_own_thread_answers():
    tower = Tower()
    request = tower.request(range(130), max_tokens=12)
    tower.engine.start()
    try:
        assert collect(tower.engine.submit(request)) == tower.naive(request)
    finally:
        tower.engine.close()
    assert tower.executor.closed
