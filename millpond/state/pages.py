"""Reference counts of the KV pages. Knows no tensor, no token and no request."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from millpond.errors import Exhausted, LeaseError
from millpond.state.lease import PageId


class PageHandle(NamedTuple):
    """One page, dated: once the page was freed, `generation` no longer fits and it raises."""

    id: PageId
    generation: int


class PagePool:
    """Counts the references on `size` pages. Pages are append-only and fixed once full, so a count
    is all they need. Calls come from one thread; a call that raises has changed nothing.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one page, not {size}")
        self._free = deque(PageId(i) for i in range(size))
        self._count = [0] * size
        self._generation = [0] * size
        self._freed: list[PageId] = []

    def take(self, n: int) -> list[PageHandle]:
        """`n` free pages with one reference each, or `Exhausted` and none."""
        if n < 0:
            raise ValueError(f"cannot take {n} pages")
        if n > len(self._free):
            raise Exhausted(f"{n} pages wanted, {len(self._free)} of {self.size} free")
        taken = [self._free.popleft() for _ in range(n)]
        for page in taken:
            self._count[page] = 1
        return [PageHandle(page, self._generation[page]) for page in taken]

    def retain(self, handles: Iterable[PageHandle]) -> None:
        """One more reference on each handle. A stale handle raises `LeaseError`."""
        handles = list(handles)
        self.require(handles)
        for handle in handles:
            self._count[handle.id] += 1

    def release(self, handles: Iterable[PageHandle]) -> None:
        """One reference fewer on each handle; the last one frees the page."""
        handles = list(handles)
        self.require(handles)
        for page, times in Counter(handle.id for handle in handles).items():
            if times > self._count[page]:
                raise LeaseError(f"page {page} released {times} times, held {self._count[page]}")
        for handle in handles:
            page = handle.id
            self._count[page] -= 1
            if self._count[page] == 0:
                self._generation[page] += 1
                self._free.append(page)
                self._freed.append(page)

    @property
    def size(self) -> int:
        """Pages in all."""
        return len(self._count)

    @property
    def num_free(self) -> int:
        """Pages that `take` can still give."""
        return len(self._free)

    def require(self, handles: Iterable[PageHandle]) -> None:
        """Raise `LeaseError` when one of them is stale."""
        for handle in handles:
            if not self.is_live(handle):
                self._check(handle)

    def references(self, handle: PageHandle) -> int:
        """References on the page. A stale handle raises `LeaseError`."""
        self._check(handle)
        return self._count[handle.id]

    def is_live(self, handle: PageHandle) -> bool:
        """Whether the handle still names the page it was given for."""
        page, generation = handle
        return (
            0 <= page < len(self._count)
            and self._generation[page] == generation
            and self._count[page] > 0
        )

    def count_of(self, page: PageId) -> int:
        """References on `page`, whoever holds them: for checks, not for planning."""
        return self._count[page]

    def free_pages(self) -> tuple[PageId, ...]:
        """The free pages, in the order they will be given."""
        return tuple(self._free)

    def drain_freed(self) -> tuple[PageId, ...]:
        """Pages freed since this was last asked, without repeats: what to poison before reuse."""
        freed = tuple(dict.fromkeys(self._freed))
        self._freed.clear()
        return freed

    def _check(self, handle: PageHandle) -> None:
        if not self.is_live(handle):
            raise LeaseError(
                f"page {handle.id}: the handle of generation {handle.generation} is stale"
            )
