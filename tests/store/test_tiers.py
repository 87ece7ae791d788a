"""An engine with a store: what comes back is what went, and whatever befalls the store is borne."""

from __future__ import annotations

import random

import pytest

from millpond.store.backend import StoreUnavailable
from millpond.store.connector import Limits
from millpond.store.jobs import Get, Lookup, Put
from tests.store.towers import Shelf, StoredTower
from tests.store.worlds import identity

DICE = random.Random(5)
TEXT = [DICE.randrange(50) for _ in range(900)]


def fill(shelf, tokens=TEXT[:300], **numbers):
    """An engine that served a prompt, stored what it made, and is gone."""
    tower = StoredTower(shelf, **numbers)
    tower.answers([tower.request(tokens)])
    tower.settle()
    tower.engine.close()
    return tower


def ask(tower, tokens=TEXT[:300], **params):
    """Ask, check the answer; the outcome."""
    request = tower.request(tokens, **params)
    assert tower.answers([request]) == [tower.naive(request)]
    return tower.outcomes[request.request_id]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("batch", [None, 1])
def test_a_restarted_engine_starts_where_the_last_one_stopped(num_ranks, batch):
    shelf = Shelf()
    fill(shelf, num_ranks=num_ranks, batch=batch)
    tower = StoredTower(shelf, num_ranks=num_ranks, batch=batch)
    first, second = ask(tower), ask(tower)
    assert (first.cached_tokens, first.loaded_tokens) == (256, 256)
    assert (second.cached_tokens, second.loaded_tokens) == (256, 0)
    stats = tower.engine.stats().store
    assert stats.hit_tokens == {"scripted": 256, "device": 256}
    assert stats.waits == {"loaded": 1}
    assert tower.engine.stats().prefix_tokens == {"hit": 512}
    tower.assert_nothing_is_held()


def test_a_state_that_was_evicted_comes_back_under_the_pages_that_stayed():
    tower = StoredTower()
    ask(tower)
    while tower.engine._ledger.index.evict_slot():
        pass
    moved = tower.engine.stats().store.moved_bytes["get"] if ask(tower).loaded_tokens else 0
    assert moved == tower.ranks[0]._memory.slot_bytes
    tower.assert_nothing_is_held()


def test_a_device_hit_that_is_as_deep_is_not_looked_up_for_more():
    tower = StoredTower()
    ask(tower)
    lookups = tower.shelf.calls["exists"]
    assert ask(tower).cached_tokens == 256
    assert tower.shelf.calls["exists"] == lookups


def test_a_deeper_record_is_loaded_beside_a_shallower_device_hit():
    shelf = Shelf()
    fill(shelf, TEXT[:600])
    tower = StoredTower(shelf)
    ask(tower, TEXT[:150])
    outcome = ask(tower, TEXT[:600])
    assert (outcome.cached_tokens, outcome.loaded_tokens) == (576, 448)


def test_requests_that_ask_for_one_record_share_one_get():
    shelf = Shelf()
    fill(shelf)
    tower = StoredTower(shelf)
    requests = [tower.request(TEXT[:300], seed=seed) for seed in range(3)]
    assert tower.answers(requests) == [tower.naive(one) for one in requests]
    assert tower.engine.stats().store.jobs["get_done"] == 1
    assert {tower.outcomes[one.request_id].loaded_tokens for one in requests} == {256}


def test_a_request_waits_for_the_store_while_others_run():
    shelf = Shelf()
    fill(shelf)
    tower = StoredTower(shelf, eager=False)
    other = tower.engine.submit(tower.request(TEXT[400:450], max_tokens=30))
    tower.step()
    tower.engine.submit(tower.request(TEXT[:300]))
    for _ in range(5):
        tower.step()
        assert tower.engine.stats().requests_running == 1
        assert tower.engine.stats().store.waiting == 1
    del other
    tower.settle()
    tower.step()
    tower.settle()
    tower.step()
    assert tower.engine.stats().requests_running == 2
    tower.run()
    tower.assert_nothing_is_held()


