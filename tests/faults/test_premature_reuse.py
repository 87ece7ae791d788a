"""Kind: a slot, page or buffer is handed on while somebody still reads or writes it."""

from __future__ import annotations

import random
from collections import Counter

from millpond.plan.step import StepPlan
from millpond.state.checkpoint import AnchorKind
from millpond.state.lease import Phase
from millpond.state.pages import PagePool
from millpond.state.pool import StatePool
from millpond.state.prefix import PrefixIndex
from tests.faults.house import House, answer, prompt

TOKENS = tuple(range(64))


def published(pool: StatePool, pages: PagePool, index: PrefixIndex) -> None:
    """A request computes one page of `TOKENS`, publishes it and ends."""
    producer = pool.take("writer")
    pool.record_end(producer, 64)
    handles = pages.take(1)
    index.publish(TOKENS, 64, handles, pool.seal(producer), AnchorKind.PROMPT_END, b"")
    pages.release(handles)


def test_a_transfer_keeps_the_slot_of_a_request_that_ended():
    pool = StatePool(1)
    producer = pool.take("request")
    slot = producer.slot
    pool.record_end(producer, 64)
    reader = pool.seal(producer)
    transfer = pool.pin(reader, "put")
    pool.release(reader)
    assert pool.phase(slot) is Phase.SEALED
    assert pool.num_free == 0
    assert pool.drain_freed() == ()
    pool.release(transfer)
    assert pool.phase(slot) is Phase.FREE
    assert pool.drain_freed() == (slot,)


def test_a_checkpoint_evicted_while_it_is_read_keeps_its_slot():
    pool, pages = StatePool(2), PagePool(2)
    index = PrefixIndex(pool, pages)
    published(pool, pages, index)
    match = index.match(TOKENS, b"", 64)
    lease = index.use(match, "reader")
    assert not index.evict_slot()  # nothing would be free: somebody reads it
    assert index.evict_pages(1) == 0
    index.drop(match.checkpoint)
    assert index.num_checkpoints == 0
    assert pool.phase(lease.slot) is Phase.SEALED
    assert pool.end(lease) == 64
    index.clear()  # and its page stays with the reader too
    assert all(pages.is_live(handle) for handle in match.pages)
    pool.release(lease)
    pages.release(match.pages)
    assert pool.num_free == pool.size
    assert pages.num_free == pages.size


def test_a_slot_freed_by_end_of_sequence_serves_its_next_owner_with_the_owners_tokens_only():
    """One slot to run in; requests end at their end-of-sequence token while others wait for it."""
    first, second = prompt(70, 1), prompt(90, 2)
    stop_at = answer(first, 6)[5]
    house = House(slots=1, seats=1, prefix_caching=False, eos_token_ids=(stop_at,))
    a = house.ask(first, 50, ignore_eos=False)
    b = house.ask(second, 8)
    house.run(a, b)
    assert a.finish == ["stop"]
    assert a.tokens[0][-1] == stop_at
    assert b.is_right
    slots = {row.state_out for row in house.executor.rows()}
    assert slots == {0}
    last_of_a = max(i for i, row in enumerate(house.executor.rows()) if row.request == a.name)
    first_of_b = min(i for i, row in enumerate(house.executor.rows()) if row.request == b.name)
    assert last_of_a < first_of_b


def test_a_full_cache_under_many_long_prompts_changes_no_text():
    """Far more prefixes than slots, seen in any order: hits, evictions and misses alternate."""
    draw = random.Random(1)
    house = House(slots=7, pages=64, seats=4, budget=512, checkpoint_interval=256)
    prefixes = [prompt(600, seed) for seed in range(6)]
    reasons = Counter()
    for turn in range(4):
        asks = [
            house.ask(draw.choice(prefixes) + prompt(40 + turn, 100 * turn + n), 5)
            for n in range(8)
        ]
        house.run(*asks)
        assert all(ask.is_right for ask in asks)
        reasons += Counter(ask.reason for ask in asks)
    assert reasons["hit"]
    assert house.engine.stats().checkpoints_evicted
    house.assert_nothing_is_held()


def test_a_checkpoint_evicted_under_a_request_that_reads_it_changes_no_text():
    """The reader starts from a checkpoint; before its first step runs, the index is emptied."""
    house = House()
    shared = prompt(320)
    house.served(shared)
    reader = house.ask(shared + prompt(30, 9), 5)
    flushed = []

    def flush(plan: StepPlan) -> None:
        if not flushed and plan.prefill:
            flushed.append(house.engine.flush_cache())

    house.executor.before = flush
    house.run(reader)
    assert reader.cached > 0
    assert flushed
    assert reader.is_right
