"""Kind: a slot, page or buffer is handed on while somebody still reads or writes it."""

from __future__ import annotations

from millpond.state.checkpoint import AnchorKind
from millpond.state.lease import Phase
from millpond.state.pages import PagePool
from millpond.state.pool import StatePool
from millpond.state.prefix import PrefixIndex

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
