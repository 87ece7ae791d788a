"""What a checkpoint is and how it is named. Knows no tree, no tensor and no request."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum

from millpond.state.lease import ReaderLease


class AnchorKind(Enum):
    """Why a checkpoint was made."""

    PROMPT_END = "prompt_end"  # the last anchor of a prompt
    BRANCH_SEEN = "branch_seen"  # the index held pages deeper than any state
    BRANCH_COMING = "branch_coming"  # several waiting requests share the prefix
    LADDER = "ladder"  # every so many tokens of a long prompt
    DECODE = "decode"  # the newest anchor passed while generating


@dataclass(frozen=True, slots=True)
class CheckpointKey:
    """The name of a state: all tokens up to `end`, and everything else that shaped it.

    `digest` is the last link of a sha256 chain over the salt and the token pages 0 .. end.
    """

    digest: bytes
    end: int

    def __str__(self) -> str:
        return f"{self.digest.hex()[:16]}@{self.end}"


@dataclass(eq=False, slots=True)
class Checkpoint:
    """A sealed slot that can be found. The index owns `lease`; `last_used` counts its own ticks."""

    key: CheckpointKey
    lease: ReaderLease
    kind: AnchorKind
    last_used: int = 0
    uses: int = 0

    @property
    def end(self) -> int:
        """Tokens folded into the state."""
        return self.key.end


def prefix_salt(*, epoch: int, model_identity: bytes, adapter: str, cache_salt: str) -> bytes:
    """Everything but the tokens that a key names, so that no two different ones are alike."""
    parts = (str(epoch).encode(), model_identity, adapter.encode(), cache_salt.encode())
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def salt_parts(salt: bytes) -> tuple[bytes, ...]:
    """What `prefix_salt` put together: epoch, model identity, adapter, the request's own salt."""
    parts, at = [], 0
    while at < len(salt):
        size = int.from_bytes(salt[at : at + 8], "little")
        parts.append(salt[at + 8 : at + 8 + size])
        at += 8 + size
    return tuple(parts)


def root_digest(salt: bytes) -> bytes:
    """The first link of the chain: no token yet."""
    return hashlib.sha256(b"millpond prefix 1\0" + salt).digest()


def page_digest(above: bytes, page: bytes) -> bytes:
    """The next link: one more page of token ids, 4 bytes each, under the link `above`."""
    return hashlib.sha256(above + page).digest()
