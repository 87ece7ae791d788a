from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from millpond.errors import Broken, LeaseError
from millpond.state import chain, prefix
from millpond.state.checkpoint import AnchorKind, Checkpoint, prefix_salt
from millpond.state.lease import ReaderLease
from millpond.state.pages import PageHandle, PagePool
from millpond.state.pool import StatePool
from millpond.state.prefix import PageNode, PrefixIndex, PrefixMatch

PAGE = 4
SALT = b"salt"


class Shelf:
    """An index, the pools below it, and requests that publish and are gone."""

    def __init__(self, slots: int = 16, pages: int = 64, alignment: int | None = None) -> None:
        self.pool = StatePool(slots)
        self.pages = PagePool(pages)
        self.index = PrefixIndex(self.pool, self.pages, PAGE, alignment=alignment)

    def state(self, end: int) -> ReaderLease:
        lease = self.pool.take("request")
        self.pool.record_end(lease, end)
        return self.pool.seal(lease)

    def publish(self, tokens: Sequence[int], end: int | None = None, salt: bytes = SALT) -> bool:
        end = len(tokens) if end is None else end
        handles = self.pages.take(end // PAGE)
        kind = AnchorKind.PROMPT_END
        fresh = self.index.publish(tokens, end, handles, self.state(end), kind, salt)
        self.pages.release(handles)
        return fresh

    def match(self, tokens: Sequence[int], salt: bytes = SALT) -> PrefixMatch:
        return self.index.match(tokens, salt, len(tokens) - 1)

    def at(self, tokens: Sequence[int]) -> Checkpoint:
        checkpoint = self.index.match(tokens, SALT, len(tokens)).checkpoint
        assert checkpoint is not None
        return checkpoint


def run(*starts: int) -> tuple[int, ...]:
    """One page of tokens for each number, no two pages alike."""
    return tuple(start * 10 + i for start in starts for i in range(PAGE))


# Finding.


def test_a_hit_is_the_deepest_state_with_its_pages() -> None:
    shelf = Shelf()
    assert shelf.publish(run(1), PAGE)
    assert shelf.publish(run(1, 2, 3), 3 * PAGE)
    match = shelf.match(run(1, 2, 3, 4))
    assert (match.end, match.indexed_end, match.reason) == (3 * PAGE, 3 * PAGE, "hit")
    assert match.checkpoint is shelf.at(run(1, 2, 3))
    assert len(match.pages) == 3
    shallow = shelf.match(run(1, 2, 9))
    assert (shallow.end, shallow.indexed_end, len(shallow.pages)) == (PAGE, 2 * PAGE, 1)


def test_a_hit_ends_at_most_at_the_limit() -> None:
    shelf = Shelf()
    shelf.publish(run(1, 2), 2 * PAGE)
    shelf.publish(run(1), PAGE)
    assert shelf.match(run(1, 2)).end == PAGE
    assert shelf.match((*run(1, 2), 5)).end == 2 * PAGE
    assert shelf.index.match(run(1, 2), SALT, 0).end == 0


def test_a_match_changes_nothing() -> None:
    shelf = Shelf()
    shelf.publish(run(1, 2))
    checkpoint = shelf.at(run(1, 2))
    before = (checkpoint.last_used, checkpoint.uses, shelf.pool.holders(checkpoint.lease.slot))
    shelf.match(run(1, 2, 3))
    after = (checkpoint.last_used, checkpoint.uses, shelf.pool.holders(checkpoint.lease.slot))
    assert before == after


def test_another_salt_never_meets() -> None:
    shelf = Shelf()
    shelf.publish(run(1, 2))
    assert shelf.match(run(1, 2, 3), b"other").reason == "never_seen"
    assert shelf.publish(run(1, 2), salt=b"other")
    assert (
        shelf.match(run(1, 2, 3), b"other").checkpoint is not shelf.match(run(1, 2, 3)).checkpoint
    )


def test_salts_of_different_parts_are_different() -> None:
    parts = [
        (e, m, a, c) for e in (1, 11) for m in (b"", b"1") for a in ("", "1") for c in ("", "1")
    ]
    salts = {
        prefix_salt(epoch=e, model_identity=m, adapter=a, cache_salt=c) for e, m, a, c in parts
    }
    assert len(salts) == len(parts)


def test_tokens_are_compared_not_only_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "page_digest", lambda above, page: b"alike")
    shelf = Shelf()
    assert shelf.publish(run(1))
    assert shelf.match(run(2, 3)).reason == "never_seen"
    free = shelf.pool.num_free
    assert not shelf.publish(run(2))
    assert shelf.pool.num_free == free
    assert shelf.match(run(1, 2)).end == PAGE


