"""What a real store does to those who use it when part of it dies, hangs, fills up or forgets."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import millpond.store.mooncake as mooncake
from millpond.store.backend import StoreUnavailable
from millpond.store.mooncake import MooncakeStore
from millpond.units import KIB, MIB
from tests.store.backends.mooncakes import Master, Owner
from tests.store.contract import Arena, key, noise

BIG = 96 * MIB  # long enough on its way to be interrupted


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    master = Master(tmp_path).start()
    yield master
    master.kill()


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Master]:
    """A master that keeps what was looked up for a moment only."""
    master = Master(tmp_path, lease="200ms").start()
    yield master
    master.kill()


@pytest.fixture
def owner(master: Master) -> Iterator[Owner]:
    owner = Owner(master, 320 * MIB)
    yield owner
    owner.signal(signal.SIGCONT)
    owner.kill()


@pytest.fixture
def store(master: Master, owner: Owner) -> Iterator[MooncakeStore]:
    store = MooncakeStore(master.config())
    yield store
    store.close()


@pytest.fixture
def arena(store: MooncakeStore) -> Arena:
    arena = Arena(2 * BIG)
    store.register(arena.memory)
    return arena


def outcome(call: Callable[[], list[bool]]) -> list[bool] | str:
    """What the call gave; an outage in words."""
    try:
        return call()
    except StoreUnavailable as error:
        return "memory in use" if error.memory_in_use else str(error)


def during(
    store: MooncakeStore, call: Callable[[], list[bool]], event: Callable[[], None]
) -> object:
    """The outcome of a call that `event` befalls, which must come within the store's bound."""
    found: list[object] = []
    inside = threading.Event()

    class Watched:
        """The client, telling when the transfer has begun."""

        def __getattr__(self, name: str) -> object:
            inside.set()
            return getattr(client, name)

    client, store._client = store._client, Watched()
    thread = threading.Thread(target=lambda: found.append(outcome(call)))
    thread.start()
    assert inside.wait(30)
    time.sleep(0.01)
    event()
    thread.join(store.bound)
    assert found, "the call outlived its bound"
    if isinstance(store._client, Watched):
        store._client = client
    return found[0]


