"""Which checkpoint goes when a slot is needed. Knows ends, uses and costs; no tree and no slot.

What a checkpoint is worth is what would be lost without it: the prompts that would have started
from it start from the next shallower anchor instead, and compute the tokens between the two again.

    worth = reuse evidence × seconds to recompute (end of the next shallower anchor .. own end)

per byte; but all slots of an arena have one size, so dividing by it would change no order.

**Reuse evidence** is the number of starts to expect. It belongs to the prompts that come back, so
it is where the next of them would start:

- a use counts at the deepest anchor of a prompt, so what lies near a deeper one that is used earns
  nothing, and what many prompts share and then part from earns from all of them;
- where a prompt goes on from an anchor and nothing else does, the evidence goes with it, to its new
  end: a conversation continues from its newest turn. The old anchor is *superseded*;
- when an anchor goes, its evidence falls to the next shallower one, from where its prompts will
  start. A ladder without an end is worth what the end was;
- what is made again soon after it went was missed, which is evidence of one use: of the deepest
  such anchor of a prompt only, for nobody would have started at the others.

Before any use there is what is *usual*: the part of a class (kind of anchor, superseded or not)
that was used before it went, counted as the index runs, from a first guess. Uses fade, to half with
every `FADE` events per live checkpoint.

**Recency** is the aging of GreedyDual (Young 1994; with frequencies and sizes Cherkasova 1998): the
key of each victim is a waterline, `level`, from which worth is counted when a checkpoint is used or
published. What is not used sinks, the faster the more room is needed, and stays the longer the more
it is worth. So keys are constant between events and a heap finds the least; one entry of a
checkpoint is valid, others are skipped. Keys that only rose, because an anchor near it went, are
corrected when they come up; all other changes enter at once. Every event costs O(log n), amortised.
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


class Class(NamedTuple):
    """Of what kind a checkpoint is, and whether its prompt went on to a deeper one."""

    kind: AnchorKind
    superseded: bool


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
    below: int = 0  # live checkpoints whose next shallower anchor this is
    uses: float = 0.0  # faded up to `number`, with those that came from other anchors
    usual: float = 0.0  # for its class, when it entered it
    superseded: bool = False
    used: bool = False  # since it entered its class
    missed: Departure | None = None  # made again, and not used since
    entry: int = 0  # its valid entry in the heap
    key: float = 0.0
    gone: bool = False

    @property
    def kind(self) -> Class:
        """Its class."""
        return Class(self.checkpoint.kind, self.superseded)


class EvictionOrder:
    """The live checkpoints, least worth first.

    `seconds(start, end)` is the time to compute tokens start .. end again. Policy `lru` orders by
    the last use alone.
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

        `below` are those that had `above` so and have the new one now. `missed` is what `remove`
        said of an equal one that went not long ago.
        """
        self._number += 1
        parent = None if above is None else self._standings[above]
        standing = Standing(checkpoint, parent, self._number, self.level)
        self._standings[checkpoint] = standing
        deeper = [self._standings[one] for one in below]
        standing.below, standing.superseded = len(deeper), bool(deeper)
        if missed is not None:
            standing.uses, standing.missed = 1.0, missed
            self._learn(missed.unused, 1)
        if parent is not None:
            parent.below += 1 - len(deeper)
            self._supersede(parent, standing)
        standing.usual = self.usual(standing.kind)
        self._push(standing)
        for one in deeper:
            one.above = standing
            self._push(one)

    def use(self, checkpoint: Checkpoint) -> None:
        """A prompt started from it, or it was made a second time."""
        standing = self._standings[checkpoint]
        self._number += 1
        standing.uses = self._faded(standing) + 1.0
        standing.number, standing.base = self._number, self.level
        standing.missed = None
        if not standing.used:
            standing.used = True
            self.kept[standing.kind] += 1
        standing.usual = self.usual(standing.kind)
        self._push(standing)

    def remove(self, checkpoint: Checkpoint, *, evicted: bool = False) -> Departure:
        """It is not findable any more; `evicted` when for want of room."""
        standing = self._standings.pop(checkpoint)
        above = self._above(standing)
        standing.gone, standing.entry = True, 0
        unused = None
        if evicted:
            self.level = max(self.level, standing.key)
            if not standing.used:
                unused = standing.kind
                self.lost[unused] += 1
        if above is not None:
            above.below += standing.below - 1
            above.uses += self._faded(standing) + standing.usual
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
        return (GUESS[kind.superseded] * GUESS_WEIGHT + kept) / (GUESS_WEIGHT + kept + lost)

    def _key(self, standing: Standing) -> float:
        if self._by_age:
            return standing.number
        above = self._above(standing)
        start = 0 if above is None else above.checkpoint.end
        worth = (standing.uses + standing.usual) * self._seconds(start, standing.checkpoint.end)
        return standing.base + worth / self._unit

    def _supersede(self, above: Standing, by: Standing) -> None:
        """A prompt went on from `above` to `by`."""
        if above.below == 1:
            by.uses = max(by.uses, self._faded(above))
            above.uses = 0.0
            if above.missed is not None and by.missed is not None:
                self._learn(above.missed.unused, -1)
                above.missed = None
        if not above.superseded:
            above.superseded, above.used = True, False
            above.usual = self.usual(above.kind)
        self._push(above)

    def _learn(self, unused: Class | None, times: int) -> None:
        """One that was counted as lost counts as used after all, or not so (-1)."""
        if unused is not None:
            self.lost[unused] -= times
            self.kept[unused] += times

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