@pytest.mark.parametrize("moment", [Lookup, Get])
def test_nobody_waits_longer_than_computing_takes(moment):
    """The store hangs: the request is computed, and what comes after all is for the next one."""
    shelf = Shelf()
    fill(shelf)
    tower = StoredTower(shelf, eager=False)
    request = tower.request(TEXT[:300])
    stream = tower.engine.submit(request)
    tower.engine._read_inbox()
    if moment is Get:
        tower.ranks[0].do()
        tower.engine._read_inbox()
        tower.tiers.advance()
        assert tower.under_way(Get) == 1
    assert tower.tiers.patience() <= 0.256
    tower.now += 0.256
    tower.step()
    assert tower.engine.stats().requests_running == 1
    assert tower.engine.stats().store.waits == {"too_slow": 1}
    tower.run()
    assert [t for d in stream for t in d.tokens]
    tower.settle()
    assert ask(tower).cached_tokens == 256
    tower.assert_nothing_is_held()


def test_a_store_slower_than_computing_is_not_waited_for():
    shelf = Shelf()
    fill(shelf)
    tower = StoredTower(shelf)
    gets = tower.tiers._connector.gets
    for _ in range(60):
        gets.moved(1000, 1.0)
    outcome = ask(tower)
    assert outcome.cached_tokens == 0
    assert tower.engine.stats().store.jobs.get("get_done", 0) == 0
    assert ask(tower, TEXT[300:500]).cached_tokens == 0  # nor is anything stored that is no use
    assert tower.engine.stats().store.jobs.get("put_done", 0) == 0


# What may befall a store.


def unavailable(name):
    def before(called, keys):
        if called == name:
            raise StoreUnavailable("gone")

    return before


@pytest.mark.parametrize("call", ["exists", "get", "put", "remove"])
def test_a_store_that_goes_away_is_left_alone_and_found_again(call):
    shelf = Shelf()
    fill(shelf, TEXT[:200])
    tower = StoredTower(shelf)
    tower.stores[0].before = unavailable(call)
    for length in (300, 200, 400):
        ask(tower, TEXT[:length])
    tower.settle()
    trips = tower.engine.stats().store.breaker_trips
    if call != "remove":
        assert trips == 1
        assert tower.engine.stats().store.breaker == "open"
        calls = sum(tower.shelf.calls.values())
        ask(tower, TEXT[600:800])
        assert sum(tower.shelf.calls.values()) == calls, "an open breaker still calls"
    tower.stores[0].before = lambda name, keys: None
    tower.now += 6
    ask(tower, TEXT[500:700])
    tower.settle()
    assert tower.engine.stats().store.breaker == "closed"
    assert any("/m/" in key for key in shelf.objects)
    tower.assert_nothing_is_held()


