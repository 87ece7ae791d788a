"""The real store on loopback. Where it is not installed these fail: a skip would look green."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millpond.store.mooncake import MooncakeStore
from millpond.units import MIB
from tests.store.backends.mooncakes import Master, Owner
from tests.store.contract import Arena, BackendContract


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    master = Master(tmp_path_factory.mktemp("master")).start()
    yield master
    master.kill()


@pytest.fixture(scope="module")
def owner(master: Master) -> Iterator[Owner]:
    owner = Owner(master)
    yield owner
    owner.kill()


@pytest.fixture(scope="module")
def remote(master: Master, owner: Owner) -> Iterator[tuple[MooncakeStore, Arena]]:
    yield from opened(MooncakeStore(master.config()))


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MooncakeStore, Arena]]:
    master = Master(tmp_path_factory.mktemp("alone")).start()
    yield from opened(MooncakeStore(master.config(lend=128 * MIB)))
    master.kill()


def opened(store: MooncakeStore) -> Iterator[tuple[MooncakeStore, Arena]]:
    arena = Arena()
    store.register(arena.memory)
    yield store, arena
    store.close()


class TestRemote(BackendContract):
    """Objects lie in the memory of another process."""

    @pytest.fixture
    def store(self, remote: tuple[MooncakeStore, Arena]) -> MooncakeStore:
        return remote[0]

    @pytest.fixture
    def arena(self, remote: tuple[MooncakeStore, Arena]) -> Arena:
        return remote[1]

    @pytest.fixture
    def fresh(self, master: Master, owner: Owner) -> MooncakeStore:
        return MooncakeStore(master.config())


class TestEmbedded(BackendContract):
    """Objects lie in this process's own memory."""

    @pytest.fixture
    def store(self, embedded: tuple[MooncakeStore, Arena]) -> MooncakeStore:
        return embedded[0]

    @pytest.fixture
    def arena(self, embedded: tuple[MooncakeStore, Arena]) -> Arena:
        return embedded[1]

    @pytest.fixture
    def fresh(self, master: Master) -> MooncakeStore:
        return MooncakeStore(master.config(lend=16 * MIB))
