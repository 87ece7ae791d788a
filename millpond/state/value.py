"""Which checkpoint goes when a slot is needed. Knows ends, uses and costs; no tree and no slot.

What a checkpoint is worth is what would be lost without it: the requests that would have started
from it start from the next shallower anchor instead, and compute the tokens between the two again.

    worth = reuse evidence × seconds to recompute (end of the next shallower anchor .. own end)

per byte; but all slots of an arena have one size, so dividing by it would change no order.

**Reuse evidence** counts the starts to expect from it: its uses, plus what is usual for its class
before any. Old uses fade: they halve with every `FADE` uses and publications per live checkpoint. A
use is counted where it happened, at the deepest anchor of a prompt, so a shallow anchor near a
deeper hot one earns nothing, while what many prompts share and then part from earns from all. When
a checkpoint goes, its faded uses pass to the next shallower anchor, which will serve those prompts.

**Usual for its class**: of all checkpoints of a kind, the part that was used before it went. One
that is superseded, because the prompt it lies on went on to a deeper anchor, is a class of its own:
a conversation continues from its newest turn, and a rung of a ladder serves only those who part
from the prompt. Both parts are counted as the index runs, from a first guess of `GUESS`; so under
templates that cut the last answer off again, ends of prompts stay worth more than decode anchors.
What is made again soon after it went counts as used: it was missed.

**Recency** is the aging of GreedyDual (Young 1994; with frequencies and sizes Cherkasova 1998): the
key of each victim is a waterline, `level`, from which worth is counted when a checkpoint is used or
published. What is not used sinks, the faster the more room is needed, and stays the longer the more
it is worth. So keys are constant between events and a heap finds the least; one entry of a
checkpoint is valid, others are skipped. Keys that only rose, because an anchor above went, are
corrected when they come up; all other changes enter at once.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from millpond.state.checkpoint import AnchorKind, Checkpoint

EvictionPolicy = Literal["value", "lru"]

FADE = 8
"""Events per live checkpoint after which a use counts half."""

GUESS = {False: 0.5, True: 0.05}
"""The part of checkpoints that is used before they go, at first; by whether they are superseded."""

GUESS_WEIGHT = 16
"""How many observed checkpoints a guess weighs as much as."""


def nominal_seconds(start: int, end: int) -> float:
    """Seconds to compute tokens start .. end again, before anything was measured."""
    return (end - start) / 1000


Class = tuple[AnchorKind, bool]
"""Why a checkpoint was made, and whether it is superseded."""


class Departure(NamedTuple):
    """That a checkpoint went; `unused` is the class in which it was counted as lost, if it was."""

    unused: Class | None


@dataclass(eq=False, slots=True)
class Standing:
    """What the order knows of one checkpoint."""

    checkpoint: Checkpoint
    above: Standing | None  # the next shallower anchor; one that went leads on to its own
    number: int  # of its last use or its publication
    base: float  # the waterline then
    uses: float = 0.0  # faded up to then
    usual: float = 0.0  # for its class, when it entered it
    superseded: bool = False
    used: bool = False  # since it entered its class
    entry: int = 0  # its valid entry in the heap
    key: float = 0.0
    gone: bool = False

    @property
    def kind(self) -> Class:
        """Its class."""
        return self.checkpoint.kind, self.superseded


class EvictionOrder:
    """The live checkpoints, least worth first.

    `seconds(start, end)` is the time to compute tokens start .. end again, as measured so far.
    Policy `lru` orders by the last use alone.
    """

    def __init__(
        self, seconds: Callable[[int, int], float], policy: EvictionPolicy = "value"
    ) -> None:
        self._seconds = seconds
        self._by_age = policy == "lru"
        self._standings: dict[Checkpoint, Standing] = {}
        self._heap: list[tuple[float, int, Standing]] = []
        self._entries = 0
        self._number = 0
        self._unit = 1.0  # seconds that one of a key stands for
        self.level = 0.0
        self.kept: Counter[Class] = Counter()
        self.lost: Counter[Class] = Counter()

    # What happens to checkpoints.

    def add(
        self,
        checkpoint: Checkpoint,
        above: Checkpoint | None,
        below: Iterable[Checkpoint] = (),
        missed: Departure | None = None,
    ) -> None:
        """A checkpoint was published under `above`, the next shallower one on its path.

        `below` are those that had `above` so and have the new one now. `missed` is what
        `remove` said of an equal one that went not long ago.
        """
        self._number += 1
        parent = None if above is None else self._standings[above]
        standing = Standing(checkpoint, parent, self._number, self.level)
        self._standings[checkpoint] = standing
        if missed is not None:
            standing.uses = 1.0
            if missed.unused is not None:
                self.lost[missed.unused] -= 1
                self.kept[missed.unused] += 1
        deeper = [self._standings[one] for one in below]
        standing.superseded = bool(deeper)
        standing.usual = self.usual(standing.kind)
        self._push(standing)
        for one in deeper:
            one.above = standing
            self._push(one)
        if parent is not None and not parent.superseded:
            parent.superseded = True
            parent.used = False
            parent.usual = self.usual(parent.kind)
            self._push(parent)

    def use(self, checkpoint: Checkpoint) -> None:
        """A prompt started from it, or it was made a second time."""
        standing = self._standings[checkpoint]
        self._number += 1
        standing.uses = self._faded(standing) + 1.0
        standing.number, standing.base = self._number, self.level
        if not standing.used:
            standing.used = True
            self.kept[standing.kind] += 1
        standing.usual = self.usual(standing.kind)
        self._push(standing)

    def remove(self, checkpoint: Checkpoint, *, evicted: bool = False) -> Departure:
        """It is not findable any more; `evicted` when for want of room."""
        standing = self._standings.pop(checkpoint)
        standing.gone, standing.entry = True, 0
        unused = None
        if evicted:
            self.level = max(self.level, standing.key)
            if not standing.used:
                unused = standing.kind
                self.lost[unused] += 1
        above = self._above(standing)
        if above is not None:
            above.uses += self._faded(standing)
        return Departure(unused)

    def reprice(self, factor: float) -> None:
        """All seconds are `factor` times as many from here on, which changes no order."""
        self._unit *= factor

    def clear(self) -> None:
        """Forget all checkpoints; what was learned of their classes stays."""
        self._standings.clear()
        self._heap.clear()

    # What goes first.

    def least(self, may_go: Callable[[Checkpoint], bool]) -> Checkpoint | None:
        """Of the checkpoints that may go, the one that is worth least; it stays in the order."""
        passed = []
        found = None
        while self._heap:
            key, entry, standing = self._heap[0]
            if standing.entry != entry:
                heapq.heappop(self._heap)
            elif (now := self._key(standing)) > key:
                standing.key = now
                heapq.heapreplace(self._heap, (now, entry, standing))
            elif may_go(standing.checkpoint):
                found = standing.checkpoint
                break
            else:
                passed.append(heapq.heappop(self._heap))
        for item in passed:
            heapq.heappush(self._heap, item)
        return found

    def key(self, checkpoint: Checkpoint) -> float:
        """Where it stands: of two, the one with the smaller key goes first."""
        return self._key(self._standings[checkpoint])

    def usual(self, kind: Class) -> float:
        """The part of a class that was used before it went, in 0 .. 1."""
        kept, lost = self.kept[kind], self.lost[kind]
        return (GUESS[kind[1]] * GUESS_WEIGHT + kept) / (GUESS_WEIGHT + kept + lost)

    def _key(self, standing: Standing) -> float:
        if self._by_age:
            return standing.number
        above = self._above(standing)
        start = 0 if above is None else above.checkpoint.end
        worth = (standing.uses + standing.usual) * self._seconds(start, standing.checkpoint.end)
        return standing.base + worth / self._unit

    def _above(self, standing: Standing) -> Standing | None:
        """The next shallower anchor that is left; the way to it is shortened for the next time."""
        above, way = standing.above, [standing]
        while above is not None and above.gone:
            way.append(above)
            above = above.above
        for one in way:
            one.above = above
        return above

    def _faded(self, standing: Standing) -> float:
        half = FADE * max(len(self._standings), 1)
        return standing.uses * math.exp2((standing.number - self._number) / half)

    def _push(self, standing: Standing) -> None:
        """Enter a checkpoint with its key as it is now; an entry it had before is void."""
        self._entries += 1
        standing.entry, standing.key = self._entries, self._key(standing)
        heapq.heappush(self._heap, (standing.key, standing.entry, standing))
        if len(self._heap) > 2 * len(self._standings) + 64:
            self._heap = [item for item in self._heap if item[2].entry == item[1]]
            heapq.heapify(self._heap)
