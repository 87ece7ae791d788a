"""A store in a directory, which outlives the process; knows files, and no other machine.

Each object is one file, written under another name, synced and renamed: a reader sees all of it
or none. Its head carries the key, the length and a checksum of the bytes, and is written last.
Several engines may share the directory. There is no lock and no index file: what is there is what
a scan finds, and the time of last use is the file's own.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from millpond.errors import Refused
from millpond.store.backend import BackendStats, Item, StoreUnavailable
from millpond.telemetry import logger
from millpond.units import MIB, human

MARK = "millpond-store"
LAYOUT = b"1\n"
HEAD = struct.Struct("<8sIIQ")  # magic, checksum, bytes of the key, bytes of the payload
MAGIC = b"MPOBJ\x00\x01\n"
SLICE = 4 * MIB  # bytes between two looks at the clock
GROUP = 64  # files that are written before they are synced together
SYNCS = 8  # of them at once: file systems merge what waits at the same time
STALE = 600.0  # seconds after which a half-written file has no writer any more
FULL = (errno.ENOSPC, errno.EDQUOT)
LOST = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EACCES, errno.EROFS, errno.ENODEV)

log = logger("store")


@dataclass(slots=True)
class _Partial:
    """A file that has its bytes and not yet its name."""

    path: Path
    temporary: Path
    size: int
    file: int = -1
    error: OSError | None = None


class FileStore:
    """A directory of at most `capacity` bytes, files included; what was used longest ago goes.

    Engines that share it each count what they write and scan again before they delete, and after
    every sixteenth of the capacity: together they may exceed it by that much each. `bound` is
    looked at after every 4 MiB; a disk that does not return from one of these cannot be
    interrupted.
    """

    name = "file"
    seals = True

    def __init__(self, directory: str | Path, capacity: int, *, bound: float = 30.0) -> None:
        self.root = Path(directory)
        self.capacity = capacity
        self.bound = bound
        self._lock = threading.Lock()
        self._scanning = threading.Lock()
        self._syncs = ThreadPoolExecutor(SYNCS, "millpond-sync")
        self._open = True
        self._refused = self._evicted = self._corrupt = 0
        self._claim()
        begin = time.perf_counter()
        self._objects = self._held = self._since_scan = 0
        self._writing = 0  # bytes that puts under way may still take
        self._scan(sweep=True)
        if self._held > capacity:
            self._free(capacity)
        log.info(
            "file store %s: %d objects, %s of %s, scanned in %.2f s",
            *(self.root, self._objects, human(self._held), human(capacity)),
            time.perf_counter() - begin,
        )

    def __repr__(self) -> str:
        return f"directory {self.root}, {human(self.capacity)}"

    def register(self, memory: memoryview) -> None:
        """Nothing to do."""
        self._begin()

    def put(self, items: Sequence[Item]) -> list[bool]:
        """Write each to a file of its own."""
        end, done = self._begin(), list[bool]()
        for at in range(0, len(items), GROUP):
            done += self._put_group(items[at : at + GROUP], end)
        return done

    def get(self, items: Sequence[Item]) -> list[bool]:
        """Read each into its view; a damaged file is deleted."""
        end = self._begin()
        return [self._get(key, view, end) for key, view in items]

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which have a file."""
        self._begin()
        found = [self._path(key).is_file() for key in keys]
        if not any(found):
            self._still_there()
        return found

    def remove(self, keys: Sequence[str]) -> None:
        """Delete their files."""
        self._begin()
        for key in keys:
            self._delete(self._path(key))

    def stats(self) -> BackendStats:
        """As of the last scan, and what this engine did since."""
        with self._lock:
            return BackendStats(
                objects=self._objects,
                bytes_held=self._held,
                capacity=self.capacity,
                refused=self._refused,
                evicted=self._evicted,
                corrupt=self._corrupt,
            )

    def close(self) -> None:
        """No file is open between calls."""
        self._open = False
        self._syncs.shutdown(wait=False)

    # -- the directory

    def _claim(self) -> None:
        """Make the directory ours, or see that it is. `Refused` if it holds something else."""
        mark = self.root / MARK
        try:
            self.root.mkdir(0o700, parents=True, exist_ok=True)
            if not mark.exists():
                others = {p.name for p in self.root.iterdir()} - {MARK, "lost+found"}
                if any(not name.startswith(".") for name in others):
                    raise Refused(f"{self.root} is neither empty nor a store of millpond")
                mark.write_bytes(LAYOUT)
            found = mark.read_bytes()
            probe = self.root / _temporary()
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise self._lost(error) from error
        if found not in (LAYOUT, b""):  # empty: another engine is just making it
            raise Refused(f"{self.root} was written by another version of millpond: {found!r}")

    def _still_there(self) -> None:
        """Tell a directory that is gone, or no longer mounted, from one that lacks an object."""
        if not (self.root / MARK).is_file():
            raise StoreUnavailable(f"the file store {self.root} is gone")

    def _path(self, key: str) -> Path:
        digest = hashlib.sha256(key.encode()).hexdigest()
        return self.root / digest[:2] / digest[2:]

    def _files(self) -> Iterator[os.DirEntry[str]]:
        try:
            folders = [f.path for f in os.scandir(self.root) if len(f.name) == 2]
        except OSError as error:
            raise self._lost(error) from error
        for folder in folders:
            with contextlib.suppress(OSError):  # made and emptied by others meanwhile
                yield from os.scandir(folder)

    def _scan(self, *, sweep: bool = False) -> list[tuple[float, int, str]]:
        """(last use, bytes, path) of every object; with `sweep`, delete what writers left."""
        found, now = [], time.time()
        for entry in self._files():
            with contextlib.suppress(OSError):
                info = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(info.st_mode):
                    continue
                if entry.name.startswith("."):
                    if sweep and now - info.st_mtime > STALE:
                        os.unlink(entry.path)
                    continue
                found.append((info.st_mtime, info.st_size, entry.path))
        with self._lock:
            self._objects, self._held = len(found), sum(size for _, size, _ in found)
            self._since_scan = 0
        return found

    def _reserve(self, coming: int) -> bool:
        """Make room for a file of `coming` bytes; False if that cannot be."""
        if coming > self.capacity:
            return False
        scan = False
        while True:
            with self._lock:
                room = self.capacity - self._writing - coming
                if self._held <= room and (scan or self._since_scan < self.capacity // 16):
                    self._writing += coming
                    return True
            if scan:
                return False
            self._free(room)
            scan = True

    def _free(self, room: int) -> None:
        """Scan, and delete what was used longest ago until no more than `room` bytes are held."""
        with self._scanning:
            files = self._scan()
            if self._held <= room:
                return
            room -= self.capacity // 32  # so that not every put has to scan
            for _, size, path in sorted(files):
                if self._held <= max(0, room):
                    break
                self._delete(Path(path), size, evicted=1)

    def _delete(self, path: Path, size: int | None = None, *, evicted: int = 0) -> None:
        try:
            size = path.stat().st_size if size is None else size
            path.unlink()
        except FileNotFoundError:
            evicted = 0  # another engine was first; its bytes are gone all the same
            if size is None:
                return
        except OSError as error:
            raise self._lost(error) from error
        with self._lock:
            self._objects -= 1
            self._held -= size or 0
            self._evicted += evicted

    # -- one object

    def _begin(self) -> float:
        if not self._open:
            raise StoreUnavailable("the file store is closed")
        return time.monotonic() + self.bound

    def _in_time(self, end: float) -> None:
        if time.monotonic() > end:
            raise StoreUnavailable(f"the file store {self.root} took more than {self.bound:g} s")

    def _put_group(self, items: Sequence[Item], end: float) -> list[bool]:
        """Write all, sync all, then give each its name."""
        group: dict[Path, _Partial] = {}
        done = []
        try:
            for key, view in items:
                done.append(self._prepare(key, view, end, group))
            written = [p for p in group.values() if p.error is None]
            syncs = [self._syncs.submit(os.fsync, p.file) for p in written]
            late = wait(syncs, max(0.0, end - time.monotonic())).not_done
            for partial, sync in zip(written, syncs, strict=True):
                try:
                    if sync not in late:
                        sync.result()
                        os.rename(partial.temporary, partial.path)
                        self._written(partial)
                except OSError as error:
                    partial.error = error
            if late:
                self._in_time(0)
        finally:
            for partial in group.values():
                self._settle(partial)
        failed = {p.path: p.error for p in group.values() if p.error is not None}
        for failure in failed.values():
            if failure.errno not in FULL:
                raise self._lost(failure) from failure
        if failed:  # the disk is smaller than the capacity, or others fill it: room for the next
            self._free(self._held - sum(group[path].size for path in failed))
        return [
            ok and self._path(key) not in failed for ok, (key, _) in zip(done, items, strict=True)
        ]

    def _prepare(self, key: str, view: memoryview, end: float, group: dict[Path, _Partial]) -> bool:
        """Write one to a file without a name. True unless there is no room for it."""
        path, name = self._path(key), key.encode()
        if path in group:
            return True
        with contextlib.suppress(OSError):
            os.utime(path)
            return True
        self._still_there()
        size = HEAD.size + len(name) + view.nbytes
        if not self._reserve(size):
            with self._lock:
                self._refused += 1
            return False
        partial = group[path] = _Partial(path, path.parent / _temporary(), size)
        try:
            path.parent.mkdir(0o700, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            partial.file = os.open(partial.temporary, flags, 0o600)
            self._write(partial.file, name, view, end)
        except OSError as error:
            partial.error = error
        return True

    def _written(self, partial: _Partial) -> None:
        with self._lock:
            self._objects += 1
            self._held += partial.size
            self._since_scan += partial.size

    def _settle(self, partial: _Partial) -> None:
        """Leave nothing of a file that may not have got its name."""
        with contextlib.suppress(OSError):
            os.close(partial.file)
            partial.temporary.unlink()
        with self._lock:
            self._writing -= partial.size
            self._refused += partial.error is not None

    def _lost(self, error: OSError) -> StoreUnavailable:
        return StoreUnavailable(f"the file store {self.root}: {error.strerror}")

    def _write(self, file: int, name: bytes, view: memoryview, end: float) -> None:
        data, checksum = view.cast("B"), zlib.crc32(name)
        start = HEAD.size + len(name)
        for at in range(0, len(data), SLICE):
            part = data[at : at + SLICE]
            checksum = zlib.crc32(part, checksum)
            while part:
                done = os.pwrite(file, part, start + at)
                at, part = at + done, part[done:]
            self._in_time(end)
        os.pwrite(file, HEAD.pack(MAGIC, checksum, len(name), len(data)) + name, 0)

    def _get(self, key: str, view: memoryview, end: float) -> bool:
        path, name = self._path(key), key.encode()
        try:
            # What is no file (a pipe, say) must not make the opening wait.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            self._still_there()
            return False
        except OSError as error:
            raise self._lost(error) from error
        try:
            sound = self._read(file, name, view, end)
            if sound:
                with contextlib.suppress(OSError):
                    os.utime(file)
        except OSError as error:
            if error.errno in LOST:
                raise self._lost(error) from error
            sound = None
        finally:
            os.close(file)
        if sound is None:
            with self._lock:
                self._corrupt += 1
            log.warning("file store: %s is damaged and deleted", path)
            self._delete(path)
        return bool(sound)

    def _read(self, file: int, name: bytes, view: memoryview, end: float) -> bool | None:
        """True: the view is filled; False: sound, but not what was asked for; None: damaged."""
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        head = os.pread(file, HEAD.size + len(name), 0)
        if len(head) < HEAD.size:
            return None
        magic, checksum, name_size, size = HEAD.unpack_from(head)
        start = HEAD.size + name_size
        whole = os.fstat(file).st_size == start + size
        if magic != MAGIC or not whole or head[HEAD.size :] != name:
            return None
        if size != view.nbytes:
            return False
        data, found = view.cast("B"), zlib.crc32(name)
        for at in range(0, size, SLICE):
            part = data[at : at + SLICE]
            read = 0
            while read < len(part):
                got = os.preadv(file, [part[read:]], start + at + read)
                if not got:
                    return None
                read += got
            found = zlib.crc32(part, found)
            self._in_time(end)
        return True if found == checksum else None


def _temporary() -> str:
    return f".{secrets.token_hex(8)}"