def eventually(call: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if call():
                return
        except StoreUnavailable:
            pass
        assert time.monotonic() < end, "it never came back"
        time.sleep(0.2)


def test_a_store_that_is_absent_at_the_start_is_an_outage(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        MooncakeStore(Master(tmp_path).config())


def test_a_master_that_hangs_at_the_start_is_an_outage(master: Master) -> None:
    master.signal(signal.SIGSTOP)
    with pytest.raises(StoreUnavailable, match="joining"):
        MooncakeStore(master.config())


@pytest.mark.parametrize("verb", ["put", "get"])
def test_a_master_killed_in_mid_transfer_is_an_outage_until_it_is_back(
    master: Master, store: MooncakeStore, arena: Arena, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, view = key(), arena.take(0, BIG)
    assert store.put([(old, view)]) == [True]
    name = key() if verb == "put" else old
    transfer = store.put if verb == "put" else store.get
    # The transfer itself may still succeed: its bytes do not pass through the master.
    assert isinstance(during(store, lambda: transfer([(name, view)]), master.kill), (list, str))
    with pytest.raises(StoreUnavailable):
        store.exists([old])
    # From here on the library, which needs seconds to find out again, is not even asked.
    with monkeypatch.context() as patch:
        patch.setattr(store, "_client", object())
        for call in (
            lambda: store.put([(key(), view)]),
            lambda: store.get([(old, view)]),
            lambda: store.exists([old]),
            lambda: store.remove([old]),
        ):
            with pytest.raises(StoreUnavailable, match="cannot be reached"):
                call()
    master.start()
    fresh, small = key(), arena.write(0, noise(200 * KIB, 5))
    eventually(lambda: store.put([(fresh, small)]) == [True])
    assert store.get([(fresh, arena.take(BIG, 200 * KIB))]) == [True]
    assert arena.take(BIG, 200 * KIB) == noise(200 * KIB, 5)
    assert store.get([(old, view)]) == [False]  # a master remembers nothing


def test_a_master_that_hangs_is_an_outage_and_nothing_is_lost(tmp_path: Path) -> None:
    with ExitStack() as over:
        # A long time to live, or it would forget those it did not hear.
        master = Master(tmp_path, client_ttl=60).start()
        over.callback(master.kill)
        store = over.enter_context(closing(MooncakeStore(master.config(lend=16 * MIB))))
        arena = Arena(MIB)
        store.register(arena.memory)
        name, view = key(), arena.write(0, noise(100 * KIB, 1))
        assert store.put([(name, view)]) == [True]
        master.signal(signal.SIGSTOP)
        for call in (
            lambda: store.put([(key(), view)]),
            lambda: store.get([(name, view)]),
            lambda: store.exists([name]),
        ):
            found = outcome(call)
            assert isinstance(found, str), found
        master.signal(signal.SIGCONT)
        eventually(lambda: store.exists([name]) == [True])
        assert store.get([(name, view)]) == [True]


@pytest.mark.parametrize("verb", ["put", "get"])
def test_a_member_that_hangs_fails_the_transfer_and_writes_nothing_later(
    store: MooncakeStore, owner: Owner, arena: Arena, verb: str
) -> None:
    name = key()
    arena.take(0, BIG)[:] = b"\x07" * BIG
    if verb == "get":
        assert store.put([(name, arena.take(0, BIG))]) == [True]
    transfer = store.put if verb == "put" else store.get
    view = arena.take(BIG, BIG)
    found = during(store, lambda: transfer([(name, view)]), lambda: owner.signal(signal.SIGSTOP))
    assert isinstance(found, str) or found == [False]
    view[:] = bytes(BIG)
    owner.signal(signal.SIGCONT)
    eventually(lambda: store.put([(key(), arena.write(0, noise(90 * KIB, 1)))]) == [True])
    time.sleep(0.5)
    assert view == bytes(BIG)


def test_a_record_on_a_member_that_hangs_is_given_up_within_the_bound(
    store: MooncakeStore, owner: Owner, arena: Arena
) -> None:
    names, size = [key() for _ in range(64)], 100 * KIB
    items = [(n, arena.take(i * size, size)) for i, n in enumerate(names)]
    assert all(store.put(items))
    owner.signal(signal.SIGSTOP)
    found: list[object] = []
    # More threads than may be inside at once, as a connector has them.
    threads = [
        threading.Thread(target=lambda: found.append(outcome(lambda: store.get(items))))
        for _ in range(4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(store.bound)
    assert len(found) == 4
    assert "memory in use" not in found
    assert all(isinstance(f, str) or not any(f) for f in found)
    owner.signal(signal.SIGCONT)


def test_after_a_transfer_that_may_go_on_the_member_leaves_and_joins_again(
    store: MooncakeStore, owner: Owner, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "GIVEN_UP", 1.0)
    name, before = key(), store._client
    assert store.put([(name, arena.take(0, BIG))]) == [True]
    found = during(
        store,
        lambda: store.get([(name, arena.take(BIG, BIG))]),
        lambda: owner.signal(signal.SIGSTOP),
    )
    assert "join again" in str(found)
    assert store._client is None
    owner.signal(signal.SIGCONT)
    monkeypatch.undo()
    eventually(lambda: store.put([(key(), arena.write(0, noise(90 * KIB, 1)))]) == [True])
    assert store._client not in (None, before)


@pytest.mark.parametrize("verb", ["put", "get"])
def test_a_member_killed_in_mid_transfer_costs_that_object_and_another_takes_over(
    master: Master, store: MooncakeStore, owner: Owner, arena: Arena, verb: str
) -> None:
    name, view = key(), arena.take(0, BIG)
    if verb == "get":
        assert store.put([(name, view)]) == [True]
    transfer = store.put if verb == "put" else store.get
    found = during(store, lambda: transfer([(name, view)]), owner.kill)
    assert isinstance(found, str) or found == [False]
    owner.process = Owner(master, 64 * MIB).process  # and end it with the test
    fresh, small = key(), arena.write(0, noise(200 * KIB, 5))
    eventually(lambda: store.put([(fresh, small)]) == [True])
    assert store.get([(fresh, arena.take(BIG, 200 * KIB))]) == [True]
    assert store.get([(name, view)]) == [False]


def test_a_full_store_refuses_and_says_so(master: Master) -> None:
    store, arena = MooncakeStore(master.config(lend=16 * MIB)), Arena(MIB)
    store.register(arena.memory)
    names = [key() for _ in range(24)]
    stored = [store.put([(n, arena.write(0, noise(MIB, 1)))])[0] for n in names]
    assert stored[0]
    assert not all(stored)
    assert store.stats().refused == stored.count(False)
    big = Arena(20 * MIB)
    store.register(big.memory)
    assert store.put([(key(), big.memory)]) == [False]
    store.close()


def test_an_object_that_goes_after_the_lookup_is_a_miss(hasty: Master) -> None:
    store, arena = MooncakeStore(hasty.config(lend=16 * MIB)), Arena(2 * MIB)
    store.register(arena.memory)
    name = key()
    assert store.put([(name, arena.write(0, noise(MIB, 1)))]) == [True]
    assert store.exists([name]) == [True]
    for _ in range(6):  # its lease ends, and what was used longest ago makes room
        time.sleep(0.3)
        store.put([(key(), arena.take(0, MIB)) for _ in range(20)])
    assert store.get([(name, arena.take(MIB, MIB))]) == [False]
    store.close()


def owned_bytes(store: MooncakeStore, name: str) -> tuple[int, int]:
    """(address, bytes) of an object in this process's own segment."""
    place = store._client.get_replica_desc(name)[0].get_memory_descriptor().buffer_descriptor
    found = getattr(place, "buffer_address_", None) or place.buffer_address
    size = getattr(place, "size_", None) or place.size
    return found, size


@pytest.mark.parametrize("size", [3000, 300 * KIB])
@pytest.mark.parametrize("where", [0, 1500, -1, -9, -16])
def test_no_byte_in_the_memory_of_a_member_may_change(
    lender: tuple[MooncakeStore, Arena], size: int, where: int
) -> None:
    store, arena = lender
    name, before = key(), store.stats().corrupt
    assert store.put([(name, arena.write(0, noise(size, 1)))]) == [True]
    address, total = owned_bytes(store, name)
    assert total == size + 16
    at = address + where % total
    ctypes.memset(at, ctypes.string_at(at, 1)[0] ^ 4, 1)
    assert store.get([(name, arena.take(MIB, size))]) == [False]
    assert store.stats().corrupt == before + 1
    assert store.exists([name]) == [False]
    assert store.put([(name, arena.take(0, size))]) == [True]
    assert store.get([(name, arena.take(MIB, size))]) == [True]
    assert arena.take(MIB, size) == noise(size, 1)


@pytest.fixture(scope="module")
def lender(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MooncakeStore, Arena]]:
    master = Master(tmp_path_factory.mktemp("lender")).start()
    store, arena = MooncakeStore(master.config(lend=64 * MIB)), Arena(4 * MIB)
    store.register(arena.memory)
    yield store, arena
    store.close()
    master.kill()


def test_what_others_put_under_a_key_is_a_miss(lender: tuple[MooncakeStore, Arena]) -> None:
    store, arena = lender
    for left in (1, 15, 1000, 1016, 3000):
        name = key()
        raw = arena.write(0, noise(left, 3))
        address = ctypes.addressof(ctypes.c_char.from_buffer(raw))
        assert store._client.put_from(name, address, left) == 0
        assert store.get([(name, arena.take(MIB, 1000))]) == [False]


def test_members_share_one_store_and_the_first_bytes_win(
    master: Master, owner: Owner, store: MooncakeStore, arena: Arena
) -> None:
    other, more = MooncakeStore(master.config()), Arena(4 * MIB)
    other.register(more.memory)
    name, size = key(), 200 * KIB
    assert store.put([(name, arena.write(0, noise(size, 1)))]) == [True]
    assert other.exists([name]) == [True]
    assert other.put([(name, more.write(0, noise(size, 2)))]) == [True]
    assert other.get([(name, more.take(MIB, size))]) == [True]
    assert more.take(MIB, size) == noise(size, 1)
    other.remove([name])
    assert store.get([(name, arena.take(0, size))]) == [False]
    other.close()
    assert store.put([(name, arena.write(0, noise(size, 2)))]) == [True]


def test_a_forked_process_is_kept_out(lender: tuple[MooncakeStore, Arena]) -> None:
    store, _ = lender
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # what happens otherwise is that it hangs
        try:
            store.exists(["k"])
        except StoreUnavailable:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


TRICKLE = """
import signal, sys, threading, time
import millpond.store.mooncake as mooncake
mooncake.ENVIRONMENT.update(MC_TCP_PROGRESS_TIMEOUT_SEC="300", MC_TCP_STATUS_TIMEOUT_SEC="300")
from pathlib import Path
from millpond.store.backend import StoreUnavailable
from tests.store.backends.mooncakes import Master, Owner
size = 96 << 20
master = Master(Path(sys.argv[1])).start()
owner = Owner(master, 4 * size)
store, memory = mooncake.MooncakeStore(master.config()), memoryview(bytearray(b"\\x07" * size))
store.register(memory)
assert store.put([("k", memory)]) == [True]
memory[:] = bytes(size)
threading.Timer(0.05, owner.signal, [signal.SIGSTOP]).start()
begin = time.monotonic()
try:
    raise SystemExit(f"the get gave {store.get([('k', memory)])}")
except StoreUnavailable as error:
    assert not error.memory_in_use and "join again" in str(error), error
assert time.monotonic() - begin < store.bound
memory[:] = bytes(size)
owner.signal(signal.SIGCONT)
time.sleep(3)
assert memory == bytes(size), "written after the call had ended"
owner.kill()
master.kill()
print("ok")
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_transfer_that_the_library_stopped_waiting_for_writes_nothing_later(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", TRICKLE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "ok\n", done.stderr[-3000:]
