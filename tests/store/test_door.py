"""When a store is left alone, when it is tried again, and when it is closed and opened anew."""

from __future__ import annotations

import threading

import pytest

from millpond.errors import Refused
from millpond.store.backend import StoreUnavailable
from millpond.store.door import Door
from tests.store.worlds import ScriptedStore


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def door_over(stores, clock, regions=()):
    """A door that opens the next of `stores`; an exception in their place is raised."""
    rest = iter(stores)

    def opener():
        store = next(rest)
        if isinstance(store, Exception):
            raise store
        return store

    return Door(opener, regions, retry_after=5.0, clock=clock)


def fails(door, **how):
    with pytest.raises(StoreUnavailable), door.enter():
        raise StoreUnavailable("gone", **how)


def test_it_opens_once_and_registers_what_views_will_lie_in(clock):
    store, region = ScriptedStore(), memoryview(bytearray(4))
    door = door_over([store], clock, [region])
    door.open()
    with door.enter() as found:
        assert found is store
    assert store.registered == [region]
    assert (door.state, door.name) == ("closed", "scripted")


def test_after_a_failure_nobody_calls_for_a_while_then_one_tries(clock):
    door = door_over([ScriptedStore()], clock)
    door.open()
    fails(door)
    assert (door.state, door.times_tripped) == ("open", 1)
    clock.now = 4.9
    with pytest.raises(StoreUnavailable, match="left alone"), door.enter():
        pass
    clock.now = 5.1
    assert door.state == "trying"
    with door.enter(), pytest.raises(StoreUnavailable), ThreadedEntry(door):
        pass
    assert door.state == "closed"


class ThreadedEntry:
    """Enter a door in another thread; raises here what it raised there."""

    def __init__(self, door: Door) -> None:
        self.error: BaseException | None = None
        thread = threading.Thread(target=self._enter, args=(door,))
        thread.start()
        thread.join(10)

    def _enter(self, door: Door) -> None:
        try:
            with door.enter():
                pass
        except StoreUnavailable as error:
            self.error = error

    def __enter__(self) -> None:
        if self.error is not None:
            raise self.error

    def __exit__(self, *_: object) -> None:
        pass


def test_a_try_that_fails_leaves_it_alone_again_and_counts_as_the_same_outage(clock):
    door = door_over([ScriptedStore()], clock)
    door.open()
    fails(door)
    clock.now = 6.0
    fails(door)
    assert (door.state, door.times_tripped) == ("open", 1)
    clock.now = 12.0
    with door.enter():
        pass
    assert door.state == "closed"


def test_an_error_that_is_not_an_outage_leaves_it_in_use(clock):
    door = door_over([ScriptedStore()], clock)
    with pytest.raises(ValueError), door.enter():
        raise ValueError
    assert door.state == "closed"


def test_a_store_absent_at_first_is_opened_once_it_is_there(clock):
    store = ScriptedStore()
    door = door_over([StoreUnavailable("absent"), store], clock)
    with pytest.raises(StoreUnavailable):
        door.open()
    assert door.state == "open"
    clock.now = 6.0
    with door.enter() as found:
        assert found is store


def test_a_store_that_refuses_is_never_tried_again(clock):
    door = door_over([StoreUnavailable("absent"), Refused("other weights")], clock)
    with pytest.raises(StoreUnavailable):
        door.open()
    clock.now = 6.0
    with pytest.raises(Refused), door.enter():
        pass
    clock.now = 60.0
    with pytest.raises(StoreUnavailable, match="other weights"), door.enter():
        pass
    assert door.state == "refused"


def test_memory_in_use_closes_the_store_when_the_last_caller_is_out_and_only_then_returns(clock):
    first, second = ScriptedStore(), ScriptedStore()
    door = door_over([first, second], clock)
    door.open()
    inside, leave, over = threading.Event(), threading.Event(), threading.Event()

    def another() -> None:
        with door.enter():
            inside.set()
            leave.wait(10)

    def stuck() -> None:
        fails(door, memory_in_use=True)
        assert first.closed
        over.set()

    threads = [threading.Thread(target=another), threading.Thread(target=stuck)]
    threads[0].start()
    inside.wait(10)
    threads[1].start()
    assert not over.wait(0.1), "it returned while the store could still write"
    assert not first.closed
    assert door.state == "open"
    leave.set()
    assert over.wait(10)
    for thread in threads:
        thread.join(10)
    clock.now = 6.0
    with door.enter() as found:
        assert found is second


def test_a_call_that_lasts_is_called_hung(clock):
    door = door_over([ScriptedStore()], clock)
    door.open()
    with door.enter():
        clock.now = 61.0
        assert door.state == "hung"
        assert not door.close()
    assert door.state == "refused"
