"""The invariants of the state layer, one named function each; the names are the documentation.

A check looks at a `House` and returns what is wrong, or None. `run` asks all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from millpond.errors import Broken
from millpond.state.checkpoint import page_digest, root_digest
from millpond.state.lease import (
    IoLease,
    Lease,
    PageId,
    Phase,
    ProducerLease,
    ReaderLease,
    Seat,
    SlotId,
)
from millpond.state.pages import PageHandle, PagePool
from millpond.state.pool import StatePool
from millpond.state.prefix import PrefixIndex
from millpond.state.running import RunningState


class PlannedRow(Protocol):
    """What a check reads of a planned row."""

    @property
    def seat(self) -> Seat:
        """Whose it is."""

    @property
    def start(self) -> int:
        """Tokens before the row."""

    @property
    def end(self) -> int:
        """Tokens after it, at most."""

    @property
    def state_in(self) -> SlotId | None:
        """The slot it starts from."""

    @property
    def state_out(self) -> SlotId:
        """The slot it writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """Everything that may hold a slot or a page, at one moment.

    `running` are the states of live requests; `leases` are those that live requests and transfers
    hold besides; `page_runs` are the handles each request or transfer holds a reference on, one
    run per reference. With `page_runs` None the references are not counted. `flights` are the rows
    of the steps in flight, in the order of their launch; what those of the seats in `leaving` come
    to is thrown away.
    """

    pool: StatePool
    pages: PagePool
    index: PrefixIndex
    running: Collection[RunningState] = ()
    leases: Collection[Lease] = ()
    page_runs: Collection[Iterable[PageHandle]] | None = None
    flights: Sequence[Collection[PlannedRow]] = ()
    leaving: Collection[Seat] = ()
    asleep: bool = False


Check = Callable[[House], str | None]


def every_slot_is_in_one_phase(house: House) -> str | None:
    """The free list holds the free slots, each once; the others are open, sealed or out of use."""
    free = sorted(house.pool.free_slots())
    marked = [slot for slot, phase in _phases(house) if phase is Phase.FREE]
    return None if free == marked else f"free list {free}, free by phase {marked}"


def open_means_one_producer_alone(house: House) -> str | None:
    """Whoever may write a slot is the only one to hold it."""
    for slot, phase in _phases(house):
        kinds = [type(lease).__name__ for lease in house.pool.leases(slot)]
        if phase is Phase.OPEN and kinds != [ProducerLease.__name__]:
            return f"slot {slot} is open and held by {kinds}"
    return None


def sealed_means_readers_and_no_producer(house: House) -> str | None:
    """A slot whose content is fixed is held, and by nobody who may write it."""
    for slot, phase in _phases(house):
        leases = house.pool.leases(slot)
        if phase is Phase.SEALED and not leases:
            return f"slot {slot} is sealed and held by nobody"
        if phase is Phase.SEALED and not all(isinstance(x, ReaderLease | IoLease) for x in leases):
            return f"slot {slot} is sealed and held by a producer"
    return None


def free_means_nobody(house: House) -> str | None:
    """A free slot has no lease and no end; a free page has no reference."""
    for slot, phase in _phases(house):
        if phase is Phase.FREE and (house.pool.leases(slot) or house.pool.end_of(slot)):
            return f"slot {slot} is free, held by {house.pool.holders(slot)}"
    held = [page for page in house.pages.free_pages() if house.pages.count_of(page)]
    return f"pages {held} are free and referenced" if held else None


def a_row_starts_where_its_state_ends(house: House) -> str | None:
    """The first token a row folds is the one its state stops before, or is going to."""
    written: dict[SlotId, PlannedRow] = {}
    for rows in house.flights:
        for row in (row for row in rows if row.seat not in house.leaving):
            before = None if row.state_in is None else written.get(row.state_in)
            if before is not None:
                if row.seat != before.seat or not before.start < row.start <= before.end:
                    return f"a row starts at {row.start}, one in flight ends at {before.end}"
                continue
            end = 0 if row.state_in is None else house.pool.end_of(row.state_in)
            if row.start != end:
                return (
                    f"a row starts at {row.start}, its state in slot {row.state_in} ends at {end}"
                )
        written = {row.state_out: row for row in rows}
    return None


def what_is_in_flight_is_held(house: House) -> str | None:
    """Until its step has ended, the slots of a row are neither free nor anybody else's."""
    owner: dict[SlotId, Seat] = {}
    held = {lease.slot for state in house.running for lease in state.leases}
    for row in (row for rows in house.flights for row in rows):
        if row.state_in is not None and row.state_in not in held:
            return f"slot {row.state_in} is read in flight, and nobody who runs holds it"
        if house.pool.phase(row.state_out) is not Phase.OPEN or row.state_out not in held:
            return f"slot {row.state_out} is written in flight: {house.pool.phase(row.state_out)}"
        if owner.setdefault(row.state_out, row.seat) != row.seat:
            return f"slot {row.state_out} is written in flight by two seats"
    return None


