"""The order of eviction against a plain model of it, and the properties it is made for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, given, settings

from millpond.state.checkpoint import AnchorKind, Checkpoint, CheckpointKey
from millpond.state.lease import ReaderLease, SlotId
from millpond.state.value import (
    FADE,
    GUESS,
    GUESS_WEIGHT,
    Class,
    Departure,
    EvictionOrder,
    Standing,
)

Path = tuple[int, ...]
PAGE = 64
END, LADDER, SEEN = AnchorKind.PROMPT_END, AnchorKind.LADDER, AnchorKind.BRANCH_SEEN


def seconds(start: int, end: int) -> float:
    """Deep tokens cost more, so that no token count can stand in for it."""
    return (end * end - start * start) / 10_000


def checkpoint(path: Path, kind: AnchorKind = END) -> Checkpoint:
    lease = ReaderLease(SlotId(0), 0, "test")
    return Checkpoint(CheckpointKey(bytes(path), len(path) * PAGE), lease, kind)


# A plain model: every question is answered by looking at everything.


@dataclass(eq=False)
class Entry:
    kind: AnchorKind
    at: int
    base: float
    uses: float = 0.0
    usual: float = 0.0
    superseded: bool = False
    used: bool = False
    missed: Class | str | None = None


class Model:
    def __init__(self, cost: Callable[[int, int], float]) -> None:
        self.cost = cost
        self.live: dict[Path, Entry] = {}
        self.gone: dict[Path, Class | str] = {}  # "used": counted in no class
        self.kept: Counter[Class] = Counter()
        self.lost: Counter[Class] = Counter()
        self.now = 0
        self.level = 0.0

    def above(self, path: Path) -> Path | None:
        ends = (path[:end] for end in range(len(path) - 1, 0, -1))
        return next((shorter for shorter in ends if shorter in self.live), None)

    def below(self, path: Path) -> list[Path]:
        return [other for other in self.live if self.above(other) == path]

    def key(self, path: Path) -> float:
        entry, above = self.live[path], self.above(path)
        start = 0 if above is None else len(above) * PAGE
        return entry.base + (entry.uses + entry.usual) * self.cost(start, len(path) * PAGE)

    def faded(self, entry: Entry) -> float:
        return entry.uses * 0.5 ** ((self.now - entry.at) / (FADE * max(len(self.live), 1)))

    def usual(self, entry: Entry) -> float:
        kind = Class(entry.kind, entry.superseded)
        kept, lost = self.kept[kind], self.lost[kind]
        return (GUESS[entry.superseded] * GUESS_WEIGHT + kept) / (GUESS_WEIGHT + kept + lost)

    def learn(self, kind: Class | str | None, times: int) -> None:
        if isinstance(kind, Class):
            self.kept[kind] += times
            self.lost[kind] -= times

    def add(self, path: Path, kind: AnchorKind) -> None:
        self.now += 1
        entry = Entry(kind, self.now, self.level)
        self.live[path] = entry
        entry.superseded = bool(self.below(path))
        if path in self.gone:
            entry.missed, entry.uses = self.gone.pop(path), 1.0
            self.learn(entry.missed, 1)
        above = self.above(path)
        if above is not None:
            parent = self.live[above]
            if self.below(above) == [path]:
                entry.uses, parent.uses = max(entry.uses, self.faded(parent)), 0.0
                if entry.missed and parent.missed:
                    self.learn(parent.missed, -1)
                    parent.missed = None
            if not parent.superseded:
                parent.superseded, parent.used = True, False
                parent.usual = self.usual(parent)
        entry.usual = self.usual(entry)

    def use(self, path: Path) -> None:
        entry = self.live[path]
        self.now += 1
        entry.uses, entry.at, entry.base = self.faded(entry) + 1, self.now, self.level
        entry.missed = None
        if not entry.used:
            self.kept[Class(entry.kind, entry.superseded)] += 1
        entry.used = True
        entry.usual = self.usual(entry)

    def remove(self, path: Path, *, evicted: bool) -> None:
        if evicted:
            self.level = max(self.level, self.key(path))
        above, entry = self.above(path), self.live.pop(path)
        kind = Class(entry.kind, entry.superseded)
        self.gone[path] = "used"
        if evicted and not entry.used:
            self.lost[kind] += 1
            self.gone[path] = kind
        if above is not None:
            self.live[above].uses += self.faded(entry) + entry.usual


class Both:
    """The order and the model, side by side; checks after each event."""

    def __init__(self) -> None:
        self.order = EvictionOrder(seconds)
        self.model = Model(seconds)
        self.checkpoints: dict[Path, Checkpoint] = {}
        self.gone: dict[Path, Departure] = {}

    def add(self, path: Path, kind: AnchorKind) -> None:
        if path in self.checkpoints:
            self.use(path)
            return
        above = self.model.above(path)
        self.model.add(path, kind)
        below = [self.checkpoints[other] for other in self.model.below(path)]
        self.checkpoints[path] = checkpoint(path, kind)
        self.order.add(
            self.checkpoints[path],
            None if above is None else self.checkpoints[above],
            below,
            self.gone.pop(path, None),
        )

    def use(self, path: Path) -> None:
        self.model.use(path)
        self.order.use(self.checkpoints[path])

    def remove(self, path: Path, *, evicted: bool) -> None:
        self.model.remove(path, evicted=evicted)
        self.gone[path] = self.order.remove(self.checkpoints.pop(path), evicted=evicted)

    def evict(self, leased: set[Path]) -> None:
        may_go = [path for path in self.checkpoints if path not in leased]
        found = self.order.least(lambda one: tuple(one.key.digest) not in leased)
        assert (found is None) == (not may_go)
        if found is not None:
            path = tuple(found.key.digest)
            assert path in may_go
            least = min(map(self.model.key, may_go))
            assert math.isclose(self.model.key(path), least, abs_tol=1e-9)
            self.remove(path, evicted=True)

    def check(self) -> None:
        for path, one in self.checkpoints.items():
            assert math.isclose(self.order.key(one), self.model.key(path), abs_tol=1e-9)
        assert self.order.kept == self.model.kept
        assert self.order.lost == self.model.lost


STEM = (0, 0, 1, 0, 1, 1)
paths = st.one_of(
    st.integers(1, 6).map(lambda end: STEM[:end]),
    st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple),
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), paths, st.sampled_from([END, LADDER, SEEN])),
        st.tuples(st.just("use"), st.integers(0, 20)),
        st.tuples(st.just("evict"), st.sets(st.integers(0, 3), max_size=2)),
        st.tuples(st.just("drop"), st.integers(0, 20)),
    ),
    max_size=40,
)


def replay(todo: list[tuple[object, ...]]) -> None:
    both = Both()
    for what, *rest in todo:
        live = list(both.checkpoints)
        if what == "add":
            both.add(*rest)  # type: ignore[arg-type]
        elif what == "evict":
            (leased,) = rest
            both.evict({live[number] for number in leased if number < len(live)})  # type: ignore[attr-defined]
        elif live:
            path = live[rest[0] % len(live)]  # type: ignore[operator]
            if what == "use":
                both.use(path)
            else:
                both.remove(path, evicted=False)
        both.check()
    while both.checkpoints:
        both.evict(set())
        both.check()


@given(events)
def test_the_order_is_that_of_a_plain_model(todo: list[tuple[object, ...]]) -> None:
    replay(todo)


# Faults, planted: the comparison above must find each.


def stale_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rose since it was entered is taken as it was."""

    def least(self: EvictionOrder, may_go: Callable[[Checkpoint], bool]) -> Checkpoint | None:
        live = [(s.key, s.entry, s) for s in self._standings.values() if may_go(s.checkpoint)]
        return min(live)[2].checkpoint if live else None

    monkeypatch.setattr(EvictionOrder, "least", least)


