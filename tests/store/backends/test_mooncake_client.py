"""How the client library is used, shown by one that only notes what it is asked."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import millpond.store.mooncake as mooncake
import millpond.store.parts as parts
from millpond.errors import Broken, Refused
from millpond.store.backend import StoreUnavailable
from millpond.store.config import MooncakeConfig
from millpond.store.mooncake import MooncakeStore
from millpond.units import KIB, MIB
from tests.store.contract import Arena


class Client:
    """Answers `code` to everything; a transfer of "stuck" waits for `gate`."""

    made: list[Client] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.code, self.gate, self.inside = 0, threading.Event(), threading.Event()
        self.gate.set()
        self.calls: list[tuple[str, Any]] = []
        self.registered: set[int] = set()
        self.closed = False
        Client.made.append(self)

    def setup(self, *given: object, **more: object) -> int:
        self.calls.append(("setup", (given, more)))
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        self.registered.add(address)
        return 0

    def unregister_buffer(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    def batch_put_from_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]], how: object
    ) -> list[int]:
        assert not self.closed
        self.calls.append(("put", (keys, pointers, sizes)))
        self.inside.set()
        assert keys[0] != "stuck" or self.gate.wait(20)
        return [self.code] * len(keys)

    def batch_get_into_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        return self.batch_put_from_multi_buffers(keys, pointers, sizes, None)

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        assert not self.closed
        self.calls.append(("exists", keys))
        return [self.code] * len(keys)

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        return self.batch_is_exist(keys)

    def close(self) -> int:
        assert not self.registered
        self.closed = True
        return 0


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeConfig]:
    Client.made = []
    library = SimpleNamespace(MooncakeDistributedStore=Client, ReplicateConfig=object)
    monkeypatch.setattr(mooncake, "_load", lambda: library)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as master:
        address = f"127.0.0.1:{master.getsockname()[1]}"
        yield MooncakeConfig(master_server_address=address, global_segment_size="64mb")


def started(call: Any) -> tuple[threading.Thread, list[object]]:
    """A thread in the call, and what it gave."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(call())
        except StoreUnavailable as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_without_the_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(mooncake.importlib, "import_module", absent)
    with pytest.raises(Refused, match=r"millpond\[mooncake\].*libibverbs1"):
        MooncakeStore(MooncakeConfig(master_server_address="127.0.0.1:1"))


def test_it_joins_as_the_configuration_says(config: MooncakeConfig) -> None:
    MooncakeStore(config.model_copy(update={"tenant_id": "t", "protocol": "tcp"}))
    (_, (given, more)), *_ = Client.made[0].calls
    assert given == (
        *("127.0.0.1", "P2PHANDSHAKE", 64 * MIB, 4096 * MIB, "tcp", ""),
        config.master_server_address,
    )
    assert more == {"tenant_id": "t"}


def test_a_call_has_few_pieces_and_large_objects_stay_where_they_are(
    config: MooncakeConfig,
) -> None:
    store, arena = MooncakeStore(config), Arena()
    store.register(arena.memory)
    large, small = 100 * KIB, 1000
    items = [(f"l{i}", arena.take(i * large, large)) for i in range(40)]
    items += [(f"s{i}", arena.take(8 * MIB + i * small, small)) for i in range(100)]
    assert all(store.put(items))
    calls = [given for verb, given in Client.made[0].calls if verb == "put"]
    assert [k for keys, _, _ in calls for k in keys] == [k for k, _ in items]
    assert max(sum(map(len, pointers)) for _, pointers, _ in calls) == parts.PIECES
    start = parts.octets(arena.memory).ctypes.data
    for keys, pointers, sizes in calls:
        for name, where, size in zip(keys, pointers, sizes, strict=True):
            if name.startswith("l"):
                assert where[0] == start + int(name[1:]) * large
                assert size == [large, parts.SEAL.size]
            else:
                assert size == [small + parts.SEAL.size]


def test_much_memory_that_was_never_registered_is_a_mistake(config: MooncakeConfig) -> None:
    store = MooncakeStore(config)
    with pytest.raises(Broken, match="never registered"):
        store.put([("k", memoryview(bytearray(3 * MIB)))])
    assert store.put([("k", memoryview(bytearray(1 * MIB)))]) == [True]


