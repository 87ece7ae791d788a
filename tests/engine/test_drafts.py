"""Live sequences verify drafts: how many, in how many steps, and what their requests are told."""

from __future__ import annotations

import pytest

from millpond.plan.step import PAGE_SIZE, VerifyRow
from tests.support.symbolic import step_failure
from tests.support.towers import Tower, collect

KS = (0, 1, 3, 5)


def tower(num_drafts: int, right: int | None = None, **numbers: object) -> Tower:
    """A tower whose drafts are `right` as often as said, by default all of them."""
    made = Tower(num_draft_tokens=num_drafts, **numbers)
    made.executor.right = lambda: num_drafts if right is None else right
    return made


def verify_rows(made: Tower) -> list[VerifyRow]:
    return [row for plan in made.executor.plans for row in plan.verify]


def long_tower(num_drafts: int, mode: str) -> Tower:
    return tower(
        num_drafts,
        num_slots=20,
        num_pages=1100,
        max_prefill_tokens=4096,
        prefill_save_alignment=512,
        decode_checkpoint_interval=512,
        checkpoint_mode=mode,
        checkpoint_budget=16,
        debug_audit=False,
    )


@pytest.mark.parametrize("num_drafts", [0, 3, 5])
@pytest.mark.parametrize(
    "prompt, mode, forwards",
    [(32_320, "interior", 8), (32_320, "split", 9), (32_770, "interior", 9), (32_770, "split", 9)],
)
def test_a_prompt_takes_no_forward_for_its_checkpoints_nor_for_drafts(
    prompt, mode, forwards, num_drafts
):
    made = long_tower(num_drafts, mode)
    request = made.request(range(prompt), max_tokens=1 + 2 * (num_drafts + 1))
    assert made.answers([request]) == [made.naive(request)]
    plans = list(made.executor.plans)
    prefills = [plan for plan in plans if plan.prefill]
    assert len(prefills) == forwards
    assert plans[: len(prefills)] == prefills
    exports = [e.end for row in prefills[-1].prefill for e in row.exports]
    if (prompt, mode) == (32_320, "interior"):
        assert exports == [32_256]
    # A first token comes with the prompt; then every step folds what is known and drafts anew.
    assert len(plans) == forwards + 2
    after = made.request(range(prompt), max_tokens=1)
    made.answers([after])
    anchor = 32_256 if prompt == 32_320 else 32_768
    assert made.outcomes[after.request_id].cached_tokens == anchor
    assert len(made.executor.plans) == len(plans) + 1, "a hit repeats no forward"


@pytest.mark.parametrize("num_drafts", KS)
def test_without_drafts_there_is_no_verify_row_and_with_them_no_decode_row(num_drafts):
    made = tower(num_drafts)
    requests = [made.request(range(seed, 70 + seed), max_tokens=30, n=2) for seed in range(2)]
    assert made.answers(requests) == [made.naive(request) for request in requests]
    rows = [row for plan in made.executor.plans for row in plan.decode]
    assert bool(rows) == (num_drafts == 0)
    assert bool(verify_rows(made)) == (num_drafts > 0)


@pytest.mark.parametrize("num_drafts", [1, 3, 5, 7])
@pytest.mark.parametrize("right", [0, 1, 7])
def test_a_step_folds_what_was_accepted_and_one_token_more(num_drafts, right):
    made = tower(num_drafts, right)
    request = made.request(range(40), max_tokens=1 + 3 * (min(right, num_drafts) + 1))
    assert made.answers([request]) == [made.naive(request)]
    accepted = min(right, num_drafts)
    rows = verify_rows(made)
    assert [row.pending for row in rows] == [0, accepted, accepted][: len(rows)]
    assert [row.start for row in rows] == [40, 41, 42 + accepted][: len(rows)]
    assert len(rows) == 3


@pytest.mark.parametrize("num_drafts", [1, 3, 5, 7])
@pytest.mark.parametrize("max_tokens", range(1, 18))
def test_no_draft_is_made_for_a_token_beyond_the_last(num_drafts, max_tokens):
    for limits in ({}, {"session_len": 60 + max_tokens}):
        made = tower(num_drafts, **limits)
        asked = 99 if limits else max_tokens
        request = made.request(range(60), max_tokens=asked, ignore_eos=True)
        assert made.answers([request]) == [made.naive(request)]
        for row in verify_rows(made):
            assert row.end + row.num_drafts <= 59 + max_tokens
        stats = made.engine.stats()
        assert stats.generated_tokens == max_tokens
        # Of drafts that are all right none is accepted in vain.
        assert stats.accepted_tokens == stats.draft_tokens
        assert len(made.executor.plans) == 1 + -(-(max_tokens - 1) // (num_drafts + 1))


@pytest.mark.parametrize("at", range(1, 14))
def test_what_follows_a_stop_token_is_dropped(at):
    made = tower(5)
    request = made.request(range(60), max_tokens=40, ignore_eos=True)
    [(text, _)] = made.naive(request).values()
    stop = text[at]
    first = text.index(stop)
    stopping = made.request(range(60), max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))
    late = made.request(
        range(60), max_tokens=40, ignore_eos=True, stop_token_ids=(stop,), min_tokens=first + 2
    )
    answers = made.answers([stopping, late])
    assert answers[0] == {0: (text[: first + 1], "stop")}
    assert answers[1] == made.naive(late)
    assert len(answers[1][0][0]) > first + 1
    made.assert_nothing_is_held()


