"""What every backend must do, whatever it is made of: subclass, and give it a way to be opened."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator

import pytest

from millpond.store.backend import Backend, StoreUnavailable
from millpond.units import KIB, MIB

_names = itertools.count()


def noise(size: int, seed: int) -> bytes:
    """Bytes that no other seed gives."""
    return random.Random(seed).randbytes(size)


def key(name: str = "object") -> str:
    """A key nobody used."""
    return f"0a1b2c/{name}-{next(_names)}"


class Arena:
    """Memory as an engine has it: one long-lived range, of which views are handed out."""

    def __init__(self, size: int = 24 * MIB) -> None:
        self.bytes = bytearray(size)
        self.memory = memoryview(self.bytes)

    def take(self, at: int, size: int) -> memoryview:
        return self.memory[at : at + size]

    def write(self, at: int, data: bytes) -> memoryview:
        view = self.take(at, len(data))
        view[:] = data
        return view


class BackendContract:
    """The tests. A subclass gives a fixture `store`, open and empty, of at least 64 MiB.

    Where opening is slow, it may share one store and its arena, and give a `fresh` one to close.
    """

    @pytest.fixture
    def arena(self, store: Backend) -> Iterator[Arena]:
        arena = Arena()
        store.register(arena.memory)
        yield arena
        store.close()  # while the memory is still there

    @pytest.fixture
    def fresh(self, store: Backend) -> Backend:
        return store

    @pytest.mark.parametrize("size", [1, 63, 4096, 64 * KIB + 1, 9 * MIB + 5])
    def test_bytes_come_back_and_nothing_beside_them_is_touched(
        self, store: Backend, arena: Arena, size: int
    ) -> None:
        name, data = key(), noise(size, size)
        assert store.exists([name]) == [False]
        assert store.put([(name, arena.write(100, data))]) == [True]
        assert store.exists([name]) == [True]
        at = 12 * MIB + 3
        arena.take(at - 8, size + 16)[:] = b"\xee" * (size + 16)
        assert store.get([(name, arena.take(at, size))]) == [True]
        assert arena.take(at, size) == data
        assert arena.take(at - 8, 8) == arena.take(at + size, 8) == b"\xee" * 8

    def test_bytes_outside_the_registered_memory_may_be_put_and_got(
        self, store: Backend, arena: Arena
    ) -> None:
        name, into = key("manifest"), bytearray(300)
        assert store.put([(name, memoryview(b"m" * 300))]) == [True]  # read-only, too
        assert store.get([(name, memoryview(into))]) == [True]
        assert into == b"m" * 300

    def test_what_was_changed_after_a_put_is_not_what_was_put(
        self, store: Backend, arena: Arena
    ) -> None:
        name, view = key(), arena.write(0, b"a" * 4096)
        assert store.put([(name, view)]) == [True]
        view[:] = b"b" * 4096
        assert store.get([(name, view)]) == [True]
        assert view == b"a" * 4096

    def test_an_absent_key_is_a_miss_and_the_others_of_the_batch_are_not(
        self, store: Backend, arena: Arena
    ) -> None:
        names = [key() for _ in range(5)]
        views = [arena.write(i * 4096, noise(4096, i)) for i in range(5)]
        assert store.put(list(zip(names[::2], views[::2], strict=True))) == [True] * 3
        assert store.exists(names) == [True, False, True, False, True]
        into = [arena.take(MIB + i * 4096, 4096) for i in range(5)]
        assert store.get(list(zip(names, into, strict=True))) == [True, False, True, False, True]
        assert [bytes(v) for v in into[::2]] == [bytes(v) for v in views[::2]]

    @pytest.mark.parametrize("asked", [1, 999, 1001, 5000])
    def test_an_object_of_another_length_is_a_miss(
        self, store: Backend, arena: Arena, asked: int
    ) -> None:
        name = key()
        assert store.put([(name, arena.write(0, noise(1000, 1)))]) == [True]
        assert store.get([(name, arena.take(MIB, asked))]) == [False]
        assert store.get([(name, arena.take(MIB, 1000))]) == [True]  # and it is kept

    def test_a_key_keeps_its_first_bytes(self, store: Backend, arena: Arena) -> None:
        name, first, second = key(), noise(4096, 1), noise(4096, 2)
        assert store.put([(name, arena.write(0, first))]) == [True]
        assert store.put([(name, arena.write(0, second))]) == [True]
        assert store.get([(name, arena.take(0, 4096))]) == [True]
        assert arena.take(0, 4096) == first

    def test_a_removed_key_is_gone_and_may_be_put_again(self, store: Backend, arena: Arena) -> None:
        name = key()
        store.put([(name, arena.write(0, noise(4096, 1)))])
        store.remove([name, key("never put")])
        assert store.exists([name]) == [False]
        assert store.get([(name, arena.take(0, 4096))]) == [False]
        assert store.put([(name, arena.write(0, noise(4096, 2)))]) == [True]
        assert store.get([(name, arena.take(MIB, 4096))]) == [True]
        assert arena.take(MIB, 4096) == noise(4096, 2)

    def test_a_record_of_many_pages_is_one_call(self, store: Backend, arena: Arena) -> None:
        names = [key() for _ in range(1500)]
        data = noise(1500 * 2048, 7)
        whole = arena.write(0, data)
        parts = [whole[i * 2048 : (i + 1) * 2048] for i in range(1500)]
        assert all(store.put(list(zip(names, parts, strict=True))))
        assert all(store.exists(names))
        into = arena.take(8 * MIB, len(data))
        parts = [into[i * 2048 : (i + 1) * 2048] for i in range(1500)]
        assert all(store.get(list(zip(names, parts, strict=True))))
        assert into == data

    def test_empty_batches_are_nothing(self, store: Backend, arena: Arena) -> None:
        assert store.put([]) == store.get([]) == store.exists([]) == []
        store.remove([])

    def test_keys_may_hold_any_text(self, store: Backend, arena: Arena) -> None:
        names = ["../../x", "a b@c:d|é/" + "k" * 900, "ns/../ns"]
        for i, name in enumerate(names):
            assert store.put([(name, arena.write(0, noise(64, i)))]) == [True]
        for i, name in enumerate(names):
            assert store.get([(name, arena.take(0, 64))]) == [True]
            assert arena.take(0, 64) == noise(64, i)

    def test_threads_see_whole_objects_only(self, store: Backend, arena: Arena) -> None:
        size, rounds = 32 * KIB, 25
        shared = [key() for _ in range(6)]
        allowed = {bytes([t + 1]) * size for t in range(4)}
        wrong: list[str] = []

        def work(thread: int) -> None:
            dice = random.Random(thread)
            mine = arena.write(thread * MIB, bytes([thread + 1]) * size)
            into = arena.take(8 * MIB + thread * MIB, size)
            for _ in range(rounds):
                name = dice.choice(shared)
                verb = dice.choice(("put", "get", "get", "remove", "exists"))
                if verb == "put":
                    store.put([(name, mine)])
                elif verb == "remove":
                    store.remove([name])
                elif verb == "exists":
                    store.exists([name])
                elif store.get([(name, into)])[0] and bytes(into) not in allowed:
                    wrong.append(name)

        threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert wrong == []

    def test_everything_is_refused_after_close_and_closing_twice_is_fine(
        self, fresh: Backend
    ) -> None:
        store, arena = fresh, Arena(4096)
        store.register(arena.memory)
        view = arena.take(0, 64)
        store.close()
        store.close()
        for call in (
            lambda: store.put([("k", view)]),
            lambda: store.get([("k", view)]),
            lambda: store.exists(["k"]),
            lambda: store.remove(["k"]),
            lambda: store.register(memoryview(bytearray(64))),
        ):
            with pytest.raises(StoreUnavailable):
                call()
        store.stats()

    def test_it_says_what_it_is(self, store: Backend, arena: Arena) -> None:
        assert store.name
        assert store.bound > 0
        store.put([(key(), arena.take(0, 1000))])
        held = store.stats().bytes_held
        assert held is None or held >= 1000


class CappedContract:
    """For stores with a capacity of their own; a fixture `small` holds 256 KiB."""

    def test_a_full_store_drops_what_was_used_longest_ago(self, small: Backend) -> None:
        arena = Arena(MIB)
        small.register(arena.memory)
        names = [key() for _ in range(8)]
        for i, name in enumerate(names):  # 8 x 40 KiB into 256
            assert small.put([(name, arena.write(0, noise(40 * KIB, i)))]) == [True]
            assert small.get([(names[0], arena.take(0, 40 * KIB))]) == [True]
        assert small.exists(names[-1:] + names[:2]) == [True, True, False]
        stats = small.stats()
        assert stats.evicted > 0
        assert stats.bytes_held <= stats.capacity == 256 * KIB
        small.close()

    def test_what_can_never_fit_is_refused_and_pushes_nothing_out(self, small: Backend) -> None:
        arena = Arena(MIB)
        small.register(arena.memory)
        name = key()
        assert small.put([(name, arena.take(0, 4096))]) == [True]
        assert small.put([(key(), arena.take(0, 257 * KIB))]) == [False]
        assert small.exists([name]) == [True]
        assert small.stats().refused == 1
        small.close()

    def test_an_object_evicted_after_the_lookup_is_a_miss(self, small: Backend) -> None:
        arena = Arena(MIB)
        small.register(arena.memory)
        name = key()
        small.put([(name, arena.take(0, 40 * KIB))])
        assert small.exists([name]) == [True]
        for i in range(8):
            small.put([(key(), arena.write(0, noise(40 * KIB, i)))])
        assert small.get([(name, arena.take(0, 40 * KIB))]) == [False]
        small.close()
