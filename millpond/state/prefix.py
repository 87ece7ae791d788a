"""The prefix index: a tree of token pages that carries checkpoints. Knows no tensor, no request.

A node is one page of tokens below all pages before it; its checkpoint, if any, is the state after
it. Nodes go leaf first and a checkpoint goes before its node, so a checkpoint without its whole
page path cannot exist. The index is an ordinary holder of leases and page references: evicting is
releasing, and what somebody else holds too is not evicted.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count

from millpond.errors import Broken, LeaseError
from millpond.state.chain import Chains
from millpond.state.checkpoint import AnchorKind, Checkpoint, CheckpointKey, root_digest
from millpond.state.lease import Phase, ReaderLease, SlotId
from millpond.state.pages import PageHandle, PagePool
from millpond.state.pool import StatePool
from millpond.state.tree import NO_PAGE, PageNode, PrefixMatch
from millpond.state.value import Departure, EvictionOrder, EvictionPolicy, nominal_seconds

__all__ = ["PageNode", "PrefixIndex", "PrefixMatch"]

REMEMBERED_EVICTIONS = 4096
"""Keys of evicted checkpoints kept to tell `evicted` from `never_seen`."""


class PrefixIndex:
    """Finds the deepest checkpoint of a prompt, and decides what goes when room is needed.

    `alignment` is the spacing of prefill checkpoints, a multiple of `page_size`; it only tells why
    a prompt missed. `seconds(start, end)` is the time to compute tokens start .. end again.
    """

    def __init__(
        self,
        pool: StatePool,
        pages: PagePool,
        page_size: int = 64,
        *,
        alignment: int | None = None,
        seconds: Callable[[int, int], float] = nominal_seconds,
        eviction_policy: EvictionPolicy = "value",
    ) -> None:
        self._pool = pool
        self._pages = pages
        self.page_size = page_size
        self.alignment = page_size if alignment is None else alignment
        self._roots: dict[bytes, PageNode] = {}
        self._checkpoints: dict[Checkpoint, PageNode] = {}
        self._num_pages = 0
        self._by_slot: dict[SlotId, Checkpoint] = {}
        self._changed = pool.changes()  # slots to look at again, see `evictable_slots`
        self._evictable: set[SlotId] = set()
        self._evicted: OrderedDict[bytes, Departure] = OrderedDict()
        self.order = EvictionOrder(seconds, eviction_policy)
        self._queue: list[tuple[bool, float, int, PageNode]] = []  # leaves, least wanted first
        self._tickets = count(1)
        self._clock = count(1)
        self.hits: Counter[AnchorKind] = Counter()
        self.evicted: Counter[AnchorKind] = Counter()  # for want of room
        self._chains = Chains(page_size)

    # Find.

    def match(self, tokens: Sequence[int], salt: bytes, limit: int) -> PrefixMatch:
        """The deepest usable checkpoint at or before `limit`; changes nothing.

        A caller that needs logits of its prompt's last token passes `len(tokens) - 1`.
        """
        root = self._roots.get(salt)
        node, found, hit = root, 0, None
        was_evicted = lies_past_limit = False
        pages: list[PageHandle] = []
        for end, digest, page in self._chains.of(tokens, len(tokens), salt):
            if node is not None:
                node = node.children.get(digest)
                if node is not None and node.tokens != page:
                    node = None
            if node is None:
                if hit is not None or was_evicted or end > limit or not self._evicted:
                    break
            else:
                found = end
                pages.append(node.page)
                if node.checkpoint is not None and self._is_usable(node.checkpoint):
                    if end <= limit:
                        hit = node.checkpoint
                    else:
                        lies_past_limit = True
            was_evicted = was_evicted or (end <= limit and digest in self._evicted)
        if hit is not None:
            del pages[hit.end // self.page_size :]
            return PrefixMatch(hit.end, hit, tuple(pages), found, "hit")
        if min(limit, len(tokens)) < self.alignment:
            reason = "too_short"
        elif was_evicted:
            reason = "evicted"
        elif found == 0:
            reason = "never_seen"
        elif found < self.alignment or lies_past_limit:
            reason = "alignment"
        else:
            reason = "no_checkpoint"
        return PrefixMatch(0, None, (), found, reason)

    def use(self, match: PrefixMatch, holder: str) -> ReaderLease:
        """Lease what a match found: a reader lease, and a reference on each of `match.pages`.

        Both belong to the caller now, and the match counts as a use. `LeaseError`, with nothing
        changed, when there is no hit or its checkpoint has left the index meanwhile.
        """
        checkpoint = match.checkpoint
        if checkpoint is None or checkpoint not in self._checkpoints:
            raise LeaseError(f"{holder} uses a match that holds no checkpoint of the index")
        lease = self._pool.share(checkpoint.lease, holder)
        self._pages.retain(match.pages)
        checkpoint.uses += 1
        self.hits[checkpoint.kind] += 1
        self.order.use(checkpoint)
        self._touch(checkpoint, self._checkpoints[checkpoint])
        return lease

    def pages_of(self, tokens: Sequence[int], salt: bytes, end: int) -> list[PageHandle]:
        """The indexed pages of `tokens[:end]`, as far as they go, whatever states there are."""
        node, found = self._roots.get(salt), []
        for _, digest, page in self._chains.of(tokens, end, salt):
            node = None if node is None else node.children.get(digest)
            if node is None or node.tokens != page:
                break
            found.append(node.page)
        return found

    # Publish.

    def publish(
        self,
        tokens: Sequence[int],
        end: int,
        handles: Sequence[PageHandle],
        lease: ReaderLease,
        kind: AnchorKind,
        salt: bytes,
    ) -> bool:
        """Make the sealed state of `lease`, after `tokens[:end]`, findable. No byte moves.

        The index keeps the lease, and references on those of `handles` (the pages of tokens
        0 .. end) that it did not know. When it has a checkpoint there already, it keeps the older,
        releases the lease and returns False. `Broken`, with nothing changed, when state, tokens
        and pages do not all reach `end`.
        """
        self._require_whole(tokens, end, handles, lease)
        root = self._roots.get(salt) or PageNode(None, root_digest(salt), b"", NO_PAGE, 0, salt)
        node, above = root, None
        fresh: list[PageNode] = []
        for depth, (_, digest, page) in enumerate(self._chains.of(tokens, end, salt)):
            child = node.children.get(digest) if not fresh else None
            if child is None:
                child = PageNode(node, digest, page, handles[depth], depth + 1, salt)
                fresh.append(child)
            elif child.tokens != page:  # two pages of one digest: the older stays
                self._pool.release(lease)
                return False
            above = node.checkpoint or above
            node = child
        if node.checkpoint is not None and self._is_usable(node.checkpoint):
            self.order.use(node.checkpoint)
            self._touch(node.checkpoint, node)
            self._pool.release(lease)
            return False
        self._pages.retain(child.page for child in fresh)
        self._roots[salt] = root
        for child in fresh:
            if child.parent is not None:
                child.parent.children[child.digest] = child
        self._num_pages += len(fresh)
        if node.checkpoint is not None:
            self._forget(node.checkpoint)
        checkpoint = Checkpoint(CheckpointKey(node.digest, end), lease, kind)
        missed = self._evicted.pop(node.digest, None)
        node.checkpoint = checkpoint
        self._checkpoints[checkpoint] = node
        self._by_slot[lease.slot] = checkpoint
        self._changed.add(lease.slot)
        self.order.add(checkpoint, above, node.nearest_checkpoints(), missed)
        self._touch(checkpoint, node)
        if not node.children and not node.ticket:
            self._enqueue(node)
        return True

    # Make room.

    def evict_slot(self, protect: Collection[Checkpoint] = frozenset()) -> bool:
        """Free the slot of the checkpoint worth least, of those that nobody else holds.

        Its pages stay indexed. False when there is none outside `protect`.
        """
        victim = self.order.least(lambda c: self._frees_a_slot(c) and c not in protect)
        if victim is not None:
            self._drop(victim, evicted=True)
        return victim is not None

    def next_victim(self, among: Collection[Checkpoint]) -> Checkpoint | None:
        """Of these, the one that would go first, if one may go; nothing is given up."""
        return self.order.least(lambda c: c in among and self._frees_a_slot(c))

    def evict_pages(self, n: int) -> int:
        """Free up to `n` pages, leaf first; returns how many.

        Leaves without a checkpoint go first, least recently used first; then those with one, in the
        order of checkpoints. A page held by anybody else stays, and so does every page above it.
        """
        freed = 0
        kept = []
        while freed < n and self._queue:
            entry = heapq.heappop(self._queue)
            carries, rank, ticket, node = entry
            if node.ticket != ticket:
                continue
            if node.children:
                node.ticket = 0
            elif (carries, rank) != self._rank(node):
                self._enqueue(node)
            elif not self._is_evictable(node):
                kept.append(entry)
            else:
                self._remove_leaf(node, evicted=True)
                freed += 1
        for entry in kept:
            heapq.heappush(self._queue, entry)
        return freed

    def drop(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint out of the index. Its slot lives on while others hold it."""
        if checkpoint not in self._checkpoints:
            raise LeaseError(f"checkpoint {checkpoint.key} is not in the index")
        self._drop(checkpoint)

    def forget(self, node: PageNode) -> None:
        """Take a page and everything below it out of the index, whoever else holds it."""
        below = [node]
        for page in below:
            below.extend(page.children.values())
        for page in reversed(below):
            self._remove_leaf(page)

    def clear(self) -> None:
        """Forget everything, at a change of epoch: no older state is findable."""
        for checkpoint in self._checkpoints:
            self._pool.release(checkpoint.lease)
        self._pages.release(node.page for node in self.nodes())
        self._roots.clear()
        self._checkpoints.clear()
        self._by_slot.clear()
        self.order.clear()
        self._num_pages = 0
        self._evicted.clear()
        self._queue.clear()

    # Facts.

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints that can be found."""
        return len(self._checkpoints)

    @property
    def num_pages(self) -> int:
        """Pages the index holds a reference on."""
        return self._num_pages

    @property
    def evictable_slots(self) -> int:
        """How many slots `evict_slot` could free, one after another.

        Looks only at slots whose holders or phase have changed since the last call.
        """
        while self._changed:
            slot = self._changed.pop()
            checkpoint = self._by_slot.get(slot)
            if checkpoint is not None and self._frees_a_slot(checkpoint):
                self._evictable.add(slot)
            else:
                self._evictable.discard(slot)
        return len(self._evictable)

    @property
    def evictable_pages(self) -> int:
        """How many pages `evict_pages` could free. Visits every node."""
        stays: set[int] = set()
        for node in self.nodes():
            above: PageNode | None = None if self._is_evictable(node) else node
            while above is not None and above.parent is not None and id(above) not in stays:
                stays.add(id(above))
                above = above.parent
        return self._num_pages - len(stays)

    def checkpoints(self) -> Iterator[Checkpoint]:
        """All checkpoints, oldest first."""
        return iter(self._checkpoints)

    def checkpoint_at(self, slot: SlotId) -> Checkpoint | None:
        """The checkpoint that lives in `slot`, if it is one."""
        return self._by_slot.get(slot)

    def node_of(self, checkpoint: Checkpoint) -> PageNode:
        """Where in the tree a checkpoint hangs: for checks."""
        return self._checkpoints[checkpoint]

    def nodes(self) -> Iterator[PageNode]:
        """Every indexed page, parents before children: for checks."""
        rest = [child for root in self._roots.values() for child in root.children.values()]
        while rest:
            node = rest.pop()
            yield node
            rest.extend(node.children.values())

    def _require_whole(
        self, tokens: Sequence[int], end: int, handles: Sequence[PageHandle], lease: ReaderLease
    ) -> None:
        if end <= 0 or end % self.page_size:
            raise Broken(f"end {end} is not on the page grid of {self.page_size}")
        if not isinstance(lease, ReaderLease):
            raise LeaseError(f"slot {lease.slot} is not sealed: only a reader lease is published")
        if self._pool.end(lease) != end:
            raise Broken(f"slot {lease.slot} ends at {self._pool.end(lease)}, published at {end}")
        needed = end // self.page_size
        if len(tokens) < end or len(handles) < needed:
            raise Broken(f"{len(tokens)} tokens and {len(handles)} pages do not reach end {end}")
        self._pages.require(handles[:needed])

    def _is_usable(self, checkpoint: Checkpoint) -> bool:
        return self._pool.phase(checkpoint.lease.slot) is Phase.SEALED

    def _frees_a_slot(self, checkpoint: Checkpoint) -> bool:
        return self._is_usable(checkpoint) and len(self._pool.holders(checkpoint.lease.slot)) == 1

    def _is_evictable(self, node: PageNode) -> bool:
        alone = node.checkpoint is None or len(self._pool.holders(node.checkpoint.lease.slot)) == 1
        return alone and self._pages.references(node.page) == 1

    def _touch(self, checkpoint: Checkpoint, node: PageNode) -> None:
        """Note a use. Pages above count as used, and get the time when those below are removed."""
        checkpoint.last_used = node.last_used = next(self._clock)

    def _drop(self, checkpoint: Checkpoint, *, evicted: bool = False) -> None:
        node = self._checkpoints[checkpoint]
        self.evicted[checkpoint.kind] += evicted
        self._evicted[node.digest] = self._forget(checkpoint, evicted=evicted)
        if len(self._evicted) > REMEMBERED_EVICTIONS:
            self._evicted.popitem(last=False)
        if not node.children:
            self._enqueue(node)

    def _forget(self, checkpoint: Checkpoint, *, evicted: bool = False) -> Departure:
        node = self._checkpoints.pop(checkpoint)
        del self._by_slot[checkpoint.lease.slot]
        node.checkpoint = None
        self._pool.release(checkpoint.lease)
        return self.order.remove(checkpoint, evicted=evicted)

    def _remove_leaf(self, node: PageNode, *, evicted: bool = False) -> None:
        if node.checkpoint is not None:
            self._drop(node.checkpoint, evicted=evicted)
        node.ticket = 0
        self._pages.release([node.page])
        self._num_pages -= 1
        above = node.parent
        if above is None:
            raise Broken("the root of a salt is no leaf")
        del above.children[node.digest]
        above.last_used = max(above.last_used, node.last_used)
        if not above.children:
            if above.parent is None:
                del self._roots[node.salt]
            else:
                self._enqueue(above)

    def _enqueue(self, node: PageNode) -> None:
        """Put a leaf in the eviction queue; an entry it had before is void."""
        node.ticket = next(self._tickets)
        heapq.heappush(self._queue, (*self._rank(node), node.ticket, node))
        if len(self._queue) > 2 * self._num_pages + 64:
            self._queue = [entry for entry in self._queue if entry[3].ticket == entry[2]]
            heapq.heapify(self._queue)

    def _rank(self, node: PageNode) -> tuple[bool, float]:
        """Where a leaf stands among those that may go: the smaller one goes first."""
        if node.checkpoint is None:
            return False, node.last_used
        return True, self.order.key(node.checkpoint)
