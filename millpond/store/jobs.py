"""What the engine asks of the ranks, and what they answer; plain data, so that it can travel."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.state.checkpoint import AnchorKind
from millpond.store.memory import Parts
from millpond.store.record import Manifest, new_generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """Under which names an engine stores at present, and which records count.

    `namespaces` are those of its ranks, `generation` is its own. Records count when they were begun
    at `not_before` or later (wall clock), in no generation of `retired`: nothing older is found.
    """

    namespaces: tuple[str, ...]
    generation: bytes = field(default_factory=new_generation)
    not_before: float = 0.0
    retired: frozenset[bytes] = frozenset()

    def covers(self, manifest: Manifest) -> bool:
        """Whether a record counts."""
        return manifest.began >= self.not_before and manifest.generation not in self.retired

    def next(self, now: float, namespaces: tuple[str, ...] | None = None) -> Epoch:
        """The one that begins now, under other names if the weights are others."""
        return Epoch(
            namespaces=self.namespaces if namespaces is None else namespaces,
            not_before=now,
            retired=self.retired | {self.generation},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Find the deepest record of `tokens` that ends in `floor < end <= limit`, on a `step`."""

    number: int
    epoch: Epoch
    root: bytes
    tokens: bytes  # 4 each
    floor: int
    limit: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Store the record of `tokens`: `parts` are its slot and all its pages."""

    number: int
    epoch: Epoch
    root: bytes
    tokens: bytes  # 4 each
    parts: Parts
    began: float
    kind: AnchorKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Get:
    """Fill the slot and the pages of `parts`, the last ones of the record's, from a record."""

    number: int
    epoch: Epoch
    record: Record
    parts: Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """One rank found a record not to be whole: the others shall not offer theirs again."""

    number: int
    epoch: Epoch
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
