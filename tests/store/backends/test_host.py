from __future__ import annotations

import threading

import pytest

from millpond.store.host import HostStore
from millpond.units import KIB, MIB
from tests.store.contract import Arena, BackendContract, CappedContract, noise


class TestHost(BackendContract, CappedContract):
    @pytest.fixture
    def store(self) -> HostStore:
        return HostStore(64 * MIB)

    @pytest.fixture
    def small(self) -> HostStore:
        return HostStore(256 * KIB)


def test_a_get_under_way_keeps_its_bytes_though_the_object_is_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, arena = HostStore(100 * KIB), Arena(MIB)
    store.put([("old", arena.write(0, noise(64 * KIB, 1)))])
    import millpond.store.host as host

    real = host.copy
    replaced = threading.Event()

    def slowly(into: memoryview, source: memoryview) -> None:
        if not replaced.is_set():
            replaced.set()
            store.put([("new", arena.write(256 * KIB, noise(64 * KIB, 2)))])
        real(into, source)

    monkeypatch.setattr(host, "copy", slowly)
    assert store.get([("old", arena.take(512 * KIB, 64 * KIB))]) == [True]
    assert arena.take(512 * KIB, 64 * KIB) == noise(64 * KIB, 1)
    assert store.exists(["old", "new"]) == [False, True]


def test_memory_of_an_evicted_object_serves_the_next_of_its_size() -> None:
    store, arena = HostStore(100 * KIB), Arena(MIB)
    store.put([("a", arena.write(0, noise(64 * KIB, 1)))])
    before = store._objects["a"].data
    store.put([("b", arena.write(0, noise(64 * KIB, 2)))])
    assert store._objects["b"].data is before
    assert store.get([("b", arena.take(0, 64 * KIB))]) == [True]
    assert arena.take(0, 64 * KIB) == noise(64 * KIB, 2)
