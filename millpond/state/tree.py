"""The nodes of the prefix index, and what a search in it finds. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.state.checkpoint import Checkpoint
from millpond.state.lease import PageId
from millpond.state.pages import PageHandle

NO_PAGE = PageHandle(PageId(-1), -1)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the index knows of a prompt.

    `end` (0: none), `checkpoint` and `pages`, the handles of tokens 0 .. end, are the deepest
    usable state; `indexed_end` is how far whole pages of the prompt are indexed, with or without a
    state. `reason` is one of hit, too_short, alignment, no_checkpoint, evicted, never_seen.
    """

    end: int
    checkpoint: Checkpoint | None
    pages: tuple[PageHandle, ...]
    indexed_end: int
    reason: str


@dataclass(eq=False, slots=True)
class PageNode:
    """One indexed page. A root stands for a salt: no parent, and no page or tokens of its own."""

    parent: PageNode | None
    digest: bytes
    tokens: bytes
    page: PageHandle
    depth: int  # pages from the root
    salt: bytes
    children: dict[bytes, PageNode] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    last_used: int = 0
    ticket: int = 0  # of its valid entry in the eviction queue, 0: none

    def nearest_checkpoints(self) -> list[Checkpoint]:
        """The checkpoints below this page that have no other between it and them."""
        found = []
        rest = list(self.children.values())
        while rest:
            node = rest.pop()
            if node.checkpoint is None:
                rest.extend(node.children.values())
            else:
                found.append(node.checkpoint)
        return found
