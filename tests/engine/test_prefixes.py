"""What is found again, what is not, and why; counted in tokens."""

from __future__ import annotations

import pytest

from tests.support.towers import Tower


def outcome(tower: Tower, tokens, **how) -> tuple[str, int]:
    request = tower.request(tokens, **how)
    assert tower.answers([request]) == [tower.naive(request)]
    found = tower.outcomes[request.request_id]
    assert found.prompt_tokens == len(request.tokens)
    return found.reason, found.cached_tokens


def test_every_way_to_meet_the_index_has_its_name():
    tower = Tower(prefill_save_alignment=128, checkpoint_interval=0)
    prompt = list(range(300))
    assert outcome(tower, prompt) == ("never_seen", 0)
    assert outcome(tower, prompt) == ("hit", 256)
    assert outcome(tower, range(300, 400)) == ("too_short", 0)
    assert outcome(tower, [*prompt[:100], *range(7, 250)]) == ("alignment", 0)
    assert outcome(tower, [*prompt[:200], *range(7, 250)]) == ("no_checkpoint", 0)
    assert outcome(tower, prompt, prompt_logprobs=0) == ("needs_prompt_logits", 0)
    while tower.engine._ledger.evict_slot():
        pass
    assert outcome(tower, prompt) == ("evicted", 0)
    stats = tower.engine.stats()
    assert stats.prefix_tokens["hit"] == 256
    assert stats.prefix_tokens["never_seen"] == 300
    assert stats.prompt_tokens == sum(o.prompt_tokens for o in tower.outcomes.values())


def test_without_prefix_caching_nothing_is_looked_up_or_kept():
    tower = Tower(prefix_caching=False)
    assert outcome(tower, range(200)) == outcome(tower, range(200)) == ("disabled", 0)
    assert tower.engine.stats().slots_checkpoint == 0


@pytest.mark.parametrize("length", [127, 128, 129, 191, 192, 193])
def test_a_match_leaves_one_token_for_the_logits(length):
    tower = Tower()
    outcome(tower, range(length))
    assert outcome(tower, range(length)) == ("hit", (length - 1) // 64 * 64)


def test_the_next_turn_starts_from_the_end_of_the_first_prompt():
    tower = Tower()
    assert outcome(tower, range(128)) == ("never_seen", 0)
    assert outcome(tower, range(190)) == ("hit", 128)


def test_prompts_with_different_salts_share_nothing():
    tower = Tower()
    outcome(tower, range(200), cache_salt="a")
    assert outcome(tower, range(200), cache_salt="b") == ("never_seen", 0)
    assert outcome(tower, range(200), cache_salt="a") == ("hit", 192)


def test_a_flush_makes_everything_older_unfindable():
    tower = Tower()
    outcome(tower, range(200))
    tower.engine.flush_cache()
    assert tower.engine.stats().slots_checkpoint == 0
    assert outcome(tower, range(200)) == ("never_seen", 0)


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_prompt_that_runs_during_a_flush_publishes_nothing(in_flight):
    tower = Tower(checkpoint_interval=64)
    stream = tower.engine.submit(tower.request(range(600)))
    if in_flight:
        tower.executor.during = lambda plan: plan.step == 1 and tower.engine.flush_cache()
    tower.step()
    tower.step()
    if not in_flight:
        tower.engine.flush_cache()
    tower.run()
    assert list(stream)[-1].finish_reason == "length"
    assert tower.engine.stats().slots_checkpoint == 0
    assert outcome(tower, range(600)) == ("never_seen", 0)


def test_an_export_that_a_layer_did_not_write_is_not_published():
    tower = Tower(checkpoint_interval=64)
    tower.executor.writes = lambda slot, end: end != 128
    outcome(tower, range(250))
    assert [c.end for c in tower.engine._ledger.index.checkpoints()] == [64, 192]
    assert tower.engine.stats().checkpoints_skipped == {"unwritten": 1}


def test_nonfinite_logits_end_the_request_and_drop_what_it_came_from():
    tower = Tower(checkpoint_interval=64)
    outcome(tower, range(130))
    tower.executor.finite = lambda row: False
    answer = tower.answers([tower.request(range(300), n=2)])
    assert answer == [{0: ([], "error"), 1: ([], "error")}]
    assert tower.outcomes["r1"].cached_tokens == 128
    # The shallower checkpoint at 64 goes as well: its page was attended to like all the others, so
    # that the damage may lie in it, and then whoever starts from there fails too.
    assert not tower.engine._ledger.index.num_checkpoints
    assert tower.engine.stats().nonfinite == 1
    tower.executor.finite = lambda row: True
    assert outcome(tower, range(300)) == ("evicted", 0)


def test_what_damaged_logits_were_computed_from_is_under_no_later_checkpoint():
    tower = Tower()
    outcome(tower, range(130))
    index = tower.engine._ledger.index
    suspects = {node.page for node in index.nodes()}
    other = [*range(64), *range(7, 200)]
    outcome(tower, other)
    tower.executor.finite = lambda row: False
    assert tower.answers([tower.request(range(300))]) == [{0: ([], "error")}]
    assert tower.outcomes["r2"].cached_tokens == 128
    tower.executor.finite = lambda row: True
    assert outcome(tower, range(300)) == ("evicted", 0)
    assert outcome(tower, range(300)) == ("hit", 256)
    assert not suspects & {node.page for node in index.nodes()}
    tower.assert_nothing_is_held()


def test_a_cold_prompt_with_damaged_logits_leaves_the_prefixes_of_others():
    tower = Tower(checkpoint_interval=64, checkpoint_budget=30, num_slots=40)
    outcome(tower, range(130), cache_salt="other")
    outcome(tower, [*range(64), *range(7, 200)])
    tower.executor.finite = lambda row: False
    prompt = list(range(3, 600))
    assert tower.answers([tower.request(prompt)]) == [{0: ([], "error")}]
    tower.executor.finite = lambda row: True
    assert outcome(tower, prompt) == ("evicted", 0)
    assert outcome(tower, range(130), cache_salt="other") == ("hit", 128)
    assert outcome(tower, [*range(64), *range(7, 200)])[0] == "hit"


def test_a_long_prompt_keeps_within_the_budget_of_checkpoints():
    tower = Tower(checkpoint_interval=64, checkpoint_budget=3)
    outcome(tower, range(1500))
    index = tower.engine._ledger.index
    assert index.num_checkpoints <= 3
    assert max(c.end for c in index.checkpoints()) == 1472


def test_prompt_logprobs_come_once_and_complete_though_the_prompt_is_chunked():
    tower = Tower()
    stream = tower.engine.submit(tower.request(range(600), prompt_logprobs=0, max_tokens=3))
    tower.run()
    deltas = list(stream)
    entries = deltas[0].prompt_logprobs
    assert entries is not None
    assert [entry.position for entry in entries] == list(range(1, 600))
    assert [entry.token for entry in entries] == [at % 50 for at in range(1, 600)]
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])
