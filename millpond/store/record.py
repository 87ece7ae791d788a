"""What a checkpoint looks like outside the engine: names, manifest, checksums; moves no byte.

A record is one state object, one object for each page below it, and a manifest, of one rank:

    <namespace>/m/<digest>               the manifest: written last, read first
    <namespace>/s/<digest>-<generation>  the slot
    <namespace>/p/<digest>-<generation>  a page, shared by all records of a generation that need it

`digest` is the last link of the chain over the pages of tokens, the one the prefix index computes,
with neither epoch nor model in its root: the namespace names the model, and the manifest says when
the record was begun. The generation is drawn anew for every life and every epoch of an engine, and
all objects of a record carry the one its manifest names: bytes of two runs never mix, and a record
that lost an object, or never got all of them, is a miss.
"""

from __future__ import annotations

import secrets
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from millpond.state.checkpoint import AnchorKind, page_digest, prefix_salt, root_digest

PAGE = 64  # tokens

_MAGIC = b"MPREC\x00\x00\x01"
_HEAD = struct.Struct("<8s8sQ32s32sQQQdB7x")  # see `Manifest.pack`
_KINDS = tuple(AnchorKind)


def new_generation() -> bytes:
    """Eight random bytes."""
    return secrets.token_bytes(8)


def record_root(*, cache_salt: str, adapter: str = "") -> bytes:
    """The first link of a chain that is the same in every life of every engine."""
    return root_digest(
        prefix_salt(epoch=0, model_identity=b"", adapter=adapter, cache_salt=cache_salt)
    )


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids, 4 bytes each."""
    return array("i", tokens).tobytes()


def chain(root: bytes, packed: bytes, end: int) -> list[bytes]:
    """The digest after each whole page of the first `end` tokens, shallowest first."""
    width, link, found = 4 * PAGE, root, []
    for at in range(0, min(len(packed), 4 * end) // width * width, width):
        link = page_digest(link, packed[at : at + width])
        found.append(link)
    return found


def checksum(view: memoryview) -> int:
    """crc32 of the bytes."""
    return zlib.crc32(view)


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of the objects of one rank. `namespace` is `Identity.namespace` of that rank."""

    namespace: str

    def manifest(self, digest: bytes) -> str:
        """Without a generation: whoever looks a prompt up knows of none."""
        return f"{self.namespace}/m/{digest.hex()}"

    def state(self, digest: bytes, generation: bytes) -> str:
        """Of the slot."""
        return f"{self.namespace}/s/{digest.hex()}-{generation.hex()}"

    def page(self, digest: bytes, generation: bytes) -> str:
        """Of the page that ends the chain."""
        return f"{self.namespace}/p/{digest.hex()}-{generation.hex()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What makes a record whole. Sizes in bytes; `began` in seconds of the wall clock.

    `namespace` and `digest` repeat what the key says, so that no other key's manifest passes for
    this one. `put` numbers the puts of a generation: the manifests of all ranks name the same one,
    or what they name was not computed at once and is no record. `sums` are the checksums of the
    state and of each page, shallowest first.
    """

    namespace: str
    digest: bytes
    generation: bytes
    put: int
    end: int
    slot_bytes: int
    page_bytes: int
    began: float
    kind: AnchorKind
    sums: tuple[int, ...]

    def is_of(self, other: Manifest) -> bool:
        """Whether both were written by one put, on whichever ranks."""
        return (self.generation, self.put) == (other.generation, other.put)

    @property
    def num_bytes(self) -> int:
        """Of state and pages."""
        return self.slot_bytes + self.page_bytes * (self.end // PAGE)

    def pack(self) -> bytes:
        """Of a length that follows from `end` alone, so that a reader knows it beforehand."""
        head = _HEAD.pack(
            _MAGIC,
            self.generation,
            self.put,
            self.digest,
            _digest_of(self.namespace),
            self.end,
            self.slot_bytes,
            self.page_bytes,
            self.began,
            _KINDS.index(self.kind),
        )
        body = head + struct.pack(f"<{len(self.sums)}I", *self.sums)
        return body + struct.pack("<I", zlib.crc32(body))

    @classmethod
    def unpack(cls, data: bytes | memoryview, namespace: str, digest: bytes) -> Manifest | None:
        """What was packed; None when these bytes are not a manifest of that name."""
        data = bytes(data)
        if len(data) < _HEAD.size + 8 or zlib.crc32(data[:-4]) != _u32(data[-4:]):
            return None
        magic, generation, put, named, where, end, slot, page, began, kind = _HEAD.unpack_from(data)
        if magic != _MAGIC or named != digest or where != _digest_of(namespace):
            return None
        count = end // PAGE + 1
        if end % PAGE or not end or len(data) != manifest_bytes(end) or kind >= len(_KINDS):
            return None
        return cls(
            namespace=namespace,
            digest=digest,
            generation=generation,
            put=put,
            end=end,
            slot_bytes=slot,
            page_bytes=page,
            began=began,
            kind=_KINDS[kind],
            sums=struct.unpack_from(f"<{count}I", data, _HEAD.size),
        )


def manifest_bytes(end: int) -> int:
    """Bytes of the manifest of a record that ends at `end`."""
    return _HEAD.size + 4 * (end // PAGE + 1) + 4


def _u32(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _digest_of(namespace: str) -> bytes:
    return root_digest(namespace.encode())