def test_the_reason_of_a_miss() -> None:
    shelf = Shelf(alignment=2 * PAGE)
    shelf.publish(run(1, 2, 3, 4))
    assert shelf.match(run(1)).reason == "too_short"
    assert shelf.match(run(1, 2)).reason == "too_short"  # one token must remain
    assert shelf.match(run(7, 8, 9)).reason == "never_seen"
    assert shelf.match(run(1, 8, 9)).reason == "alignment"  # shared, but up to no anchor
    assert shelf.match(run(1, 2, 9)).reason == "no_checkpoint"
    assert shelf.match(run(1, 2, 3, 4)).reason == "alignment"  # the only state has no token left
    assert shelf.match(run(1, 2, 3, 4, 5)).reason == "hit"
    assert shelf.index.evict_slot()
    assert shelf.match(run(1, 2, 3, 4, 5)).reason == "evicted"
    assert shelf.index.evict_pages(4) == 4
    missed = shelf.match(run(1, 2, 3, 4, 5))
    assert (missed.reason, missed.indexed_end) == ("evicted", 0)
    shelf.index.clear()
    assert shelf.match(run(1, 2, 3, 4, 5)).reason == "never_seen"


def test_evictions_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "REMEMBERED_EVICTIONS", 1)
    shelf = Shelf()
    for page in (1, 2):
        shelf.publish(run(page))
        shelf.index.evict_slot()
        shelf.index.evict_pages(1)
    assert [shelf.match(run(page, 3)).reason for page in (1, 2)] == ["never_seen", "evicted"]


prompts = st.lists(st.integers(0, 1), max_size=4 * PAGE + 2).map(tuple)