def test_memory_is_registered_once(config: MooncakeConfig) -> None:
    store, arena = MooncakeStore(config), Arena(MIB)
    store.register(arena.take(1000, 1000))
    for at, size in ((1500, 10), (900, 200), (0, 5000), (1999, 1)):
        with pytest.raises(Broken, match="twice"):
            store.register(arena.take(at, size))
    store.register(arena.take(0, 1000))
    store.register(arena.take(2000, 1000))


def test_no_room_is_a_refusal_and_an_unfinished_put_a_miss(config: MooncakeConfig) -> None:
    store = MooncakeStore(config)
    view = memoryview(bytearray(100))
    for code in (-200, -600, -703, -704, -706, -707, -800):
        Client.made[0].code = code
        assert store.put([("k", view)]) == [False]
        assert store.get([("k", view)]) == [False]
        assert store.exists(["k"]) == [False]
    assert store.stats().refused == 1


@pytest.mark.parametrize("code", [-900, -901])
def test_a_master_that_does_not_answer_is_an_outage(config: MooncakeConfig, code: int) -> None:
    store = MooncakeStore(config)
    Client.made[0].code = code
    with pytest.raises(StoreUnavailable):
        store.exists(["k"])
    with pytest.raises(StoreUnavailable):
        store.put([("k", memoryview(bytearray(100)))])
    Client.made[0].code = 0
    assert store.put([("k", memoryview(bytearray(100)))]) == [True]


def test_nothing_more_is_sent_to_a_store_that_failed_a_batch(
    config: MooncakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "STALL", -1.0)
    store = MooncakeStore(config)
    Client.made[0].code = -800
    with pytest.raises(StoreUnavailable, match="hangs"):
        store.put([(f"k{i}", memoryview(bytearray(100))) for i in range(50)])
    assert len([1 for verb, _ in Client.made[0].calls if verb == "put"]) == 1


def test_close_waits_for_those_inside(config: MooncakeConfig) -> None:
    store = MooncakeStore(config)
    client = Client.made[0]
    client.gate.clear()
    caller, found = started(lambda: store.put([("stuck", memoryview(bytearray(100)))]))
    assert client.inside.wait(10)
    closer, _ = started(store.close)
    closer.join(0.2)
    assert closer.is_alive()
    assert not client.closed
    client.gate.set()
    closer.join(10)
    caller.join(10)
    assert found == [[True]]
    assert client.closed


def test_a_client_that_never_returns_is_left_open(config: MooncakeConfig) -> None:
    store = MooncakeStore(config)
    store.bound = 0.2
    client = Client.made[0]
    client.gate.clear()
    caller, found = started(lambda: store.put([("stuck", memoryview(bytearray(100)))]))
    assert client.inside.wait(10)
    store.close()
    assert not client.closed
    assert client in mooncake._abandoned
    client.gate.set()
    caller.join(10)
    assert found == [[True]]


def test_leaving_waits_for_the_other_call_and_the_next_call_joins_again(
    config: MooncakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, arena = MooncakeStore(config), Arena(MIB)
    store.register(arena.memory)
    client = Client.made[0]
    client.gate.clear()
    other, found = started(lambda: store.put([("stuck", arena.take(0, 100))]))
    assert client.inside.wait(10)
    monkeypatch.setattr(mooncake, "GIVEN_UP", -1.0)
    client.code = -800
    leaver, left = started(lambda: store.get([("k", arena.take(0, 100))]))
    leaver.join(0.2)
    assert leaver.is_alive()
    assert not client.closed
    client.gate.set()
    leaver.join(10)
    other.join(10)
    assert client.closed
    for outcome in (*found, *left):
        assert isinstance(outcome, StoreUnavailable)
        assert not outcome.memory_in_use
    assert store.put([("k", arena.take(0, 100))]) == [True]
    assert len(Client.made) == 2
    assert Client.made[1].registered >= {parts.octets(arena.memory).ctypes.data}


def test_memory_is_said_to_be_in_use_if_leaving_was_impossible(
    config: MooncakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, client = MooncakeStore(config), Client.made[0]
    client.gate.clear()
    other, _ = started(lambda: store.put([("stuck", memoryview(bytearray(100)))]))
    assert client.inside.wait(10)
    monkeypatch.setattr(mooncake, "GIVEN_UP", -1.0)
    store.bound, client.code = 0.2, -800
    with pytest.raises(StoreUnavailable) as caught:
        store.get([("k", memoryview(bytearray(100)))])
    assert caught.value.memory_in_use
    assert not client.closed
    client.gate.set()
    other.join(10)
    store.close()  # nobody is inside any more: now its memory is free
    assert client.closed
