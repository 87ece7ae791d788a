"""Whose bytes these are: the identity that every key begins with, and what a model's is made of.

Reads files of weights as bytes; knows no tensor library and no store's protocol but exists and get.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import re
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from millpond.errors import Refused
from millpond.store.backend import Backend
from millpond.telemetry import logger
from millpond.units import MIB

log = logger("store")

CACHE_FILE = ".millpond-fingerprint.json"
"""Beside large weights, where that can be written; else they are read at every start."""

WORTH_KEEPING = 256 * MIB
"""Weights below this are read again in less time than it takes to wonder about a file."""

READERS = 2
"""Threads that checksum tensors; one reads about as fast as a disk does."""

SCHEMA = 1
"""Of names and records; another number never meets this one's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Everything besides tokens that shaped the bytes of a state or a page.

    `model` and `draft` are fingerprints of weights, or names that an operator answers for; `layout`
    names every tensor of slot and page with its place; `kernels` the backends and their version.
    """

    model: str
    draft: str
    weights_version: int = 0
    dtype: str
    state_dtype: str
    layout: str
    tp_size: int = 1
    alignment: int
    adapter: str = ""
    kernels: str
    chunk_size: int = 64

    def namespace(self, rank: int) -> str:
        """The beginning of every key of one rank: 32 hexadecimal digits."""
        named = {**asdict(self), "rank": rank, "schema": SCHEMA}
        text = json.dumps(named, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def fingerprint(model_dir: Path) -> str:
    """Of a directory's weights: sha256 over its configuration, the headers of its safetensors files
    and a checksum of each tensor, in hexadecimal.

    Checksums are kept beside the weights and used again while size and time of a file stand.
    Raises `Refused` where there are no weights.
    """
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise Refused(
            f"{model_dir} holds no weights, so a store cannot tell whose states these are"
        )
    known = _read_cache(model_dir / CACHE_FILE)
    sums: dict[str, dict[str, object]] = {}
    for file in files:
        status = file.stat()
        stamp = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
        kept = known.get(file.name)
        if isinstance(kept, dict) and all(kept.get(name) == stamp[name] for name in stamp):
            sums[file.name] = kept
        else:
            sums[file.name] = {**stamp, "digest": _file_digest(file)}
    if sums != known and sum(file.stat().st_size for file in files) >= WORTH_KEEPING:
        with contextlib.suppress(OSError):
            (model_dir / CACHE_FILE).write_text(json.dumps(sums, indent=1), encoding="utf-8")
    whole = hashlib.sha256((model_dir / "config.json").read_bytes())
    for name in sorted(sums):
        whole.update(f"\n{name} {sums[name]['digest']}".encode())
    return whole.hexdigest()


def _read_cache(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _file_digest(file: Path) -> str:
    """sha256 over the header and the checksum of each tensor, in the order of their bytes."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        length = int.from_bytes(data[:8], "little")
        if 8 + length > len(data):
            raise Refused(f"{file} is not a safetensors file: its header is longer than the file")
        header = data[8 : 8 + length]
        digest = hashlib.sha256(header)
        with memoryview(data) as view, ThreadPoolExecutor(READERS, "millpond-checksum") as pool:
            ranges = list(_ranges(file, header, 8 + length))
            for checked in pool.map(lambda span: zlib.crc32(view[span[0] : span[1]]), ranges):
                digest.update(checked.to_bytes(4, "little"))
    return digest.hexdigest()


def _ranges(file: Path, header: bytes, base: int) -> Iterator[tuple[int, int]]:
    try:
        named = json.loads(header)
        spans = sorted(
            tuple(entry["data_offsets"]) for name, entry in named.items() if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise Refused(f"{file} is not a safetensors file: {cause}") from cause
    for begin, end in spans:
        yield base + begin, base + end


_HASH = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


def check_named(what: str, name: str, weights: str | None) -> str:
    """What an operator calls some weights, checked where it can be; returns the name to go by.

    A sha256 must be that of the `weights`. `Refused` when it is not, or is empty.
    """
    name = name.strip()
    if not name:
        raise Refused(f"{what} is empty: name the weights, or leave it out and they are hashed")
    found = _HASH.fullmatch(name)
    if found and weights is not None and found[1] != weights:
        raise Refused(f"{what} is {found[1]}, these weights are {weights}")
    return found[1] if found else name


def claim(backend: Backend, what: str, name: str, weights: str) -> None:
    """Hold a name to the weights that first went by it in this store.

    A store that forgot it learns it anew. `Refused` when the name stands for other weights.
    """
    key = f"names/{hashlib.sha256(f'{what}:{name}'.encode()).hexdigest()}"
    mine = bytearray(hashlib.sha256(weights.encode()).digest())
    known = bytearray(len(mine))
    for _ in range(2):  # whoever puts second finds what the first one put
        if backend.get([(key, memoryview(known))])[0]:
            if known != mine:
                raise Refused(f"{what} {name!r} names other weights in this store than these")
            return
        backend.put([(key, memoryview(mine))])
    log.warning("the store does not keep what %s %r stands for: it is not checked", what, name)