def test_the_tokens_of_a_step_come_in_one_delta_that_counts_its_drafts():
    made = tower(3, right=2)
    stream = made.engine.submit(made.request(range(60), max_tokens=9, logprobs=0))
    made.run()
    deltas = list(stream)
    assert [len(delta.tokens) for delta in deltas] == [1, 3, 3, 2]
    assert [(delta.drafted, delta.accepted) for delta in deltas] == [(0, 0), (3, 2), (3, 2), (1, 1)]
    stats = made.engine.stats()
    assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (3, 7, 5)
    assert stats.accepted_per_position == (3, 2, 0)


def test_accepted_drafts_that_an_ended_sample_does_not_show_are_not_told_to_its_client():
    made = tower(5)
    probe = made.request(range(60), max_tokens=40, ignore_eos=True)
    text = made.naive(probe)[0][0]
    stream = made.engine.submit(
        made.request(range(60), max_tokens=40, ignore_eos=True, stop_token_ids=(text[2],))
    )
    made.run()
    shown = text.index(text[2]) + 1
    deltas = list(stream)
    assert sum(delta.accepted for delta in deltas) == shown - 1
    assert sum(delta.drafted for delta in deltas) == 5
    assert made.engine.stats().accepted_tokens == 5


@pytest.mark.parametrize("length", [57, 60, 62, 63, 64, 65])
@pytest.mark.parametrize("num_drafts", [1, 5, 7])
def test_pages_of_the_next_step_are_there_before_its_drafts_are_made(length, num_drafts):
    made = tower(num_drafts)
    stream = made.engine.submit(made.request(range(length), max_tokens=60, ignore_eos=True))
    known = length
    while made.step():
        plan = made.executor.plans[-1]
        for row in plan.verify:
            assert row.num_drafts == min(num_drafts, length + 59 - row.end)
            known = row.end
        pages = len(made.executor.seats[made.executor.plans[0].seat_loads[0].seat].table)
        assert pages * PAGE_SIZE >= min(known + 2 * num_drafts + 1, length + 60)
    assert collect(stream)[0][1] == "length"


def test_drafts_push_nobody_out_and_go_without_where_there_is_no_room():
    made = tower(7, num_pages=3, num_slots=4)
    requests = [made.request(range(i, 60 + i), max_tokens=4, seed=i) for i in range(3)]
    assert made.answers(requests) == [made.naive(request) for request in requests]
    assert made.engine.stats().preemptions == 0
    assert max(row.end + row.num_drafts for row in verify_rows(made)) <= PAGE_SIZE


def test_a_preempted_answer_is_recomputed_in_decode_rows_whose_last_one_drafts_again():
    made = tower(3, right=1, num_pages=5)
    requests = [made.request(range(60 + i), max_tokens=130) for i in range(2)]
    assert made.answers(requests) == [made.naive(request) for request in requests]
    assert made.engine.stats().preemptions > 0
    recomputed = [row for plan in made.executor.plans for row in plan.decode]
    assert recomputed
    assert all(row.start >= 60 for row in recomputed)
    assert all(row.emit_seats for row in recomputed)


def test_a_failed_step_with_drafts_is_recomputed():
    made = tower(3, right=2)
    request = made.request(range(100), max_tokens=30)
    failing = iter([False, False, True, False, False, True])
    made.executor.fail = lambda plan: step_failure(plan) if next(failing, False) else None
    assert made.answers([request]) == [made.naive(request)]
    assert made.engine.stats().steps_failed == 2


def test_tokens_before_damaged_logits_are_told_and_what_they_came_from_is_not_found_again():
    made = tower(3, decode_checkpoint_interval=64)
    made.executor.finite = lambda row: not isinstance(row, VerifyRow) or row.start < 150
    request = made.request(range(120), max_tokens=90, ignore_eos=True)
    (tokens, reason) = made.answers([request])[0][0]
    assert reason == "error"
    text = made.naive(request)[0][0]
    assert tokens == text[: len(tokens)]
    assert len(tokens) > 30
    assert made.engine.stats().nonfinite == 1
    assert made.engine.stats().slots_checkpoint == 0
    made.assert_nothing_is_held()
