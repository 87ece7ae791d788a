"""The whole state layer against a symbolic arena, as one random machine.

A state is a fold over tokens, so here a slot's content is the tuple of tokens folded into it, and a
page's content the tuple of tokens written to it, both with the salt they were computed under. What
is free holds poison; what a step in flight writes is torn until the step is committed. Then one
assertion turns every mistake of ownership into a visible difference: what I read at position p is
my own first p tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import hypothesis.strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from millpond.errors import Exhausted, LeaseError
from millpond.state import audit
from millpond.state.checkpoint import AnchorKind, Checkpoint, prefix_salt
from millpond.state.lease import IoLease, Lease, ProducerLease, ReaderLease, Seat, SlotId
from millpond.state.pages import PageHandle, PagePool
from millpond.state.pool import StatePool
from millpond.state.prefix import PrefixIndex, PrefixMatch
from millpond.state.running import RunningState

PAGE = 2
POISON = ("poison",)
TORN = ("torn",)

Tokens = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """A planned step of one request."""

    seat: Seat
    start: int
    tokens: Tokens
    state_in: SlotId | None
    state_out: SlotId
    exports: tuple[tuple[int, SlotId], ...]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(eq=False)
class Request:
    """A sequence: `tokens` are folded, `todo` are known and not folded."""

    salt: bytes
    state: RunningState
    todo: Tokens
    tokens: Tokens = ()
    pages: list[PageHandle] = field(default_factory=list)
    row: Row | None = None
    ahead: Row | None = None  # the step after that one
    held: ReaderLease | None = None  # its newest decode checkpoint, not findable yet
    aborted: bool = False


@dataclass(eq=False)
class Put:
    lease: IoLease
    pages: tuple[PageHandle, ...]
    salt: bytes
    tokens: Tokens


@dataclass(eq=False)
class Get:
    lease: ProducerLease
    pages: list[PageHandle]
    salt: bytes
    tokens: Tokens


picks = st.integers(0, 7)
# Prompts that share beginnings of every length, so that most of them meet in the tree.
STEMS = ((0,) * 9, (0, 0, 0, 0, 1, 1, 1, 1, 1), (0, 0, 0, 1, 0, 0, 0, 0, 0), (1,) * 9)
token_lists = st.builds(
    lambda stem, n: stem[:n], st.sampled_from(STEMS), st.integers(1, 9).map(lambda n: 10 - n)
)
few_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


def some(name: str) -> Callable[[World], bool]:
    """A rule that needs at least one of `name`."""
    return lambda self: bool(getattr(self, name))


class World(RuleBasedStateMachine):
    """Requests, transfers and evictions over one pool, one page pool and one index."""

    @initialize(slots=st.integers(2, 9), pages=st.integers(6, 24))
    def build(self, slots: int, pages: int) -> None:
        self.pool = StatePool(slots)
        self.pages = PagePool(pages)
        self.index = PrefixIndex(self.pool, self.pages, PAGE)
        self.slot_bytes: list[object] = [POISON] * slots
        self.page_bytes: list[object] = [POISON] * pages
        self.epoch = 0
        self.named = 0
        self.requests: list[Request] = []
        self.puts: list[Put] = []
        self.gets: list[Get] = []
        self.matches: list[tuple[PrefixMatch, bytes, Tokens]] = []  # noted, used later or never
        self.spent: list[Lease] = []
        self.handles: dict[int, PageHandle] = {}  # the newest handle of each page
        self.stale: list[PageHandle] = []

    # The device.

    def reads(
        self, salt: bytes, tokens: Tokens, slot: SlotId | None, pages: Sequence[PageHandle]
    ) -> None:
        """What I read at position p is my own first p tokens."""
        state = (salt, ()) if slot is None else self.slot_bytes[slot]
        assert state == (salt, tokens)
        for depth in range(-(-len(tokens) // PAGE)):
            own = tokens[depth * PAGE : (depth + 1) * PAGE]
            assert self.page_bytes[pages[depth].id] == (salt, own)

    def writes_pages(self, request: Request, start: int) -> None:
        tokens = request.tokens
        for depth in range(start // PAGE, -(-len(tokens) // PAGE)):
            own = tokens[depth * PAGE : (depth + 1) * PAGE]
            self.page_bytes[request.pages[depth].id] = (request.salt, own)

    def poison(self) -> None:
        for slot in self.pool.drain_freed():
            self.slot_bytes[slot] = POISON
        for page in self.pages.drain_freed():
            self.page_bytes[page] = POISON
            self.stale.append(self.handles[page])

    # Helpers of the rules.

    def salt(self, number: int) -> bytes:
        return prefix_salt(
            epoch=self.epoch, model_identity=b"model", adapter="", cache_salt=str(number % 2)
        )

    def name(self, kind: str) -> str:
        self.named += 1
        return f"{kind}{self.named}"

    @property
    def idle(self) -> list[Request]:
        return [request for request in self.requests if request.row is None]

    @property
    def stepping(self) -> list[Request]:
        return [request for request in self.requests if request.row is not None]

    @property
    def on_the_grid(self) -> list[Request]:
        """Requests whose state could be a checkpoint."""
        return [r for r in self.requests if r.tokens and len(r.tokens) % PAGE == 0]

    @property
    def on_a_checkpoint(self) -> list[Request]:
        """Idle requests that stand on a state the index holds too."""
        slots = {checkpoint.lease.slot for checkpoint in self.index.checkpoints()}
        return [request for request in self.idle if request.state.slot in slots]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        return list(self.index.checkpoints())

    def pick(self, things: Sequence[T], number: int) -> T:
        return things[number % len(things)]

    def with_room(self, attempt: Callable[[], T], request: Request | None = None) -> T | None:
        """Try, evicting slots meanwhile; then a request takes its own checkpoint back."""
        while True:
            try:
                return attempt()
            except Exhausted:
                if self.index.evict_slot():
                    self.poison()
                    continue
                slot = None if request is None else request.state.slot
                own = None if slot is None else self.index.checkpoint_at(slot)
                if own is None:
                    return None
                self.index.drop(own)

    def take_pages(self, n: int) -> list[PageHandle] | None:
        short = n - self.pages.num_free
        if short > 0:
            self.index.evict_pages(short)
            self.poison()
        try:
            taken = self.pages.take(n)
        except Exhausted:
            return None
        self.handles.update((handle.id, handle) for handle in taken)
        return taken

    def begin(self, request: Request) -> None:
        """Start, from the deepest checkpoint of its tokens where there is one."""
        match = self.index.match(request.todo, request.salt, len(request.todo) - 1)
        assert match.end < len(request.todo)
        self.begin_at(request, match)

    def begin_at(self, request: Request, match: PrefixMatch) -> None:
        lease = None
        if match.checkpoint is not None:
            lease = self.index.use(match, request.state.holder)
            request.pages = list(match.pages)
        request.tokens, request.todo = request.todo[: match.end], request.todo[match.end :]
        request.state.start(lease)
        self.reads(request.salt, request.tokens, request.state.slot, request.pages)

    def drop_all(self, request: Request) -> None:
        self.spent.extend(request.state.leases)
        request.state.close(self.pool)
        self.pages.release(request.pages)
        request.pages = []
        if request.held is not None:
            self.pool.release(request.held)
            request.held = None

    def restart(self, request: Request) -> None:
        self.drop_all(request)
        request.tokens, request.todo = (), request.tokens + request.todo
        self.begin(request)

    def settle(self, request: Request) -> None:
        """A step is over: a request aborted meanwhile goes now, or after one still in flight."""
        if request.aborted and request.row is None:
            self.drop_all(request)
            self.requests.remove(request)

    def undo(self, request: Request, row: Row) -> None:
        keep = -(-row.start // PAGE)
        self.pages.release(request.pages[keep:])
        del request.pages[keep:]
        later = () if request.ahead is None else request.ahead.tokens
        request.todo = row.tokens + later + request.todo
        request.row = request.ahead = None

    def index_it(self, request: Request, end: int, lease: ReaderLease, kind: AnchorKind) -> None:
        self.index.publish(request.tokens, end, request.pages, lease, kind, request.salt)

    # Requests.

    @rule(tokens=token_lists, number=picks)
    def admit(self, tokens: Tokens, number: int) -> None:
        request = Request(self.salt(number), RunningState(self.name("request")), tokens)
        self.begin(request)
        self.requests.append(request)

    @precondition(some("requests"))
    @rule(pick=picks, more=few_tokens, again=st.booleans())
    def admit_next_turn(self, pick: int, more: Tokens, again: bool) -> None:
        like = self.pick(self.requests, pick)
        tokens = like.tokens if again and like.tokens else like.tokens + more
        request = Request(like.salt, RunningState(self.name("request")), tokens)
        self.begin(request)
        self.requests.append(request)

    @precondition(some("idle"))
    @rule(pick=picks, more=few_tokens, cut=st.integers(1, 5), export=st.booleans())
    def plan(self, pick: int, more: Tokens, cut: int, export: bool) -> None:
        self.plan_step(self.pick(self.idle, pick), more, cut, export=export)

    @precondition(some("stepping"))
    @rule(pick=picks, unwritten=st.sets(st.integers(0, 3)))
    def commit(self, pick: int, unwritten: set[int]) -> None:
        self.commit_step(self.pick(self.stepping, pick), unwritten)

    @rule(
        tokens=token_lists, number=picks, unwritten=st.sets(st.integers(0, 3)), stay=st.booleans()
    )
    def serve(self, tokens: Tokens, number: int, unwritten: set[int], stay: bool) -> None:
        """Admit, fold up to the last anchor in one step, and publish the state there."""
        self.admit(tokens, number)
        request = self.requests[-1]
        cut = (len(tokens) - 1) // PAGE * PAGE - len(request.tokens)
        if cut and self.plan_step(request, (), cut, export=True):
            self.commit_step(request, unwritten)
            self.publish_state(request, AnchorKind.PROMPT_END)
        if not stay:
            request.aborted = True
            self.settle(request)

    @precondition(some("idle"))
    @rule(
        pick=picks, more=few_tokens, fails=st.booleans(), keep=st.sampled_from([None, False, True])
    )
    def decode(self, pick: int, more: Tokens, fails: bool, keep: bool | None) -> None:
        """Token by token; with `keep` not None, a second step each while the first is in flight."""
        request = self.pick(self.idle, pick)
        for token in more:
            if self.plan_step(request, (token,), 1, export=False):
                if keep is not None:
                    self.plan_another(request, (token,), keep)
                while request.row is not None:
                    self.commit_step(request, set())
                    self.everybody_reads_their_own_tokens()
        if fails and self.plan_step(request, (0,), 1, export=False):
            if keep is not None:
                self.plan_another(request, (1,), keep)
            self.fail_step(request)

    def plan_step(self, request: Request, more: Tokens, cut: int, *, export: bool) -> bool:
        request.todo = request.todo or more
        tokens, rest = request.todo[:cut], request.todo[cut:]
        start = request.state.end(self.pool)  # the ledger says where the next token goes
        end = start + len(tokens)
        fresh = self.take_pages(-(-end // PAGE) - len(request.pages))
        if fresh is None:
            return False
        slots = self.with_room(lambda: request.state.plan_output(self.pool), request)
        if slots is None:
            self.pages.release(fresh)
            return False
        request.pages += fresh
        state_in, state_out = slots
        exports = []
        for anchor in range(start + 1, end) if export else ():
            if anchor % PAGE == 0 and self.pool.num_free:
                slot = request.state.plan_export(self.pool, anchor)
                exports.append((anchor, slot))
        request.todo = rest
        seat = Seat(self.requests.index(request))
        request.row = Row(seat, start, tokens, state_in, state_out, tuple(exports))
        self.tear(request.row)
        return True

    def tear(self, row: Row) -> None:
        for slot in (row.state_out, *(slot for _, slot in row.exports)):
            if slot != row.state_in:
                self.slot_bytes[slot] = TORN

    @precondition(some("stepping"))
    @rule(pick=picks, more=few_tokens, keep=st.booleans())
    def plan_ahead(self, pick: int, more: Tokens, keep: bool) -> None:
        """Plan another step while one is in flight; the state between them may have to stay."""
        self.plan_another(self.pick(self.stepping, pick), more, keep)

    def plan_another(self, request: Request, more: Tokens, keep: bool) -> None:
        row = request.row
        assert row is not None
        if request.ahead is not None or request.todo:
            return
        fresh = self.take_pages(-(-(row.end + len(more)) // PAGE) - len(request.pages))
        if fresh is None:
            return
        request.pages += fresh
        slot = out = request.state.plan_ahead()
        if keep and self.pool.num_free:
            out = request.state.keep_input(self.pool)
        exports = []
        for anchor in range(row.end + 1, row.end + len(more)):
            if anchor % PAGE == 0 and self.pool.num_free:
                exports.append((anchor, request.state.plan_export(self.pool, anchor)))
        request.ahead = Row(row.seat, row.end, more, slot, out, tuple(exports))
        self.tear(request.ahead)

    def commit_step(self, request: Request, unwritten: set[int]) -> None:
        row = request.row
        assert row is not None
        self.reads(request.salt, request.tokens, row.state_in, request.pages)
        assert row.start == len(request.tokens)
        request.tokens += row.tokens
        self.writes_pages(request, row.start)
        self.slot_bytes[row.state_out] = (request.salt, request.tokens)
        written = {(row.state_out, row.end)}
        for number, (end, slot) in enumerate(row.exports):
            if number not in unwritten:
                self.slot_bytes[slot] = (request.salt, request.tokens[:end])
                written.add((slot, end))
        for export in request.state.commit(self.pool, row.end, written):
            self.index_it(request, export.end, export.lease, AnchorKind.LADDER)
        request.row, request.ahead = request.ahead, None
        self.settle(request)

    @precondition(some("stepping"))
    @rule(pick=picks)
    def fail(self, pick: int) -> None:
        """The forward failed somewhere: whatever it was to write may be anything now."""
        self.fail_step(self.pick(self.stepping, pick))

    def fail_step(self, request: Request) -> None:
        row = request.row
        assert row is not None
        for one in (row,) if request.ahead is None else (row, request.ahead):
            for slot in (one.state_out, *(slot for _, slot in one.exports)):
                self.slot_bytes[slot] = TORN
        request.state.discard(self.pool)
        self.undo(request, row)
        if request.state.end(self.pool) != row.start:
            self.restart(request)
        self.settle(request)

    @precondition(some("stepping"))
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        request = self.pick(self.stepping, pick)
        row = request.row
        assert row is not None
        request.state.cancel(self.pool)
        self.undo(request, row)
        self.settle(request)

    @precondition(some("on_the_grid"))
    @rule(pick=picks, kind=st.sampled_from(AnchorKind), offer=st.booleans())
    def publish(self, pick: int, kind: AnchorKind, offer: bool) -> None:
        request = self.pick(self.on_the_grid, pick)
        self.publish_state(request, kind)
        slot = request.state.slot
        checkpoint = None if slot is None else self.index.checkpoint_at(slot)
        if offer and checkpoint is not None:
            self.put(checkpoint)

    def publish_state(self, request: Request, kind: AnchorKind) -> None:
        try:
            lease = request.state.publish(self.pool)
        except LeaseError:
            assert request.row is not None
        else:
            self.index_it(request, len(request.tokens), lease, kind)

    @precondition(some("on_the_grid"))
    @rule(pick=picks)
    def hold(self, pick: int) -> None:
        """Keep the newest decode checkpoint until the request ends."""
        request = self.pick(self.on_the_grid, pick)
        if request.row is None:
            older, request.held = request.held, request.state.publish(self.pool, "held")
            if older is not None:
                self.pool.release(older)

    @precondition(some("idle"))
    @rule(pick=picks, n=st.integers(1, 3))
    def fan_out(self, pick: int, n: int) -> None:
        request = self.pick(self.idle, pick)
        partial = len(request.tokens) % PAGE
        copies = self.take_pages(n - 1 if partial else 0)
        if copies is None or not request.tokens:
            return
        whole = request.pages[: len(request.tokens) // PAGE]
        for other in request.state.fan_out(self.pool, n):
            self.pages.retain(whole)
            sibling = Request(request.salt, other, request.todo, request.tokens, list(whole))
            if partial:
                sibling.pages.append(copies.pop())
                content = self.page_bytes[request.pages[len(whole)].id]
                self.page_bytes[sibling.pages[-1].id] = content
            self.requests.append(sibling)

    @precondition(some("idle"))
    @rule(pick=picks)
    def preempt(self, pick: int) -> None:
        self.restart(self.pick(self.idle, pick))

    @precondition(some("idle"))
    @rule(pick=picks)
    def finish(self, pick: int) -> None:
        request = self.pick(self.idle, pick)
        if request.held is not None:
            lease, request.held = request.held, None
            self.index_it(request, self.pool.end(lease), lease, AnchorKind.DECODE)
        self.drop_all(request)
        self.requests.remove(request)

    @precondition(some("requests"))
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        request = self.pick(self.requests, pick)
        request.aborted = True
        if request.row is None:
            self.settle(request)

    # The index.

    @precondition(some("checkpoints"))
    @rule(tokens=token_lists, number=picks)
    def note_a_match(self, tokens: Tokens, number: int) -> None:
        salt = self.salt(number)
        self.matches.append((self.index.match(tokens, salt, len(tokens) - 1), salt, tokens))

    @precondition(some("matches"))
    @rule(pick=picks)
    def admit_from_a_noted_match(self, pick: int) -> None:
        match, salt, tokens = self.matches.pop(pick % len(self.matches))
        request = Request(salt, RunningState(self.name("request")), tokens)
        try:
            self.begin_at(request, match)
        except LeaseError:
            assert match.checkpoint not in set(self.index.checkpoints())
            return
        self.requests.append(request)

    @precondition(some("checkpoints"))
    @rule()
    def evict_a_slot(self) -> None:
        free, evictable = self.pool.num_free, self.index.evictable_slots
        assert self.index.evict_slot() == (evictable > 0)
        assert self.pool.num_free == free + (evictable > 0)

    @precondition(lambda self: self.index.num_pages)
    @rule(n=st.integers(1, 20))
    def evict_some_pages(self, n: int) -> None:
        free, evictable = self.pages.num_free, self.index.evictable_pages
        freed = self.index.evict_pages(n)
        assert freed == min(n, evictable)
        assert self.pages.num_free == free + freed

    @precondition(some("checkpoints"))
    @rule(pick=picks)
    def drop_a_checkpoint(self, pick: int) -> None:
        self.index.drop(self.pick(self.checkpoints, pick))

    @precondition(some("on_a_checkpoint"))
    @rule(pick=picks)
    def go_on_without_the_checkpoint(self, pick: int) -> None:
        """Take a request's own checkpoint out of the index, so that it may run in place."""
        request = self.pick(self.on_a_checkpoint, pick)
        slot = request.state.slot
        own = None if slot is None else self.index.checkpoint_at(slot)
        assert own is not None
        self.index.drop(own)
        if self.plan_step(request, (1,), 1, export=False):
            self.commit_step(request, set())

    @precondition(some("checkpoints"))
    @rule()
    def new_epoch(self) -> None:
        self.index.clear()
        self.epoch += 1

    # Transfers.

    def promise(self, checkpoint: Checkpoint) -> tuple[tuple[PageHandle, ...], bytes, Tokens]:
        """The pages, salt and tokens a checkpoint stands for, as its place in the tree says."""
        node = self.index.node_of(checkpoint)
        pages, packed, salt = [], b"", node.salt
        while node.parent is not None:
            pages.append(node.page)
            packed = node.tokens + packed
            node = node.parent
        return tuple(reversed(pages)), salt, tuple(memoryview(packed).cast("i"))

    @precondition(some("checkpoints"))
    @rule(pick=picks)
    def start_put(self, pick: int) -> None:
        self.put(self.pick(self.checkpoints, pick))

    def put(self, checkpoint: Checkpoint) -> None:
        pages, salt, tokens = self.promise(checkpoint)
        self.pages.retain(pages)
        lease = self.pool.pin(checkpoint.lease, self.name("put"))
        self.puts.append(Put(lease, pages, salt, tokens))

    @precondition(some("puts"))
    @rule(pick=picks)
    def finish_put(self, pick: int) -> None:
        put = self.puts.pop(pick % len(self.puts))
        self.reads(put.salt, put.tokens, put.lease.slot, put.pages)
        self.spent.append(put.lease)
        self.pool.release(put.lease)
        self.pages.release(put.pages)

    @rule(tokens=token_lists, number=picks)
    def start_get(self, tokens: Tokens, number: int) -> None:
        tokens = tokens[: len(tokens) // PAGE * PAGE]
        if not tokens or not self.pool.num_free:
            return
        pages = self.take_pages(len(tokens) // PAGE)
        if pages is not None:
            lease = self.pool.take(self.name("get"))
            self.slot_bytes[lease.slot] = TORN
            self.gets.append(Get(lease, pages, self.salt(number), tokens))

    @precondition(some("gets"))
    @rule(pick=picks, arrived=st.booleans())
    def finish_get(self, pick: int, arrived: bool) -> None:
        get = self.gets.pop(pick % len(self.gets))
        self.spent.append(get.lease)
        if arrived and get.salt in (self.salt(0), self.salt(1)):
            self.slot_bytes[get.lease.slot] = (get.salt, get.tokens)
            for depth, handle in enumerate(get.pages):
                own = get.tokens[depth * PAGE : (depth + 1) * PAGE]
                self.page_bytes[handle.id] = (get.salt, own)
            end = len(get.tokens)
            self.pool.record_end(get.lease, end)
            sealed = self.pool.seal(get.lease)
            self.index.publish(get.tokens, end, get.pages, sealed, AnchorKind.PROMPT_END, get.salt)
        else:
            self.pool.release(get.lease)
        self.pages.release(get.pages)

    # What must be refused.

    @precondition(some("spent"))
    @rule(pick=picks)
    def release_a_spent_lease(self, pick: int) -> None:
        self.must_be_refused(lambda: self.pool.release(self.pick(self.spent, pick)))

    @precondition(some("stale"))
    @rule(pick=picks)
    def release_a_stale_page(self, pick: int) -> None:
        self.must_be_refused(lambda: self.pages.release([self.pick(self.stale, pick)]))

    @precondition(some("stepping"))
    @rule(pick=picks)
    def give_away_a_state_that_is_being_written(self, pick: int) -> None:
        state = self.pick(self.stepping, pick).state
        self.must_be_refused(lambda: state.publish(self.pool))
        self.must_be_refused(lambda: state.fan_out(self.pool, 2))
        self.must_be_refused(lambda: state.close(self.pool))

    def must_be_refused(self, attempt: Callable[[], object]) -> None:
        try:
            attempt()
        except LeaseError:
            return
        raise AssertionError("a spent lease or a stale handle was accepted")

    # Always.

    @invariant()
    def the_order_of_eviction_knows_what_is_findable(self) -> None:
        """Each checkpoint, under the next shallower one on its path; and how many lie under it."""
        order, above = self.index.order, {}
        for checkpoint in self.checkpoints:
            node = self.index.node_of(checkpoint).parent
            while node is not None and node.checkpoint is None:
                node = node.parent
            above[checkpoint] = None if node is None else node.checkpoint
        assert set(order._standings) == set(above)
        for checkpoint, standing in order._standings.items():
            known = order._above(standing)
            assert (None if known is None else known.checkpoint) is above[checkpoint]
            assert standing.below == list(above.values()).count(checkpoint)

    @invariant()
    def everybody_reads_their_own_tokens(self) -> None:
        self.poison()
        for request in self.requests:
            if request.row is None or request.row.state_in != request.row.state_out:
                self.reads(request.salt, request.tokens, request.state.slot, request.pages)
            anchor = request.state.anchor
            if anchor is not None:
                kept = (request.salt, request.tokens[: anchor.end])
                assert self.slot_bytes[anchor.lease.slot] == kept
        for checkpoint in self.index.checkpoints():
            pages, salt, tokens = self.promise(checkpoint)
            assert len(tokens) == checkpoint.end
            self.reads(salt, tokens, checkpoint.lease.slot, pages)
        for put in self.puts:
            self.reads(put.salt, put.tokens, put.lease.slot, put.pages)

    @invariant()
    def the_ledger_is_sound(self) -> None:
        audit.run(self.house())

    def house(self, *, asleep: bool = False) -> audit.House:
        transfers: list[Put | Get] = [*self.puts, *self.gets]
        held = [request.held for request in self.requests if request.held is not None]
        return audit.House(
            pool=self.pool,
            pages=self.pages,
            index=self.index,
            running=[request.state for request in self.requests],
            leases=[*held, *(transfer.lease for transfer in transfers)],
            page_runs=[*(r.pages for r in self.requests), *(t.pages for t in transfers)],
            flights=[
                [request.row for request in self.requests if request.row is not None],
                [request.ahead for request in self.requests if request.ahead is not None],
            ],
            asleep=asleep,
        )

    def teardown(self) -> None:
        """Everybody leaves: nothing may be left behind."""
        if not hasattr(self, "pool") or sys.exception() is not None:
            return
        for request in list(self.requests):
            if request.row is not None:
                request.state.cancel(self.pool)
            self.drop_all(request)
            self.requests.remove(request)
        transfers: list[Put | Get] = [*self.puts, *self.gets]
        for transfer in transfers:
            self.pool.release(transfer.lease)
            self.pages.release(transfer.pages)
        self.puts, self.gets = [], []
        self.index.clear()
        audit.run(self.house(asleep=True))
