"""What the prompts in the engine have in common: a tree of their pages, kept while they are folded.

Compares tokens only. Knows no ledger and no queue; adding and removing a prompt costs what it
shares with others, not what it is long.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from millpond.engine.request import Sequence
from millpond.plan.step import PAGE_SIZE

_TOKEN_BYTES = array("i").itemsize
_PAGE_BYTES = PAGE_SIZE * _TOKEN_BYTES


class Branch(NamedTuple):
    """`others` more prompts go with one up to `end` tokens, and part from it there."""

    end: int
    others: int


class _Stretch:
    """Pages `start .. end` of prompts that are all alike so far; it branches at its end only."""

    __slots__ = ("above", "below", "end", "folding", "packed", "prompts", "start", "wanting")

    def __init__(self, above: _Stretch | None, packed: bytes, start: int, end: int) -> None:
        self.above = above
        self.packed = packed  # of some prompt that came through here
        self.start = start
        self.end = end
        self.below: dict[bytes, _Stretch] = {}  # by their first page
        self.prompts = 0
        self.wanting = 0  # that could start from a checkpoint, or could have, and are folded
        self.folding: dict[Sequence, None] = {}  # those that run, oldest first

    def page(self, index: int) -> bytes:
        return self.packed[index * _PAGE_BYTES : (index + 1) * _PAGE_BYTES]


class SharedPrefixes:
    """The prompts that wait or are being folded, by what they begin with.

    A prompt counts with the whole pages that leave one token for its logits. Prompts of different
    `cache_salt` have nothing in common.
    """

    def __init__(self) -> None:
        self._roots: dict[str, _Stretch] = {}
        self._last: dict[Sequence, tuple[_Stretch, int]] = {}  # where a prompt ends, its weight

    def add(self, sequence: Sequence) -> None:
        """A prompt waits to be folded."""
        spec = sequence.request.spec
        pages = (len(spec.tokens) - 1) // PAGE_SIZE
        if sequence in self._last or not pages:
            return
        packed = array("i", spec.tokens[: pages * PAGE_SIZE]).tobytes()
        at = self._roots.setdefault(spec.cache_salt, _Stretch(None, b"", 0, 0))
        weight = int(sequence.request.prompt_logprobs is None)
        while at.end < pages:
            first = packed[at.end * _PAGE_BYTES : (at.end + 1) * _PAGE_BYTES]
            below = at.below.get(first)
            if below is None:
                below = at.below[first] = _Stretch(at, packed, at.end, pages)
            else:
                common = _common(below, packed, min(below.end, pages))
                if common < below.end:
                    below = _split(at, below, common)
            below.prompts += 1
            below.wanting += weight
            at = below
        self._last[sequence] = (at, weight)

    def discard(self, sequence: Sequence, *, folded: bool = False) -> None:
        """A prompt is folded, or given up.

        One that was folded still counts for those that share its beginning, as long as any is here:
        it may have passed the place where they part before they came.
        """
        last, weight = self._last.pop(sequence, (None, 0))
        if folded:
            weight = 0
        at = last
        while at is not None and at.above is not None:
            at.prompts -= 1
            at.wanting -= weight
            at.folding.pop(sequence, None)
            if not at.prompts:
                del at.above.below[at.page(at.start)]
            at = at.above
        salt = sequence.request.spec.cache_salt
        if at is not None and not at.below:
            del self._roots[salt]

    def start(self, sequence: Sequence) -> None:
        """A prompt begins to be folded: others may wait for it."""
        for stretch in self._path(sequence):
            stretch.folding[sequence] = None

    def branches(self, sequence: Sequence) -> list[Branch]:
        """Where others part from a prompt, deepest first."""
        last, counted = self._last.get(sequence, (None, 0))
        found = []
        at = last
        while at is not None and at.above is not None:
            if at.wanting > counted:
                found.append(Branch(at.end * PAGE_SIZE, at.wanting - counted))
            counted = at.wanting
            at = at.above
        return found

    def ahead(self, sequence: Sequence) -> Iterator[tuple[Sequence, int]]:
        """Prompts being folded, with the tokens they share with this one: most in common first."""
        told = {sequence}
        for stretch in self._path(sequence):
            for other in stretch.folding:
                if other not in told:
                    told.add(other)
                    yield other, stretch.end * PAGE_SIZE

    def place(self, sequence: Sequence, end: int) -> object:
        """Equal for two prompts, and the same `end`, when they are alike up to there."""
        for stretch in self._path(sequence):
            if stretch.start * PAGE_SIZE < end <= stretch.end * PAGE_SIZE:
                return stretch
        return sequence

    def __len__(self) -> int:
        return len(self._last)

    def _path(self, sequence: Sequence) -> Iterator[_Stretch]:
        """From where a prompt ends up to the first page."""
        at, _ = self._last.get(sequence, (None, 0))
        while at is not None and at.above is not None:
            yield at
            at = at.above


def _common(stretch: _Stretch, packed: bytes, end: int) -> int:
    """The last page, at most `end`, up to which a prompt goes along with a stretch it entered."""
    # By halves: slices of bytes are compared at the speed of memory, pages one by one are not.
    alike, differ = stretch.start + 1, end + 1
    while differ - alike > 1:
        middle = (alike + differ) // 2
        span = slice(alike * _PAGE_BYTES, middle * _PAGE_BYTES)
        if stretch.packed[span] == packed[span]:
            alike = middle
        else:
            differ = middle
    return alike


def _split(above: _Stretch, low: _Stretch, at: int) -> _Stretch:
    """Cut a stretch below `above` at a page inside it; the new, upper part is returned."""
    up = _Stretch(above, low.packed, low.start, at)
    up.prompts, up.wanting, up.folding = low.prompts, low.wanting, dict(low.folding)
    up.below = {low.page(at): low}
    above.below[low.page(low.start)] = up
    low.above, low.start = up, at
    return up