@pytest.mark.parametrize("kind", ["/m/", "/s/", "/p/"])
@pytest.mark.parametrize("harm", ["gone", "short", "bit"])
def test_a_record_lost_or_damaged_between_lookup_and_get_is_never_used(kind, harm):
    shelf = Shelf()
    fill(shelf)
    tower = StoredTower(shelf, eager=False)
    request = tower.request(TEXT[:300])
    stream = tower.engine.submit(request)
    tower.engine._read_inbox()
    assert tower.ranks[0].do()  # the lookup
    for key in [key for key in shelf.objects if kind in key]:
        data = bytearray(shelf.objects.pop(key))
        data[len(data) // 2] ^= 1
        if harm != "gone":
            shelf.objects[key] = bytes(data[:-1] if harm == "short" else data)
    tower.eager = True
    tower.run()
    assert [out.token for delta in stream for out in delta.tokens] == tower.naive(request)[0][0]
    assert tower.engine.stats().store.waits == {"failed": 1}
    tower.settle()
    tower.engine.close()
    assert ask(StoredTower(tower.shelf)).loaded_tokens == 256  # stored anew, and sound
    assert tower.engine._ledger.pool.num_free == tower.engine._ledger.pool.size


def test_a_full_store_is_no_trouble():
    tower = StoredTower()
    tower.stores[0].refuse = lambda key: True
    for start in (0, 300, 500):
        ask(tower, TEXT[start : start + 200])
    tower.settle()
    assert tower.engine.stats().store.jobs["put_full"] >= 3
    assert not tower.shelf.objects
    tower.assert_nothing_is_held()


@pytest.mark.parametrize("kind", [Put, Get])
def test_a_call_that_never_ends_keeps_what_it_touches_and_nobody_waits(kind):
    shelf = Shelf()
    if kind is Get:
        fill(shelf)
    tower = StoredTower(shelf, eager=False, num_slots=6, session_len=640, num_pages=20)
    stream = tower.engine.submit(tower.request(TEXT[:300]))
    tower.engine._read_inbox()
    tower.ranks[0].do()
    tower.engine._read_inbox()
    if kind is Get:
        tower.tiers.advance()
        tower.now += 1.0
    while tower.engine.stats().requests_waiting + tower.engine.stats().requests_running:
        tower.engine.step()
        tower.now += 0.1
    list(stream)
    assert tower.under_way(kind) == 1
    tower.hangs = True
    for start in range(0, 640, 64):  # every slot and page is wanted, again and again
        prompt = TEXT[start : start + 250]
        requests = [tower.request(prompt, seed=seed, max_tokens=70) for seed in range(4)]
        streams = [tower.engine.submit(one) for one in requests]
        while tower.engine.stats().requests_waiting + tower.engine.stats().requests_running:
            tower.engine.step()
            assert tower.executor.violation is None
            tower.now += 0.1
        for one, told in zip(requests, streams, strict=True):
            assert [o.token for d in told for o in d.tokens] == tower.naive(one)[0][0]
    assert tower.under_way(kind) >= 1
    tower.hangs = False
    tower.settle()
    tower.run()
    tower.assert_nothing_is_held()


def test_puts_beyond_the_bound_are_shed_and_stored_before_eviction():
    tower = StoredTower(eager=False, limits=Limits(puts=1), checkpoint_budget=4, num_slots=12)
    tower.hangs = True
    for start in (0, 200, 400, 600):
        tower.answers([tower.request(TEXT[start : start + 150])])
    assert tower.engine.stats().store.sheds["put_busy"] == 3
    tower.eager, tower.hangs = True, False
    for _ in range(4):
        tower.answers([tower.request(TEXT[:20])])
    tower.settle()
    assert sum("/m/" in key for key in tower.shelf.objects) == 4
    tower.assert_nothing_is_held()


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "others"},
        {"weights_version": 1},
        {"draft": "others"},
        {"layout": "other"},
        {"tp_size": 2},
        {"kernels": "other"},
        {"dtype": "bfloat16"},
        {"alignment": 128},
    ],
)
def test_engines_that_differ_share_a_store_and_never_mix(changes):
    shelf = Shelf()
    fill(shelf)
    tower = StoredTower(shelf, who=identity(**changes))
    assert ask(tower).cached_tokens == 0


def test_two_engines_share_a_store_at_the_same_time():
    shelf = Shelf()
    one, two = StoredTower(shelf), StoredTower(shelf)
    for start in range(0, 600, 50):
        for tower in (one, two) if start % 100 else (two, one):
            ask(tower, TEXT[: start + 100])
    assert one.engine.stats().store.hit_tokens["scripted"] > 0
    assert two.engine.stats().store.hit_tokens["scripted"] > 0
    one.assert_nothing_is_held()
    two.assert_nothing_is_held()


def test_other_salts_never_meet():
    shelf = Shelf()
    fill(shelf)
    tower = StoredTower(shelf)
    request = tower.request(TEXT[:300], cache_salt="mine")
    tower.answers([request])
    assert tower.outcomes[request.request_id].cached_tokens == 0


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("moment", [Lookup, Get])
def test_an_abort_while_a_get_is_in_flight_detaches_the_request_only(moment, again):
    shelf = Shelf()
    fill(shelf)
    tower = StoredTower(shelf, eager=False)
    stream = tower.engine.submit(tower.request(TEXT[:300]))
    tower.engine._read_inbox()
    if moment is Get:
        tower.ranks[0].do()
        tower.engine._read_inbox()
        tower.tiers.advance()
    stream.abort()
    tower.engine._read_inbox()
    tower.engine._end_aborted()
    assert tower.under_way(moment) == 1
    if moment is Get:
        assert tower.tiers.transfers.num_slots == 1  # the transfer holds on
    if again:
        tower.eager = True
        assert ask(tower).cached_tokens == 256
    tower.assert_nothing_is_held()