def only_committed_state_is_sealed(house: House) -> str | None:
    """What is fixed for ever was committed first: its end is known."""
    for slot, phase in _phases(house):
        if phase is Phase.SEALED and house.pool.end_of(slot) <= 0:
            return f"slot {slot} is sealed with nothing committed to it"
    return None


def findable_means_sealed_and_whole(house: House) -> str | None:
    """A checkpoint is a sealed slot at its end, with every page up to there held."""
    for checkpoint in house.index.checkpoints():
        slot, end = checkpoint.lease.slot, checkpoint.end
        if not checkpoint.lease.live or checkpoint.lease not in house.pool.leases(slot):
            return f"checkpoint {checkpoint.key} has no lease on slot {slot}"
        if house.pool.phase(slot) is Phase.QUARANTINED:
            continue  # never matched
        if house.pool.phase(slot) is not Phase.SEALED or house.pool.end_of(slot) != end:
            return f"checkpoint {checkpoint.key} in slot {slot}, {house.pool.phase(slot)}"
        node = house.index.node_of(checkpoint)
        if node.depth * house.index.page_size != end:
            return f"checkpoint {checkpoint.key} hangs at page {node.depth}"
        while node.parent is not None:
            if node.parent.children.get(node.digest) is not node:
                return f"checkpoint {checkpoint.key} hangs on a page outside the tree"
            node = node.parent
    for node in house.index.nodes():
        if not house.pages.is_live(node.page):
            return f"an indexed page at depth {node.depth} was freed: {node.page}"
    return None


def a_finished_request_holds_nothing(house: House) -> str | None:
    """Every lease and every page reference belongs to a live request, the index or a transfer."""
    known = {id(lease) for state in house.running for lease in state.leases}
    known.update(id(lease) for lease in house.leases)
    known.update(id(checkpoint.lease) for checkpoint in house.index.checkpoints())
    for slot, _ in _phases(house):
        for lease in house.pool.leases(slot):
            if id(lease) not in known:
                return f"slot {slot} is held by {lease.holder}, who is not there"
    if house.page_runs is None:
        return None
    counts = Counter(handle.id for run in house.page_runs for handle in run)
    counts.update(node.page.id for node in house.index.nodes())
    for page in map(PageId, range(house.pages.size)):
        if house.pages.count_of(page) != counts[page]:
            return (
                f"page {page} counts {house.pages.count_of(page)} references, {counts[page]} known"
            )
    return None


def keys_name_all_that_matters(house: House) -> str | None:
    """The key of every indexed page follows from its salt and the tokens up to its end."""
    for node in house.index.nodes():
        if node.parent is None:
            return "a page without a root"
        above = node.parent.digest if node.parent.parent else root_digest(node.salt)
        if node.digest != page_digest(above, node.tokens) or node.salt != node.parent.salt:
            return f"the page at depth {node.depth} has a key of something else"
        if node.checkpoint is not None and node.checkpoint.key.digest != node.digest:
            return f"checkpoint {node.checkpoint.key} is not named after its pages"
    return None


def asleep_means_all_free(house: House) -> str | None:
    """Before the memory goes, nobody holds any of it."""
    if not house.asleep:
        return None
    slots = house.pool.size - len(house.pool.quarantined) - house.pool.num_free
    pages = house.pages.size - house.pages.num_free
    return f"asleep with {slots} slots and {pages} pages held" if slots or pages else None


ALL: tuple[Check, ...] = (
    every_slot_is_in_one_phase,
    open_means_one_producer_alone,
    sealed_means_readers_and_no_producer,
    free_means_nobody,
    a_row_starts_where_its_state_ends,
    only_committed_state_is_sealed,
    findable_means_sealed_and_whole,
    a_finished_request_holds_nothing,
    what_is_in_flight_is_held,
    keys_name_all_that_matters,
    asleep_means_all_free,
)


def run(house: House) -> None:
    """Raise `Broken`, with the invariant's name and what is wrong, at the first that fails."""
    for check in ALL:
        wrong = check(house)
        if wrong is not None:
            raise Broken(f"{check.__name__}: {wrong}")


def _phases(house: House) -> Iterator[tuple[SlotId, Phase]]:
    for number in range(house.pool.size):
        yield SlotId(number), house.pool.phase(SlotId(number))
