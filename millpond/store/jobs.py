"""What the engine asks of the ranks, and what they answer; plain data, so that it can travel."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.state.checkpoint import AnchorKind
from millpond.store.memory import Parts
from millpond.store.record import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Validity:
    """Which records count: begun at `not_before` or later (wall clock), of no generation `retired`.

    A change of epoch moves both, so that nothing older is found.
    """

    not_before: float = 0.0
    retired: frozenset[bytes] = frozenset()

    def covers(self, manifest: Manifest) -> bool:
        """Whether a record counts."""
        return manifest.began >= self.not_before and manifest.generation not in self.retired


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Find the deepest record of `tokens` that ends in `floor < end <= limit`, on a `step`."""

    number: int
    root: bytes
    tokens: tuple[int, ...]
    floor: int
    limit: int
    step: int
    validity: Validity


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Store the record of `tokens`: `parts` are its slot and all its pages."""

    number: int
    root: bytes
    tokens: tuple[int, ...]
    parts: Parts
    generation: bytes
    began: float
    kind: AnchorKind
    validity: Validity


@dataclass(frozen=True, slots=True, kw_only=True)
class Get:
    """Fill the slot and the pages of `parts`, the last ones of the record's, from a record."""

    number: int
    record: Record
    parts: Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """One rank found a record not to be whole: the others shall not offer theirs again."""

    number: int
    record: Record


Job = Lookup | Put | Get | Forget


@dataclass(frozen=True, slots=True)
class Record:
    """A record that a lookup found: its chain of digests, and what its manifest says."""

    digests: tuple[bytes, ...]
    manifest: Manifest

    @property
    def end(self) -> int:
        """Tokens in its state."""
        return self.manifest.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a job ended on one rank; from then on nothing of that rank touches its memory.

    `why` is empty when it did what was asked, else one of absent, damaged, full, present,
    unavailable, cancelled, error. `num_bytes` were moved in `seconds`, without the time in a queue.
    """

    number: int
    rank: int
    why: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    record: Record | None = field(default=None)
