"""Checkpoints along an answer: where they are made, what they cost (nothing), who finds them."""

from __future__ import annotations

import pytest

from tests.support.symbolic import as_state
from tests.support.towers import Tower

KS = (0, 1, 3, 5, 7)


def tower(num_drafts: int, right: int = 7, **numbers: object) -> Tower:
    given = {"decode_checkpoint_interval": 64, "checkpoint_interval": 0, **numbers}
    made = Tower(num_draft_tokens=num_drafts, **given)
    made.executor.right = lambda: right
    return made


def found(made: Tower) -> dict[int, str]:
    """The kinds of all checkpoints, by their end."""
    checkpoints = made.engine._ledger.index.checkpoints()
    return {checkpoint.end: checkpoint.kind.value for checkpoint in checkpoints}


def next_turn(made: Tower, request, answer) -> int:
    """The cached tokens of a prompt that goes on from an answer."""
    turn = made.request([*request.tokens, *answer[0][0], 1, 2, 3], max_tokens=4)
    assert made.answers([turn]) == [made.naive(turn)]
    return made.outcomes[turn.request_id].cached_tokens


@pytest.mark.parametrize("num_drafts", KS)
@pytest.mark.parametrize("right", [0, 1, 3, 7])
@pytest.mark.parametrize("length", [60, 100, 127, 128])
def test_the_next_turn_starts_from_the_newest_anchor_of_the_answer(num_drafts, right, length):
    made = tower(num_drafts, right)
    request = made.request(range(length), max_tokens=200, ignore_eos=True)
    [answer] = made.answers([request])
    assert answer == made.naive(request)
    last = made.executor.plans[-1]
    newest = (last.decode + last.verify)[0].end // 64 * 64
    assert newest >= length + 120
    kinds = found(made)
    assert kinds.pop(newest) == "decode"
    assert set(kinds.values()) <= {"prompt_end"}, "only the newest is kept"
    state = made.executor.slots[
        next(c.lease.slot for c in made.engine._ledger.index.checkpoints() if c.end == newest)
    ]
    assert state == as_state([*request.tokens, *answer[0][0]][:newest], length)
    assert next_turn(made, request, answer) == newest
    made.assert_nothing_is_held()


@pytest.mark.parametrize("num_drafts", KS)
def test_an_anchor_costs_no_step_and_one_slot(num_drafts):
    steps, slots = [], []
    for interval in (0, 64):
        made = tower(num_drafts, decode_checkpoint_interval=interval)
        made.engine.submit(made.request(range(60), max_tokens=300, ignore_eos=True))
        most = 0
        while made.step():
            stats = made.engine.stats()
            most = max(most, stats.slots_running)
        steps.append(len(made.executor.plans))
        slots.append(most)
    assert steps[0] == steps[1]
    assert slots == [1, 2]


@pytest.mark.parametrize("num_drafts", KS)
def test_without_a_slot_to_spare_the_anchor_is_skipped_and_nobody_is_pushed_out(num_drafts):
    made = tower(num_drafts, num_slots=2, num_pages=40)
    requests = [made.request(range(i, i + 50), max_tokens=100, seed=i) for i in range(2)]
    assert made.answers(requests) == [made.naive(request) for request in requests]
    stats = made.engine.stats()
    assert stats.preemptions == 0
    assert stats.checkpoints_skipped["no_slot"] > 0


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_anchors_take_the_place_of_at_most_half_of_what_can_be_found(num_drafts):
    made = tower(num_drafts, right=0, num_slots=8, checkpoint_budget=4, num_seats=4)
    old = [made.request(range(7 * i, 7 * i + 70), max_tokens=1) for i in range(4)]
    made.answers(old)
    assert len(found_all(made)) == 4
    requests = [made.request(range(i, i + 50), max_tokens=100, seed=i) for i in range(4)]
    streams = [made.engine.submit(request) for request in requests]
    kept = 0
    while made.step():
        running = made.engine._scheduler.running
        kept = max(kept, sum(one.state.anchor is not None for one in running))
    assert kept == 2
    assert made.engine.stats().preemptions == 0
    assert made.engine.stats().checkpoints_skipped["no_slot"] >= 2
    assert [len([t for d in stream for t in d.tokens]) for stream in streams] == [100] * 4


