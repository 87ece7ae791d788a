"""Which published checkpoints are stored, and when. Knows the ledger; moves no byte itself."""

from __future__ import annotations

import time
from collections import OrderedDict

from millpond.engine.ledger import Ledger
from millpond.engine.transfers import Holding, Transfers
from millpond.plan.step import PAGE_SIZE
from millpond.state.checkpoint import AnchorKind, Checkpoint, salt_parts
from millpond.state.pages import PageHandle
from millpond.store.connector import Connector
from millpond.store.jobs import Epoch, Put
from millpond.store.record import record_root

WRITTEN_THROUGH = frozenset(AnchorKind) - {AnchorKind.LADDER}
"""Kinds stored as soon as they are published; a rung of a ladder, once it is about to be evicted:
most prompts that come back start from a deeper anchor."""


def root_of(salt: bytes) -> bytes:
    """The root of a record's chain: of the salt of an index, what is the same in every life."""
    _, _, adapter, cache_salt = salt_parts(salt)
    return record_root(cache_salt=cache_salt.decode(), adapter=adapter.decode())


class Storing:
    """Stores what could ever be loaded in less time than it takes to compute.

    Most kinds as soon as they are published. What is left, and what found no room among the puts
    under way, is stored when it is the next that would be evicted: while it is still there, so that
    eviction itself never waits for a store.
    """

    def __init__(
        self, ledger: Ledger, connector: Connector, transfers: Transfers, epoch: Epoch
    ) -> None:
        self._ledger = ledger
        self._connector = connector
        self._transfers = transfers
        self._epoch = epoch
        self._writes = ledger.settings.prefix_caching
        self._refused = False
        self._puts: dict[int, Holding] = {}
        self._later: OrderedDict[Checkpoint, None] = OrderedDict()  # not stored yet

    def published(self, checkpoint: Checkpoint) -> None:
        """A checkpoint can be found: store it now, later, or never."""
        if not self._writes or self._refused:
            return
        num_bytes = self._connector.record_bytes(checkpoint.end // PAGE_SIZE)
        computing = self._ledger.prefill_rate.seconds(0, checkpoint.end)
        if computing <= self._connector.gets.seconds(num_bytes):
            return
        if checkpoint.kind in WRITTEN_THROUGH and self._put(checkpoint):
            return
        self._later[checkpoint] = None
        if len(self._later) > self._ledger.settings.checkpoint_budget:
            self._later.popitem(last=False)

    def advance(self) -> None:
        """Between steps: store what would be evicted first, while nothing else is being stored."""
        index, budget = self._ledger.index, self._ledger.settings.checkpoint_budget
        scarce = 4 * index.num_checkpoints >= 3 * budget or self._ledger.pool.num_free < 2
        if not self._later or self._puts or not scarce or self._connector.state != "closed":
            return
        victim = index.next_victim(self._later)
        if victim is None:
            alive = set(index.checkpoints())
            for gone in [one for one in self._later if one not in alive]:
                del self._later[gone]
        elif self._put(victim):
            del self._later[victim]

    def ended(self, job: Put) -> None:
        """No rank reads any more."""
        self._transfers.release(self._puts.pop(job.number))

    def new_epoch(self, epoch: Epoch, *, refused: bool) -> None:
        """What is under way need not be finished; nothing is stored while the store is refused."""
        self._epoch, self._refused = epoch, refused
        self._later.clear()
        for number in self._puts:
            self._connector.cancel(number)

    def stop(self) -> None:
        """Store nothing from here on."""
        self._writes = False

    def _put(self, checkpoint: Checkpoint) -> bool:
        """Begin to store a checkpoint; False when there is no room for another transfer."""
        tokens, pages = self._path(checkpoint)
        if not self._transfers.has_room(len(pages)):
            self._connector.sheds["put_room"] += 1
            return False
        holding = self._transfers.pin(checkpoint, pages, f"put {checkpoint.key}")
        job = self._connector.submit(
            Put(
                number=0,
                epoch=self._epoch,
                root=root_of(self._ledger.index.node_of(checkpoint).salt),
                tokens=tokens,
                parts=holding.parts,
                began=time.time(),
                kind=checkpoint.kind,
            )
        )
        if job is None:
            self._transfers.release(holding)
            return False
        self._puts[job.number] = holding
        return True

    def _path(self, checkpoint: Checkpoint) -> tuple[bytes, list[PageHandle]]:
        """The tokens of a checkpoint, 4 bytes each, and the pages under its key."""
        node = self._ledger.index.node_of(checkpoint)
        tokens: list[bytes] = []
        pages: list[PageHandle] = []
        while node.parent is not None:
            tokens.append(node.tokens)
            pages.append(node.page)
            node = node.parent
        return b"".join(reversed(tokens)), pages[::-1]