def begun(moment):
    """An engine whose one request has one transfer of a kind under way, and its stream."""
    shelf = Shelf()
    if moment is not Put:
        fill(shelf)
    tower = StoredTower(shelf, eager=False)
    stream = tower.engine.submit(tower.request(TEXT[:300]))
    tower.engine._read_inbox()
    if moment is Get:
        tower.ranks[0].do()
        tower.engine._read_inbox()
        tower.tiers.advance()
    while moment is Put and not tower.under_way(Put):
        tower.step()
    assert tower.under_way(moment) == 1
    return tower, stream


@pytest.mark.parametrize("moment", [Lookup, Get, Put])
def test_an_epoch_that_changes_under_a_transfer_lets_nothing_of_before_be_found(moment):
    tower, stream = begun(moment)
    tower.engine.flush_cache()
    tower.settle()
    assert not list(tower.engine._ledger.index.checkpoints())
    tower.eager = True
    tower.run()
    list(stream)
    outcomes = list(tower.outcomes.values())
    assert all(one.cached_tokens == 0 for one in outcomes)
    while tower.engine._ledger.index.evict_slot():
        pass
    tower.assert_nothing_is_held()


def test_a_flush_hides_what_was_stored_before_and_what_comes_after_is_found():
    tower = StoredTower()
    ask(tower)
    tower.settle()
    tower.engine.flush_cache()
    assert ask(tower).cached_tokens == 0
    tower.settle()
    while tower.engine._ledger.index.evict_slot():
        pass
    assert ask(tower).loaded_tokens == 256


def test_other_weights_store_under_other_names_or_not_at_all():
    tower = StoredTower()
    ask(tower)
    tower.settle()
    tower.engine.flush_cache()
    tower.tiers.new_epoch(namespaces=("other",))
    assert ask(tower).cached_tokens == 0
    tower.settle()
    assert any(key.startswith("other/m/") for key in tower.shelf.objects)
    tower.engine.flush_cache()
    tower.tiers.new_epoch(namespaces=())
    calls = sum(tower.shelf.calls.values())
    ask(tower)
    tower.settle()
    assert sum(tower.shelf.calls.values()) == calls
    tower.assert_nothing_is_held()


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("moment", [Lookup, Get, Put])
def test_an_engine_that_closes_with_transfers_in_flight_gives_everything_back(moment, drain):
    tower, stream = begun(moment)
    tower.engine.close(drain=drain)
    reason = [delta.finish_reason for delta in stream][-1]
    assert reason == ("length" if drain else "abort")
    ledger = tower.engine._ledger
    assert ledger.pool.num_free == ledger.pool.size
    assert ledger.pages.num_free == ledger.pages.size
    assert tower.stores[0].closed
    if drain or moment is Put:
        assert ask(StoredTower(tower.shelf)).loaded_tokens == 256


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_role_stores_or_loads_alone(role):
    shelf = Shelf()
    tower = StoredTower(shelf, role=role)
    ask(tower)
    tower.settle()
    assert bool(shelf.objects) is (role == "kv_producer")
    fill(shelf)
    tower = StoredTower(shelf, role=role)
    assert ask(tower).loaded_tokens == (256 if role == "kv_consumer" else 0)


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 6])
def test_a_pool_with_no_slot_to_spare_stores_nothing_and_serves(num_slots):
    shelf = Shelf()
    fill(shelf)
    tower = StoredTower(shelf, num_slots=num_slots, eager=False)
    requests = [tower.request(TEXT[: 100 * n]) for n in (3, 5, 3, 2)]
    assert tower.answers(requests) == [tower.naive(one) for one in requests]
    assert tower.tiers.transfers.num_slots <= max(0, num_slots - 5)
    tower.assert_nothing_is_held()


def test_the_logits_of_a_prompt_are_computed_whatever_is_stored():
    shelf = Shelf()
    fill(shelf)
    outcome = ask(StoredTower(shelf), prompt_logprobs=0)
    assert (outcome.reason, outcome.cached_tokens) == ("needs_prompt_logits", 0)