@given(
    published=st.lists(st.tuples(prompts, st.sampled_from([b"a", b"b"])), max_size=8),
    dropped=st.sets(st.integers(0, 7)),
    prompt=prompts,
    salt=st.sampled_from([b"a", b"b"]),
    short=st.integers(0, 3),
)
def test_match_agrees_with_a_list_of_prefixes(
    published: list[tuple[tuple[int, ...], bytes]],
    dropped: set[int],
    prompt: tuple[int, ...],
    salt: bytes,
    short: int,
) -> None:
    shelf = Shelf()
    known: list[tuple[tuple[int, ...], bytes]] = []  # every prefix with a state, and its salt
    paths: list[tuple[tuple[int, ...], bytes]] = []
    for tokens, its_salt in published:
        whole = tokens[: len(tokens) // PAGE * PAGE]
        if whole:
            assert shelf.publish(tokens, len(whole), its_salt) == ((whole, its_salt) not in known)
            paths.append((whole, its_salt))
            if (whole, its_salt) not in known:
                known.append((whole, its_salt))
    for number in sorted(dropped, reverse=True):
        if number < len(known):
            whole, its_salt = known.pop(number)
            found = shelf.index.match(whole, its_salt, len(whole)).checkpoint
            assert found is not None
            shelf.index.drop(found)

    limit = len(prompt) - short
    ends = [
        len(whole)
        for whole, its_salt in known
        if its_salt == salt and prompt[: len(whole)] == whole and len(whole) <= limit
    ]
    depths = [
        end
        for whole, its_salt in paths
        for end in range(PAGE, len(whole) + 1, PAGE)
        if its_salt == salt and prompt[:end] == whole[:end]
    ]
    match = shelf.index.match(prompt, salt, limit)
    assert match.end == max(ends, default=0)
    assert match.indexed_end == max(depths, default=0)
    assert (match.reason == "hit") == bool(ends)
    assert len(match.pages) == match.end // PAGE
    assert (match.checkpoint is None) == (match.end == 0)


# Using.


def test_a_used_match_belongs_to_the_caller() -> None:
    shelf = Shelf()
    shelf.publish(run(1, 2))
    match = shelf.match(run(1, 2, 3))
    lease = shelf.index.use(match, "request")
    shelf.index.clear()
    assert shelf.pool.end(lease) == 2 * PAGE
    assert [shelf.pages.references(page) for page in match.pages] == [1, 1]
    shelf.pool.release(lease)
    shelf.pages.release(match.pages)
    assert (shelf.pool.num_free, shelf.pages.num_free) == (16, 64)


def test_uses_are_counted_by_anchor_kind() -> None:
    shelf = Shelf()
    shelf.publish(run(1))
    for _ in range(2):
        shelf.pool.release(shelf.index.use(shelf.match(run(1, 2)), "request"))
    assert shelf.at(run(1)).uses == 2
    assert shelf.index.hits == {AnchorKind.PROMPT_END: 2}


def test_a_match_that_was_evicted_cannot_be_used() -> None:
    shelf = Shelf()
    shelf.publish(run(1))
    match = shelf.match(run(1, 2))
    shelf.index.evict_slot()
    shelf.publish(run(1))
    for stale in (match, shelf.match(run(9, 9))):
        with pytest.raises(LeaseError):
            shelf.index.use(stale, "request")
    assert shelf.pages.num_free == 63


# Publishing.


def test_publishing_keeps_the_lease_and_references_new_pages_only() -> None:
    shelf = Shelf()
    first, second = shelf.pages.take(2), shelf.pages.take(3)
    one, two = shelf.state(2 * PAGE), shelf.state(3 * PAGE)
    kind = AnchorKind.LADDER
    assert shelf.index.publish(run(1, 2), 2 * PAGE, first, one, kind, SALT)
    assert shelf.index.publish(run(1, 2, 3), 3 * PAGE, second, two, kind, SALT)
    assert [shelf.pages.references(page) for page in first] == [2, 2]
    assert [shelf.pages.references(page) for page in second] == [1, 1, 2]
    assert shelf.match(run(1, 2, 3, 4)).pages == (*first, second[2])
    assert (one.live, two.live, shelf.index.num_pages) == (True, True, 3)


def test_of_two_equal_checkpoints_the_older_stays() -> None:
    shelf = Shelf()
    assert shelf.publish(run(1))
    older, free = shelf.at(run(1)), shelf.pool.num_free
    assert not shelf.publish(run(1))
    assert shelf.at(run(1)) is older
    assert (shelf.pool.num_free, shelf.pages.num_free) == (free, 63)


@pytest.mark.parametrize("end", [0, -PAGE, PAGE + 1, 3 * PAGE])
def test_a_state_that_is_not_whole_is_never_published(end: int) -> None:
    shelf = Shelf()
    handles, lease = shelf.pages.take(2), shelf.state(2 * PAGE)
    kind = AnchorKind.LADDER
    with pytest.raises(Broken):
        shelf.index.publish(run(1, 2), end, handles, lease, kind, SALT)
    with pytest.raises(Broken):
        shelf.index.publish(run(1), 2 * PAGE, handles, lease, kind, SALT)
    with pytest.raises(Broken):
        shelf.index.publish(run(1, 2), 2 * PAGE, handles[:1], lease, kind, SALT)
    stale = [handles[0], PageHandle(handles[1].id, 7)]
    with pytest.raises(LeaseError):
        shelf.index.publish(run(1, 2), 2 * PAGE, stale, lease, kind, SALT)
    assert (shelf.index.num_pages, lease.live) == (0, True)
    assert shelf.match(run(1, 2, 3)).reason == "never_seen"


def test_an_open_slot_is_never_published() -> None:
    shelf = Shelf()
    handles, lease = shelf.pages.take(1), shelf.pool.take("request")
    shelf.pool.record_end(lease, PAGE)
    with pytest.raises(LeaseError):
        shelf.index.publish(run(1), PAGE, handles, lease, AnchorKind.LADDER, SALT)  # type: ignore[arg-type]


def test_a_quarantined_checkpoint_is_not_found_and_is_replaced() -> None:
    shelf = Shelf()
    shelf.publish(run(1))
    slot = shelf.at(run(1)).lease.slot
    shelf.pool.quarantine(slot, "a defect")
    assert shelf.match(run(1, 2)).reason == "no_checkpoint"
    assert shelf.publish(run(1))
    assert shelf.match(run(1, 2)).end == PAGE
    assert shelf.pool.holders(slot) == ()


# Making room.


def test_the_slot_used_longest_ago_goes_first() -> None:
    shelf = Shelf()
    for page in (1, 2, 3):
        shelf.publish(run(page))
    shelf.pool.release(shelf.index.use(shelf.match(run(1, 9)), "request"))
    assert shelf.index.evict_slot()
    assert [shelf.match(run(page, 9)).reason for page in (1, 2, 3)] == ["hit", "evicted", "hit"]


def test_a_leased_or_protected_slot_is_not_evicted() -> None:
    shelf = Shelf()
    shelf.publish(run(1))
    lease = shelf.index.use(shelf.match(run(1, 9)), "request")
    assert (shelf.index.evictable_slots, shelf.index.evict_slot()) == (0, False)
    shelf.pool.release(lease)
    protect = frozenset([shelf.at(run(1))])
    assert (shelf.index.evictable_slots, shelf.index.evict_slot(protect)) == (1, False)
    assert shelf.index.evict_slot()


def test_what_could_be_evicted_is_counted_by_what_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many checkpoints there are, one request more costs a look at its own slot or two."""
    shelf = Shelf(slots=400, pages=400)
    for page in range(300):
        shelf.publish(run(page))
    assert shelf.index.evictable_slots == 300
    looks: list[object] = []
    frees = PrefixIndex._frees_a_slot

    def counted(self: PrefixIndex, checkpoint: Checkpoint) -> bool:
        looks.append(checkpoint)
        return frees(self, checkpoint)

    monkeypatch.setattr(PrefixIndex, "_frees_a_slot", counted)
    for _ in range(50):
        assert shelf.index.evictable_slots == 300
    assert not looks
    lease = shelf.index.use(shelf.match(run(7, 9)), "request")
    assert shelf.index.evictable_slots == 299
    shelf.pool.release(lease)
    assert shelf.index.evictable_slots == 300
    shelf.publish(run(333))
    assert shelf.index.evictable_slots == 301
    shelf.pool.quarantine(shelf.at(run(8)).lease.slot, "a defect")
    assert shelf.index.evictable_slots == 300
    shelf.index.drop(shelf.at(run(9)))
    assert shelf.index.evictable_slots == 299
    assert len(looks) < 10


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=60), st.booleans())
def test_uses_reach_the_pages_above_as_if_each_had_been_told(
    does: list[tuple[int, int]], deep: bool
) -> None:
    """The same pages go in the same order as where every page of a path is told of every use."""
    plain, eager = Shelf(), Shelf()
    eager.index = _Eager(eager.pool, eager.pages, PAGE)
    prompts = [run(*(branch if deep or at else 0 for at in range(6))) for branch in range(6)]
    for branch, length in does:
        for shelf in (plain, eager):
            tokens = prompts[branch][: length * PAGE]
            if branch == 5:
                shelf.index.evict_pages(length)
            elif length == 6:
                shelf.index.evict_slot()
            elif shelf.pool.num_free and shelf.pages.num_free >= length:
                shelf.publish(tokens)
            found = shelf.match((*tokens, 1))
            if found.checkpoint is not None:
                shelf.pool.release(shelf.index.use(found, "request"))
                shelf.pages.release(found.pages)
        assert [plain.match(p).indexed_end for p in prompts] == [
            eager.match(p).indexed_end for p in prompts
        ]
        assert [plain.match(p).end for p in prompts] == [eager.match(p).end for p in prompts]
        assert plain.index.evictable_slots == sum(
            map(plain.index._frees_a_slot, plain.index.checkpoints())
        )


class _Eager(PrefixIndex):
    """Tells every page of a path of a use, at once."""

    def _touch(self, checkpoint: Checkpoint, node: PageNode) -> None:
        super()._touch(checkpoint, node)
        above = node.parent
        while above is not None:
            above.last_used = node.last_used
            above = above.parent


def test_a_use_costs_the_same_however_long_the_path_is() -> None:
    """Pages above are told of it when those below them go."""
    shelf = Shelf()
    for pages in ((1, 2), (3,)):
        shelf.publish(run(*pages))
    match = shelf.match(run(1, 2, 9))
    shelf.pool.release(shelf.index.use(match, "request"))
    shelf.pages.release(match.pages)
    node = shelf.index.node_of(shelf.at(run(1, 2)))
    above = node.parent
    assert above is not None
    assert node.last_used > above.last_used
    while shelf.index.evict_slot():
        pass
    shelf.index.forget(node)
    assert node.last_used == above.last_used
    assert shelf.index.evict_pages(1) == 1
    found = [shelf.match(run(page, 9)).indexed_end for page in (1, 3)]
    assert found == [PAGE, 0], "the page of the later use stays"


def test_a_dropped_checkpoint_lives_on_with_its_reader() -> None:
    shelf = Shelf()
    shelf.publish(run(1))
    lease = shelf.index.use(shelf.match(run(1, 9)), "request")
    checkpoint = shelf.index.checkpoint_at(lease.slot)
    assert checkpoint is not None
    shelf.index.drop(checkpoint)
    assert shelf.index.checkpoint_at(lease.slot) is None
    assert shelf.pool.reopen(lease) is not None
    with pytest.raises(LeaseError):
        shelf.index.drop(checkpoint)


def test_pages_go_leaf_first_and_those_without_a_state_before_those_with_one() -> None:
    shelf = Shelf()
    shelf.publish(run(1, 2, 3))
    shelf.publish(run(1))
    shelf.publish(run(4))
    shelf.index.drop(shelf.at(run(1, 2, 3)))
    assert shelf.index.evict_pages(1) == 1
    assert shelf.match(run(1, 2, 3)).indexed_end == 2 * PAGE
    assert shelf.index.evict_pages(1) == 1
    assert shelf.match(run(1, 2, 3)).indexed_end == PAGE
    assert shelf.index.num_checkpoints == 2
    # Now one with a state must go: what would have started deeper falls back on the first.
    assert shelf.index.evict_pages(1) == 1
    assert [shelf.match(run(page, 9)).reason for page in (1, 4)] == ["hit", "evicted"]


def test_a_page_above_one_in_use_is_not_evicted() -> None:
    shelf = Shelf()
    shelf.publish(run(1, 2, 3))
    (leaf,) = shelf.match(run(1, 2, 3, 4)).pages[2:]
    shelf.pages.retain([leaf])
    assert (shelf.index.evictable_pages, shelf.index.evict_pages(9)) == (0, 0)
    shelf.pages.release([leaf])
    assert (shelf.index.evictable_pages, shelf.index.evict_pages(9)) == (3, 3)
    assert (shelf.pages.num_free, shelf.pool.num_free) == (64, 16)


def test_the_queue_of_leaves_does_not_grow_with_time() -> None:
    shelf = Shelf()
    for _ in range(1000):
        shelf.publish(run(1))
        shelf.index.evict_slot()
    assert len(shelf.index._queue) < 100
    assert shelf.index.evict_pages(1) == 1


def test_a_new_epoch_finds_nothing_and_gives_everything_back() -> None:
    shelf = Shelf()
    for page in (1, 2, 3):
        shelf.publish(run(page, page))
    shelf.index.clear()
    assert (shelf.pool.num_free, shelf.pages.num_free, shelf.index.num_pages) == (16, 64, 0)
    assert (shelf.index.evict_slot(), shelf.index.evict_pages(5)) == (False, 0)
    assert shelf.publish(run(1))


def test_digests_are_computed_once_for_what_a_prompt_has_in_common(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages: list[bytes] = []
    honest = chain.page_digest

    def counted(above: bytes, page: bytes) -> bytes:
        pages.append(page)
        return honest(above, page)

    monkeypatch.setattr(chain, "page_digest", counted)
    shelf = Shelf()
    for end in (1, 2, 3):
        shelf.publish(run(1, 2, 3), end * PAGE)
    assert len(pages) == 3
    assert shelf.match(run(1, 2, 7, 8)).end == 2 * PAGE  # as far as both are alike
    assert len(pages) == 4
    assert shelf.match(run(1, 2, 3, 4)).end == 3 * PAGE
    for other in range(20, 40):
        shelf.match(run(other, 2, 3))
    assert len(shelf.index._chains._hashed) <= chain.REMEMBERED_CHAINS


def test_pages_are_told_as_far_as_they_go_with_or_without_a_state() -> None:
    shelf = Shelf()
    shelf.publish(run(1, 2, 3))
    known = [node.page for node in shelf.index.nodes()]
    salt = next(shelf.index.nodes()).salt
    assert shelf.index.pages_of(run(1, 2, 9), salt, 3 * PAGE) == known[:2]
    shelf.index.evict_slot()
    assert shelf.index.pages_of(run(1, 2, 3, 4), salt, 2 * PAGE) == known[:2]
    assert shelf.index.pages_of(run(2), salt, PAGE) == []


def test_the_next_victim_is_told_and_stays() -> None:
    shelf = Shelf()
    shelf.publish(run(1, 2))
    shelf.publish(run(5, 6, 7))
    both = list(shelf.index.checkpoints())
    victim = shelf.index.next_victim(both)
    assert victim in both
    assert shelf.index.num_checkpoints == 2
    other = next(one for one in both if one is not victim)
    assert shelf.index.next_victim([other]) is other
    shelf.index.evict_slot()
    assert list(shelf.index.checkpoints()) == [other]
