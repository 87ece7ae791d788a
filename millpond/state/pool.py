"""The ledger of the one physical pool of slots: who holds what, at which end. Knows no tensor.

Six verbs change it: take, seal, reopen, share, pin, release. Each returns or consumes a lease.
"""

from __future__ import annotations

from collections import deque
from typing import TypeVar

from millpond.errors import Broken, Exhausted, LeaseError
from millpond.state.lease import IoLease, Lease, Phase, ProducerLease, ReaderLease, SlotId

AnyLease = TypeVar("AnyLease", bound=Lease)


class StatePool:
    """Phases, leases and ends of `size` slots. Calls come from one thread.

    A lease that is spent, of another kind, or from an earlier tenancy of its slot raises
    `LeaseError`, and nothing changes.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one slot, not {size}")
        self._free = deque(SlotId(i) for i in range(size))
        self._phase = [Phase.FREE] * size
        self._generation = [0] * size
        self._end = [0] * size
        self._leases: list[list[Lease]] = [[] for _ in range(size)]
        self._freed: list[SlotId] = []
        self._quarantined: dict[SlotId, str] = {}
        self._changed: list[set[SlotId]] = []  # the sets that `changes` gave out

    # The six verbs.

    def take(self, holder: str) -> ProducerLease:
        """Open a free slot for writing; its end is 0. Raises `Exhausted` when none is free."""
        if not self._free:
            raise Exhausted(f"no free slot for {holder}: {self.size} in all")
        slot = self._free.popleft()
        self._phase[slot] = Phase.OPEN
        self._end[slot] = 0
        return self._grant(ProducerLease(slot, self._generation[slot], holder))

    def seal(self, lease: ProducerLease) -> ReaderLease:
        """Give up writing and keep reading: the content is fixed from here on. No byte moves."""
        self._check(lease, ProducerLease)
        if self._end[lease.slot] == 0:
            raise LeaseError(
                f"{lease.holder} seals slot {lease.slot}, to which nothing was committed"
            )
        self._spend(lease)
        self._phase[lease.slot] = Phase.SEALED
        return self._grant(ReaderLease(lease.slot, lease.generation, lease.holder))

    def reopen(self, lease: ReaderLease) -> ProducerLease | None:
        """Let the one remaining holder write in place again; None while anyone else holds on."""
        self._check(lease, ReaderLease)
        if len(self._leases[lease.slot]) > 1:
            return None
        self._spend(lease)
        self._phase[lease.slot] = Phase.OPEN
        return self._grant(ProducerLease(lease.slot, lease.generation, lease.holder))

    def share(self, lease: ReaderLease, holder: str) -> ReaderLease:
        """One more reader of the same fixed content."""
        self._check(lease, ReaderLease)
        return self._grant(ReaderLease(lease.slot, lease.generation, holder))

    def pin(self, lease: ReaderLease, transfer: str) -> IoLease:
        """A transfer reads the slot; it stays until the transfer itself releases this lease."""
        self._check(lease, ReaderLease)
        return self._grant(IoLease(lease.slot, lease.generation, transfer))

    def release(self, lease: Lease) -> None:
        """Spend a lease of any kind. The last one frees the slot (a quarantined slot stays out)."""
        self._check(lease, Lease, quarantined=True)
        self._spend(lease)
        slot = lease.slot
        if not self._leases[slot] and self._phase[slot] is not Phase.QUARANTINED:
            self._phase[slot] = Phase.FREE
            self._generation[slot] += 1
            self._end[slot] = 0
            self._free.append(slot)
            self._freed.append(slot)

    # Ends.

    def record_end(self, lease: ProducerLease, end: int) -> None:
        """A committed step left the slot with `end` tokens folded. Ends only grow."""
        slot = lease.slot
        held = self._leases[slot]
        sound = len(held) == 1 and held[0] is lease and type(lease) is ProducerLease
        if not sound or self._quarantined:
            self._check(lease, ProducerLease)
        if end <= self._end[slot]:
            raise Broken(
                f"slot {lease.slot} of {lease.holder} cannot go from end {self._end[lease.slot]}"
                f" to {end}: every step folds at least one token"
            )
        self._end[slot] = end

    def end(self, lease: Lease) -> int:
        """How many tokens are folded into the slot of `lease`."""
        self._check(lease, Lease)
        return self._end[lease.slot]

    # Defects.

    def quarantine(self, slot: SlotId, why: str) -> None:
        """Take a slot out of use for good. Its leases can only be released from here on."""
        if self._phase[slot] is Phase.FREE:
            self._free.remove(slot)
        self._phase[slot] = Phase.QUARANTINED
        self._note(slot)
        self._quarantined.setdefault(slot, why)

    @property
    def quarantined(self) -> dict[SlotId, str]:
        """The slots out of use, each with the reason."""
        return dict(self._quarantined)

    # Facts.

    @property
    def size(self) -> int:
        """Slots in all."""
        return len(self._phase)

    @property
    def num_free(self) -> int:
        """Slots that `take` can still give."""
        return len(self._free)

    def phase(self, slot: SlotId) -> Phase:
        """The phase of `slot`."""
        return self._phase[slot]

    def holders(self, slot: SlotId) -> tuple[str, ...]:
        """Names of those who hold a lease on `slot`, oldest first."""
        return tuple(lease.holder for lease in self._leases[slot])

    def leases(self, slot: SlotId) -> tuple[Lease, ...]:
        """The live leases on `slot`, oldest first."""
        return tuple(self._leases[slot])

    def end_of(self, slot: SlotId) -> int:
        """The end of `slot`, whoever holds it (0 when free): for checks, not for planning."""
        return self._end[slot]

    def free_slots(self) -> tuple[SlotId, ...]:
        """The free slots, in the order they will be given."""
        return tuple(self._free)

    def drain_freed(self) -> tuple[SlotId, ...]:
        """Slots freed since this was last asked, without repeats: what to poison before reuse."""
        freed = tuple(dict.fromkeys(self._freed))
        self._freed.clear()
        return freed

    def changes(self) -> set[SlotId]:
        """A set that gets every slot whose holders or phase change; the caller empties it."""
        self._changed.append(set())
        return self._changed[-1]

    def _note(self, slot: SlotId) -> None:
        for changed in self._changed:
            changed.add(slot)

    def _grant(self, lease: AnyLease) -> AnyLease:
        self._leases[lease.slot].append(lease)
        self._note(lease.slot)
        return lease

    def _spend(self, lease: Lease) -> None:
        lease.live = False
        self._leases[lease.slot].remove(lease)
        self._note(lease.slot)

    def _check(self, lease: Lease, kind: type[Lease], *, quarantined: bool = False) -> None:
        who = f"{lease.holder} on slot {lease.slot}"
        if not lease.live:
            raise LeaseError(f"{who}: the lease is spent")
        if not isinstance(lease, kind):
            raise LeaseError(f"{who}: {type(lease).__name__} held, {kind.__name__} needed")
        if lease not in self._leases[lease.slot]:
            raise LeaseError(f"{who}: the lease is not of this pool or of an earlier tenancy")
        if not quarantined and self._phase[lease.slot] is Phase.QUARANTINED:
            raise LeaseError(f"{who}: quarantined, {self._quarantined[lease.slot]}")