def leased_ones_go(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = EvictionOrder.least
    monkeypatch.setattr(EvictionOrder, "least", lambda self, may_go: honest(self, lambda _: True))


def passed_over_ones_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = EvictionOrder.least

    def least(self: EvictionOrder, may_go: Callable[[Checkpoint], bool]) -> Checkpoint | None:
        found = honest(self, may_go)
        self._heap = [item for item in self._heap if may_go(item[2].checkpoint)]
        return found

    monkeypatch.setattr(EvictionOrder, "least", least)


def evidence_dies_with_its_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = EvictionOrder.remove

    def remove(self: EvictionOrder, one: Checkpoint, *, evicted: bool = False) -> Departure:
        standing = self._standings[one]
        standing.uses = standing.usual = 0.0
        return honest(self, one, evicted=evicted)

    monkeypatch.setattr(EvictionOrder, "remove", remove)


def no_waterline(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = EvictionOrder.remove

    def remove(self: EvictionOrder, one: Checkpoint, *, evicted: bool = False) -> Departure:
        departure = honest(self, one, evicted=evicted)
        self.level = 0.0
        return departure

    monkeypatch.setattr(EvictionOrder, "remove", remove)


def one_between_goes_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = EvictionOrder.add

    def add(self: EvictionOrder, one: Checkpoint, above: Checkpoint | None, *rest: object) -> None:
        honest(self, one, above, (), rest[1])  # type: ignore[arg-type]

    monkeypatch.setattr(EvictionOrder, "add", add)


def a_branch_gives_its_evidence_away(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = EvictionOrder._supersede

    def supersede(self: EvictionOrder, above: Standing, by: Standing) -> None:
        true, above.below = above.below, 1
        honest(self, above, by)
        above.below = true

    monkeypatch.setattr(EvictionOrder, "_supersede", supersede)


def every_rung_counts_as_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = EvictionOrder._learn

    def learn(self: EvictionOrder, unused: Class | None, times: int) -> None:
        honest(self, unused, max(times, 0))

    monkeypatch.setattr(EvictionOrder, "_learn", learn)


def the_way_up_ends_at_what_went(monkeypatch: pytest.MonkeyPatch) -> None:
    def above(self: EvictionOrder, standing: Standing) -> Standing | None:
        return None if standing.above is None or standing.above.gone else standing.above

    monkeypatch.setattr(EvictionOrder, "_above", above)


def uses_never_fade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EvictionOrder, "_faded", lambda _, standing: standing.uses)


@pytest.mark.parametrize(
    "plant",
    [
        stale_keys,
        leased_ones_go,
        passed_over_ones_are_lost,
        evidence_dies_with_its_anchor,
        no_waterline,
        one_between_goes_unnoticed,
        a_branch_gives_its_evidence_away,
        every_rung_counts_as_missed,
        the_way_up_ends_at_what_went,
        uses_never_fade,
    ],
    ids=lambda plant: plant.__name__,
)
def test_the_model_finds(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    search = settings(
        max_examples=2_000,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, IndexError)):
        search(given(events)(replay))()


# What it is made for.


class Shelf:
    """An order filled along paths, as a prompt's anchors are."""

    def __init__(self, policy: str = "value") -> None:
        self.order = EvictionOrder(seconds, policy)  # type: ignore[arg-type]
        self.at: dict[Path, Checkpoint] = {}
        self.went: dict[Path, Departure] = {}

    def prompt(self, path: Path, *ends: int, kind: AnchorKind = END) -> None:
        """Start at the deepest checkpoint of `path`, and publish at `ends` and at its own end."""
        known = [path[:end] for end in range(1, len(path)) if path[:end] in self.at]
        if known:
            self.order.use(self.at[known[-1]])
        for end in (*ends, len(path)):
            if path[:end] in self.at:
                continue
            above = max((p for p in self.at if p == path[: len(p)]), key=len, default=None)
            one = checkpoint(path[:end], kind if end == len(path) else LADDER)
            self.at[path[:end]] = one
            went = self.went.pop(path[:end], None)
            self.order.add(one, None if above is None else self.at[above], (), went)

    def evict(self) -> Path:
        victim = self.order.least(lambda _: True)
        assert victim is not None
        path = tuple(victim.key.digest)
        self.went[path] = self.order.remove(self.at.pop(path), evicted=True)
        return path


def test_a_shallow_anchor_near_a_deeper_hot_one_goes_first() -> None:
    shelf = Shelf()
    shelf.prompt((1,) * 10)
    shelf.prompt((1,) * 11)
    for last in range(5):
        shelf.prompt((*(1,) * 11, last))
    first = next(path for path in iter(shelf.evict, None) if len(path) < 12)
    assert first == (1,) * 10


def test_what_many_prompts_share_stays_and_what_they_end_with_goes() -> None:
    shelf = Shelf()
    shelf.prompt((1,) * 5)
    for task in range(2, 10):
        shelf.prompt((1, 1, 1, 1, 1, task))
    gone = [shelf.evict() for _ in range(8)]
    assert (1,) * 5 not in gone


def test_a_conversation_keeps_its_newest_turn() -> None:
    shelf = Shelf()
    for end in range(2, 8):
        shelf.prompt((1,) * end)
    gone = [len(shelf.evict()) for _ in range(5)]
    assert 7 not in gone


def test_rungs_go_before_the_end_of_their_prompt() -> None:
    shelf = Shelf()
    shelf.prompt((1,) * 12, 4, 8)
    shelf.prompt((2,) * 12, 4, 8)
    gone = {len(shelf.evict()) for _ in range(4)}
    assert gone == {4, 8}


def test_a_ladder_that_lost_its_end_is_worth_what_the_end_was() -> None:
    shelf = Shelf()
    for start in (1, 2):
        shelf.prompt((start,) * 8, 7)
        shelf.order.use(shelf.at[(start,) * 8])
    end = shelf.at.pop((1,) * 8)
    shelf.order.remove(end)
    assert shelf.order.key(shelf.at[(1,) * 7]) > shelf.order.key(shelf.at[(2,) * 7])


def test_of_equals_the_one_used_longest_ago_goes_first() -> None:
    shelf = Shelf()
    for start in range(5):
        shelf.prompt((start,) * 4)
    shelf.order.use(shelf.at[(1,) * 4])
    assert [shelf.evict()[0] for _ in range(4)] == [0, 2, 3, 4]


def test_what_was_used_often_and_long_ago_goes_in_the_end() -> None:
    shelf = Shelf()
    shelf.prompt((0,) * 4)
    for _ in range(50):
        shelf.order.use(shelf.at[(0,) * 4])
    for start in range(1, 4000):
        shelf.prompt((start % 250 + 1,) * 4)
        if len(shelf.at) > 8 and shelf.evict() == (0,) * 4:
            return
    pytest.fail("it never went")


def test_kinds_that_are_not_used_come_to_be_worth_less() -> None:
    shelf = Shelf()
    unused, used = Class(AnchorKind.DECODE, False), Class(END, False)
    for start in range(100):
        shelf.prompt((start, 0, 1), kind=AnchorKind.DECODE)
        shelf.prompt((start, 1, 1))
        shelf.order.use(shelf.at[(start, 1, 1)])
        for path in ((start, 0, 1), (start, 1, 1)):
            shelf.order.remove(shelf.at.pop(path), evicted=True)
    assert shelf.order.usual(unused) < 0.1
    assert shelf.order.usual(used) > 0.9


def test_a_change_of_rate_changes_no_order() -> None:
    rate = 1.0

    def cost(start: int, end: int) -> float:
        return seconds(start, end) / rate

    plain, moved = Shelf(), Shelf()
    moved.order = EvictionOrder(cost)
    for start in range(20):
        for shelf in (plain, moved):
            shelf.prompt((start % 7,) * (start % 5 + 2), 1)
        if start == 9:
            rate = 0.01
            moved.order.reprice(100.0)
        if start > 5:
            assert plain.evict() == moved.evict()


def test_lru_knows_the_last_use_only() -> None:
    shelf = Shelf("lru")
    shelf.prompt((1,) * 12)
    shelf.prompt((2,) * 2)
    shelf.prompt((3,) * 2)
    shelf.order.use(shelf.at[(2,) * 2])
    assert [shelf.evict()[0] for _ in range(3)] == [1, 3, 2]


def test_the_heap_does_not_grow_with_time() -> None:
    shelf = Shelf()
    shelf.prompt((1,) * 4)
    for _ in range(1000):
        shelf.order.use(shelf.at[(1,) * 4])
    assert len(shelf.order._heap) < 100


def test_finding_the_least_looks_at_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """With n checkpoints an eviction looks at some of them, not at all: log n, amortised."""
    looks = Counter[str]()
    honest = EvictionOrder._key

    def key(self: EvictionOrder, standing: Standing) -> float:
        looks["key"] += 1
        return honest(self, standing)

    monkeypatch.setattr(EvictionOrder, "_key", key)
    shelf = Shelf()
    for start in range(1000):
        shelf.prompt((start // 256, start % 256, 1, 2), 2, 3)
    looks.clear()
    for _ in range(2000):
        shelf.evict()
    assert looks["key"] < 3 * 2000
