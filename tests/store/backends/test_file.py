from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pytest

import millpond.store.file as file
from millpond.errors import Refused
from millpond.store.backend import StoreUnavailable
from millpond.store.file import MARK, STALE, FileStore
from millpond.units import KIB, MIB
from tests.store.contract import BackendContract, CappedContract, noise


class TestFile(BackendContract, CappedContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> FileStore:
        return FileStore(tmp_path / "store", 64 * MIB)

    @pytest.fixture
    def small(self, tmp_path: Path) -> FileStore:
        return FileStore(tmp_path / "small", 256 * KIB)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def objects(root: Path) -> list[Path]:
    return [p for p in root.rglob("*") if p.is_file() and p.name != MARK]


def filled(root: Path, names: int = 1, size: int = 5000, capacity: int = MIB) -> FileStore:
    store = FileStore(root, capacity)
    for i in range(names):
        assert store.put([(f"k{i}", memoryview(noise(size, i)))]) == [True]
    return store


def read(store: FileStore, key: str, size: int = 5000) -> bytes | None:
    into = bytearray(size)
    return bytes(into) if store.get([(key, memoryview(into))])[0] else None


def test_objects_survive_a_restart_which_says_what_it_found(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(root, 3).close()
    caplog.set_level(logging.INFO, "millpond.store")
    again = FileStore(root, MIB)
    assert [read(again, f"k{i}") for i in range(3)] == [noise(5000, i) for i in range(3)]
    lines = [r.message for r in caplog.records]
    assert len(lines) == 1
    assert "3 objects" in lines[0]


def test_a_smaller_capacity_at_restart_drops_the_oldest(root: Path) -> None:
    store = filled(root, 10)
    for i, path in enumerate(store._path(f"k{i}") for i in range(10)):
        os.utime(path, (1000 + i, 1000 + i))
    again = FileStore(root, 30 * KIB)
    assert again.stats().bytes_held <= 30 * KIB
    found = again.exists([f"k{i}" for i in range(10)])
    assert found == sorted(found)
    assert found[9]
    assert not found[0]


@pytest.mark.parametrize("where", [0, 9, 13, 20, 24, 25, 26, 100, -1])
def test_no_bit_of_a_file_may_change(root: Path, where: int) -> None:
    store = filled(root)
    (path,) = objects(root)
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    assert read(store, "k0") is None
    assert store.exists(["k0"]) == [False]  # and the next put is not fooled by it
    assert store.put([("k0", memoryview(noise(5000, 0)))]) == [True]
    assert read(store, "k0") == noise(5000, 0)
    assert store.stats().corrupt == 1


@pytest.mark.parametrize("left", [0, 10, 24, 26, 3000, 5025])
def test_a_truncated_file_is_a_miss_and_deleted(root: Path, left: int) -> None:
    store = filled(root)
    (path,) = objects(root)
    os.truncate(path, left)
    assert read(store, "k0") is None
    assert objects(root) == []


def test_a_file_under_the_name_of_another_is_a_miss(root: Path) -> None:
    store = filled(root, 2)
    shutil.copy(store._path("k0"), store._path("k1"))
    assert read(store, "k1") is None
    assert read(store, "k0") == noise(5000, 0)


def test_a_pipe_in_place_of_a_file_blocks_nobody(root: Path) -> None:
    store = filled(root)
    (path,) = objects(root)
    path.unlink()
    os.mkfifo(path)
    assert read(store, "k0") is None


def test_a_writer_that_dies_leaves_nothing_that_can_be_found(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Death(BaseException):
        pass

    def die(*_: object) -> None:
        raise Death

    store = filled(root)
    monkeypatch.setattr(file.os, "fsync", die)
    monkeypatch.setattr(file.Path, "unlink", lambda *_: None)
    with pytest.raises(Death):
        store.put([("half", memoryview(noise(5000, 9)))])
    monkeypatch.undo()
    assert store.exists(["half"]) == [False]
    (partial,) = [p for p in objects(root) if p.name.startswith(".")]
    again = FileStore(root, MIB)
    assert partial.exists()  # its writer may be alive
    assert again.stats().objects == 1
    old = time.time() - STALE - 1
    os.utime(partial, (old, old))
    FileStore(root, MIB)
    assert not partial.exists()


def test_a_file_has_its_name_only_once_it_is_whole(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, seen = filled(root), []
    real = os.rename

    def watched(source: Path, target: Path) -> None:
        assert not target.exists()
        assert source.parent == target.parent  # a rename within one file system
        seen.append(source.read_bytes())
        real(source, target)

    monkeypatch.setattr(file.os, "rename", watched)
    assert store.put([("k", memoryview(noise(5000, 9)))]) == [True]
    assert seen == [store._path("k").read_bytes()]
    assert seen[0].endswith(noise(5000, 9))


def test_a_full_disk_refuses_and_makes_room_for_the_next(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(root, 4)
    real = os.pwrite

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file.os, "pwrite", full)
    assert store.put([("new", memoryview(noise(5000, 9)))]) == [False]
    monkeypatch.setattr(file.os, "pwrite", real)
    assert not any(p.name.startswith(".") for p in objects(root))
    assert store.stats().refused == 1
    assert store.stats().evicted >= 1
    assert store.put([("new", memoryview(noise(5000, 9)))]) == [True]


def test_a_slow_disk_is_given_up_in_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, each would be 50 slices; after six the bound has passed, on a busy machine sooner."""
    store = filled(root, size=50_000)
    store.bound = 0.05
    slices: list[str] = []
    monkeypatch.setattr(file, "SLICE", 1000)
    real_write, real_read = os.pwrite, os.preadv

    def slow_write(*given: object) -> int:
        slices.append("written")
        time.sleep(0.01)
        return real_write(*given)

    def slow_read(*given: object) -> int:
        slices.append("read")
        time.sleep(0.01)
        return real_read(*given)

    monkeypatch.setattr(file.os, "pwrite", slow_write)
    monkeypatch.setattr(file.os, "preadv", slow_read)
    with pytest.raises(StoreUnavailable, match="took more than"):
        store.put([("slow", memoryview(noise(50_000, 9)))])
    with pytest.raises(StoreUnavailable, match="took more than"):
        read(store, "k0", 50_000)
    assert 0 < slices.count("written") < 10
    assert 0 < slices.count("read") < 10
    monkeypatch.undo()
    store.bound = 30
    assert read(store, "k0", 50_000) == noise(50_000, 0)
    assert store.exists(["slow"]) == [False]
    assert len(objects(root)) == 1


def test_a_directory_that_goes_away_is_an_outage_and_comes_back(root: Path) -> None:
    store = filled(root)
    away = root.with_name("away")
    root.rename(away)
    root.mkdir()  # an empty mount point
    for call in (
        lambda: store.put([("x", memoryview(b"x"))]),
        lambda: read(store, "k0"),
        lambda: store.exists(["k0"]),
    ):
        with pytest.raises(StoreUnavailable):
            call()
    assert list(root.iterdir()) == []
    root.rmdir()
    away.rename(root)
    assert read(store, "k0") == noise(5000, 0)
    assert store.put([("x", memoryview(b"x"))]) == [True]


def test_it_goes_away_in_mid_put_and_in_mid_get(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(root)
    monkeypatch.setattr(file.os, "fsync", lambda _: shutil.rmtree(root))
    with pytest.raises(StoreUnavailable):
        store.put([("x", memoryview(b"x" * 100))])
    monkeypatch.undo()
    store = filled(root)
    real = os.pread

    def gone(*given: object) -> bytes:
        shutil.rmtree(root)
        return real(*given)

    monkeypatch.setattr(file.os, "pread", gone)
    assert read(store, "k0") == noise(5000, 0)  # an open file stays whole
    monkeypatch.undo()

    def stale(*_: object) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    shutil.rmtree(root, ignore_errors=True)
    store = filled(root)
    monkeypatch.setattr(file.os, "preadv", stale)
    with pytest.raises(StoreUnavailable):
        read(store, "k0")
    assert len(objects(root)) == 1  # a lost server is no damaged file


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("do not delete")
    with pytest.raises(Refused, match="neither empty nor a store"):
        FileStore(tmp_path, MIB)


def test_a_directory_of_another_version_is_refused(root: Path) -> None:
    filled(root)
    (root / MARK).write_text("2\n")
    with pytest.raises(Refused, match="another version"):
        FileStore(root, MIB)


def test_a_directory_that_cannot_be_made_is_unavailable() -> None:
    with pytest.raises(StoreUnavailable):
        FileStore("/proc/none/such", MIB)


def _engine(root: Path, seed: int, capacity: int, wrong: multiprocessing.Queue) -> None:
    """One of several processes: puts and gets until it has done enough."""
    store, bad = FileStore(root, capacity), 0
    for i in range(60):
        n = (i * 7 + seed * 3) % 40
        store.put([(f"k{n}", memoryview(noise(9000, n)))])
        m = (i * 11 + seed) % 40
        found = read(store, f"k{m}", 9000)
        bad += found not in (None, noise(9000, m))
    wrong.put((bad, store.stats().corrupt, store.stats().evicted))


def test_engines_that_share_a_directory_see_whole_objects_and_keep_to_the_capacity(
    root: Path,
) -> None:
    capacity = 150 * KIB  # of 40 x 9000 bytes
    spawn = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue = spawn.Queue()
    engines = [
        spawn.Process(target=_engine, args=(root, seed, capacity, results)) for seed in range(2)
    ]
    for e in engines:
        e.start()
    found = [results.get(timeout=60) for _ in engines]
    for e in engines:
        e.join()
    assert [f[:2] for f in found] == [(0, 0)] * 2
    assert sum(f[2] for f in found) > 0
    assert sum(p.stat().st_size for p in objects(root)) <= capacity * (1 + 2 / 16)
    first, second = FileStore(root, MIB), FileStore(root, MIB)
    assert first.put([("shared", memoryview(noise(5000, 77)))]) == [True]
    assert second.exists(["shared"]) == [True]
    assert read(second, "shared") == noise(5000, 77)
    second.remove(["shared"])
    assert read(first, "shared") is None
