"""The engine's thread and those of a store: neither waits for the other."""

from __future__ import annotations

import threading

from millpond.engine.loop import Engine
from millpond.engine.tiers import Store
from millpond.store.backend import StoreUnavailable
from millpond.store.connector import Connector
from millpond.store.door import Door
from millpond.store.rank import RankStore
from tests.store.test_tiers import TEXT
from tests.store.towers import StoredTower, SymbolicMemory
from tests.store.worlds import Shelf, identity
from tests.support.towers import collect


class Threaded(StoredTower):
    """Its engine and its ranks run in threads of their own, by the real clock."""

    close_seconds = 60.0  # what is under way has all the time that a busy machine takes

    def _open(self) -> Engine:
        self.ranks = []
        store = self.stores[0]
        memory = SymbolicMemory(self.executor, 0, 1, None, {})
        rank = RankStore(0, memory, Door(lambda: store, (), retry_after=0.01))
        self.connector = Connector([rank], memory, "scripted")
        names = (identity().namespace(0),)
        made = Store(connector=self.connector, namespaces=names, close_seconds=self.close_seconds)
        engine = Engine(self.settings, self.executor, store=made)
        engine._ledger.prefill_rate.in_force = 20.0
        engine._ledger.prefill_rate.observe = lambda *numbers: 1.0
        self.tiers = engine._tiers
        engine.start()
        return engine


def ask(tower, tokens):
    """The answer, checked."""
    request = tower.request(tokens)
    answer = collect(tower.engine.submit(request), tower.outcomes)
    assert answer == tower.naive(request)
    return tower.outcomes[request.request_id]


def test_records_come_and_go_between_threads_and_only_theirs_call_the_store():
    shelf = Shelf()
    first = Threaded(shelf)
    ask(first, TEXT[:300])
    first.engine.close()
    second = Threaded(shelf)
    assert ask(second, TEXT[:300]).loaded_tokens == 256
    second.engine.close()
    for tower in (first, second):
        assert tower.stores[0].threads
        assert all(name.startswith("millpond-store") for name in tower.stores[0].threads)
        assert tower.engine._ledger.pool.num_free == tower.engine._ledger.pool.size
    assert not [t for t in threading.enumerate() if t.name.startswith("millpond-store")]


class Hasty(Threaded):
    """Waits for a moment only when it ends."""

    close_seconds = 0.5


def test_a_store_that_hangs_in_a_put_holds_up_nobody_nor_the_end():
    tower = Hasty()
    go_on = threading.Event()
    hangs = threading.Event()

    def before(name, keys):
        if name == "put":
            hangs.set()
            go_on.wait(60)

    tower.stores[0].before = before
    ask(tower, TEXT[:300])
    assert hangs.wait(10)
    for start in (0, 100, 200):
        ask(tower, TEXT[start : start + 250])
    tower.engine.close()
    assert tower.tiers.transfers.num_slots >= 1  # it still reads
    assert not tower.stores[0].closed, "closed under a call"
    go_on.set()


def test_a_store_that_hangs_in_a_get_lets_its_request_go():
    shelf = Shelf()
    first = Threaded(shelf)
    ask(first, TEXT[:100])
    first.engine.close()
    tower = Threaded(shelf)
    tower.engine._ledger.prefill_rate.in_force = 640.0  # a tenth of a second
    go_on, hangs = threading.Event(), threading.Event()

    def before(name, keys):
        if name == "get" and any("/s/" in key for key in keys):
            hangs.set()
            go_on.wait(60)

    tower.stores[0].before = before
    outcome = ask(tower, TEXT[:100])
    if hangs.is_set():  # unless even the lookup came too late
        assert outcome.cached_tokens == 0
        assert tower.engine.stats().store.waits == {"too_slow": 1}
    go_on.set()
    tower.engine.close()
    assert tower.engine._ledger.pool.num_free == tower.engine._ledger.pool.size


def test_a_store_that_comes_and_goes_is_used_whenever_it_is_there():
    tower = Threaded()
    calls = iter(range(10**9))

    def before(name, keys):
        if next(calls) % 3 == 1:
            raise StoreUnavailable("gone")

    tower.stores[0].before = before
    for start in range(0, 500, 25):
        ask(tower, TEXT[start : start + 200])
    tower.stores[0].before = lambda name, keys: None
    tower.engine.close()
    assert tower.engine.stats().store.breaker_trips >= 1
    assert tower.engine._ledger.pool.num_free == tower.engine._ledger.pool.size