def found_all(made: Tower) -> list[int]:
    return [checkpoint.end for checkpoint in made.engine._ledger.index.checkpoints()]


def test_an_older_anchor_leaves_its_slot_to_the_newer_one():
    made = tower(0, num_slots=2)
    request = made.request(range(50), max_tokens=300, ignore_eos=True)
    [answer] = made.answers([request])
    assert answer == made.naive(request)
    assert made.engine.stats().checkpoints_skipped == {}
    assert next_turn(made, request, answer) == 320


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_kept_anchor_gives_way_to_a_request_that_needs_its_slot(num_drafts):
    made = tower(num_drafts, right=0, num_slots=2)
    old = made.engine.submit(made.request(range(60), max_tokens=200, ignore_eos=True))
    for _ in range(30):
        made.step()
    assert made.engine.stats().slots_free == 0, "a state and an anchor"
    young = made.request(range(5, 25), max_tokens=9)
    stream = made.engine.submit(young)
    made.step()
    made.step()
    assert made.engine.stats().requests_running == 2
    made.run()
    stats = made.engine.stats()
    assert stats.preemptions == 0
    assert stats.checkpoints_skipped["given_up"] == 1
    assert [delta.finish_reason for delta in (*old, *stream)].count("length") == 2


@pytest.mark.parametrize("num_drafts", [0, 5])
@pytest.mark.parametrize(
    "off", [{"prefix_caching": False}, {"checkpoint_mode": "off"}, {"checkpoint_budget": 0}]
)
def test_where_nothing_is_saved_nothing_is_kept(num_drafts, off):
    made = tower(num_drafts, **off)
    made.answers([made.request(range(60), max_tokens=200, ignore_eos=True)])
    assert found(made) == {}
    assert all(row.state_in == row.state_out for p in made.executor.plans for row in p.decode)
    assert all(row.export is None for p in made.executor.plans for row in p.verify)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_an_aborted_answer_leaves_its_anchor_to_the_next_turn(num_drafts):
    made = tower(num_drafts)
    request = made.request(range(60), max_tokens=200, ignore_eos=True)
    stream = made.engine.submit(request)
    said: list[int] = []
    while len(said) < 80:
        made.step()
        said += [out.token for out in stream.get(timeout=0).tokens]
    stream.abort()
    made.run()
    assert found(made) == {128: "decode"}
    assert next_turn(made, request, {0: (said, "abort")}) == 128


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_flush_forgets_anchors_of_answers_that_go_on(num_drafts):
    made = tower(num_drafts)
    request = made.request(range(60), max_tokens=100, ignore_eos=True)
    stream = made.engine.submit(request)
    while not made.engine._scheduler.running or (
        made.engine._scheduler.running[0].state.anchor is None
    ):
        made.step()
    before = made.engine.stats().slots_free
    made.engine.flush_cache()
    assert made.engine.stats().slots_free == before + 1
    made.run()
    assert found(made) == {}
    assert sum(len(delta.tokens) for delta in stream) == 100


def test_an_export_that_was_not_written_gives_its_slot_back():
    made = tower(5)
    exports: list[int] = []

    def writes(slot: int, end: int) -> bool:
        verify = made.executor.plans[-1].verify
        mine = [row.export for row in verify if row.export is not None]
        exports.extend(e.end for e in mine if (e.slot, e.end) == (slot, end))
        return (slot, end) not in [(e.slot, e.end) for e in mine]

    made.executor.writes = writes
    request = made.request(range(61), max_tokens=100, ignore_eos=True)
    assert made.answers([request]) == [made.naive(request)]
    assert exports, "an anchor among accepted drafts"
    assert made.engine.stats().checkpoints_skipped == {"unwritten": len(exports)}
    made.assert_nothing_is_held()


def test_samples_keep_an_anchor_each():
    made = tower(3, right=1)
    request = made.request(range(60), max_tokens=100, n=3, ignore_eos=True)
    [answers] = made.answers([request])
    assert answers == made.naive(request)
    for index in range(3):
        turn = made.request([*request.tokens, *answers[index][0], 1], max_tokens=1)
        made.answers([turn])
        assert made.outcomes[turn.request_id].cached_tokens == 128
