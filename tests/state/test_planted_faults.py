"""Each fault that state layers are known for, planted: the ownership machine must find it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import pytest
from hypothesis import Phase as Stage
from hypothesis import Verbosity, settings
from hypothesis.stateful import run_state_machine_as_test

from millpond.errors import Broken, Exhausted
from millpond.state.chain import Chains
from millpond.state.checkpoint import Checkpoint
from millpond.state.lease import (
    IoLease,
    Lease,
    Phase,
    ProducerLease,
    ReaderLease,
    SlotId,
)
from millpond.state.pages import PageHandle, PagePool
from millpond.state.pool import StatePool
from millpond.state.prefix import PageNode, PrefixIndex, PrefixMatch
from millpond.state.running import Exported, RunningState
from millpond.state.value import Departure, EvictionOrder
from tests.state.world import World

Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: list[Plant] = []


def fault(plant: Plant) -> Plant:
    FAULTS.append(plant)
    return plant


def force_reopen(pool: StatePool, lease: ReaderLease) -> ProducerLease:
    """What `reopen` does, without asking who else is there."""
    pool._spend(lease)
    pool._phase[lease.slot] = Phase.OPEN
    return pool._grant(ProducerLease(lease.slot, lease.generation, lease.holder))


# Slots.


@fault
def overwritten_while_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatePool, "reopen", force_reopen)


@fault
def reopened_under_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    def reopen(pool: StatePool, lease: ReaderLease) -> ProducerLease | None:
        readers = [x for x in pool.leases(lease.slot) if not isinstance(x, IoLease)]
        return force_reopen(pool, lease) if readers == [lease] else None

    monkeypatch.setattr(StatePool, "reopen", reopen)


@fault
def freed_under_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = StatePool.release

    def release(pool: StatePool, lease: Lease) -> None:
        honest(pool, lease)
        rest = pool.leases(lease.slot)
        if rest and all(isinstance(x, IoLease) for x in rest):
            pool._phase[lease.slot] = Phase.FREE
            pool._free.append(lease.slot)
            pool._freed.append(lease.slot)

    monkeypatch.setattr(StatePool, "release", release)


@fault
def a_transfer_that_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def pin(pool: StatePool, lease: ReaderLease, transfer: str) -> IoLease:
        return IoLease(lease.slot, lease.generation, transfer)

    monkeypatch.setattr(StatePool, "pin", pin)


@fault
def a_spent_lease_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = StatePool.release

    def release(pool: StatePool, lease: Lease) -> None:
        if lease.live:
            honest(pool, lease)
        elif pool.leases(lease.slot):
            honest(pool, pool.leases(lease.slot)[0])

    monkeypatch.setattr(StatePool, "release", release)


@fault
def a_token_folded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = StatePool.record_end

    def record_end(pool: StatePool, lease: ProducerLease, end: int) -> None:
        honest(pool, lease, end - 1 if end > 5 else end)

    monkeypatch.setattr(StatePool, "record_end", record_end)


# A request's states.


@fault
def an_input_released_before_the_step_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RunningState.plan_output

    def plan_output(state: RunningState, pool: StatePool) -> tuple[SlotId | None, SlotId]:
        slots = honest(state, pool)
        if state._current is not None and not state.in_place:
            pool.release(state._current)
            state._current = None
        return slots

    monkeypatch.setattr(RunningState, "plan_output", plan_output)


@fault
def published_while_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunningState, "_require_idle", lambda *_: None)


@fault
def published_without_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RunningState.commit

    def commit(
        state: RunningState, pool: StatePool, end: int, written: Collection[tuple[SlotId, int]] = ()
    ) -> tuple[Exported, ...]:
        return honest(state, pool, end, {(x.slot, at) for at, x in state._exports})

    monkeypatch.setattr(RunningState, "commit", commit)


@fault
def a_torn_state_kept_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunningState, "discard", RunningState.cancel)


@fault
def an_export_kept_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RunningState._give_back

    def give_back(state: RunningState, pool: StatePool) -> None:
        state._exports.clear()
        honest(state, pool)

    monkeypatch.setattr(RunningState, "_give_back", give_back)


@fault
def a_slot_kept_for_the_step_after_a_failed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RunningState._give_back

    def give_back(state: RunningState, pool: StatePool) -> None:
        state._ahead = None
        honest(state, pool)

    monkeypatch.setattr(RunningState, "_give_back", give_back)


@fault
def a_state_that_was_to_stay_written_over_by_the_step_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = RunningState.keep_input

    def keep_input(state: RunningState, pool: StatePool) -> SlotId:
        before = state._output
        slot = honest(state, pool)
        return slot if before is None else before.slot

    monkeypatch.setattr(RunningState, "keep_input", keep_input)


@fault
def a_step_ahead_forgotten_when_the_one_before_is_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = RunningState.commit

    def commit(
        state: RunningState, pool: StatePool, end: int, written: Collection[tuple[SlotId, int]] = ()
    ) -> tuple[Exported, ...]:
        state._ahead = None
        return honest(state, pool, end, written)

    monkeypatch.setattr(RunningState, "commit", commit)


@fault
def a_fan_out_on_one_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    def fan_out(state: RunningState, pool: StatePool, n: int) -> list[RunningState]:
        lease = state._sealed(pool, "fan out")
        others = [RunningState(state.holder) for _ in range(1, n)]
        for other in others:
            other.start(lease)
        return others

    monkeypatch.setattr(RunningState, "fan_out", fan_out)


# Pages.


@fault
def a_stale_page_handle_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_live(pages: PagePool, handle: PageHandle) -> bool:
        return pages.count_of(handle.id) > 0

    monkeypatch.setattr(PagePool, "is_live", is_live)


@fault
def pages_taken_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PagePool.take

    def take(pages: PagePool, n: int) -> list[PageHandle]:
        if n > pages.num_free:
            honest(pages, pages.num_free)
            raise Exhausted("some of them")
        return honest(pages, n)

    monkeypatch.setattr(PagePool, "take", take)


@fault
def a_hit_that_holds_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PrefixIndex.use

    def use(index: PrefixIndex, match: PrefixMatch, holder: str) -> ReaderLease:
        lease = honest(index, match, holder)
        index._pages.release(match.pages)
        return lease

    monkeypatch.setattr(PrefixIndex, "use", use)


# The index.


@fault
def a_page_freed_under_a_deeper_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PrefixIndex._enqueue

    class Childless(dict[bytes, PageNode]):
        def __bool__(self) -> bool:
            return False

    def enqueue(index: PrefixIndex, node: PageNode) -> None:
        above = node.parent
        if above is not None and above.parent is not None and not above.ticket:
            above.children = Childless(above.children)
            honest(index, above)
        honest(index, node)

    monkeypatch.setattr(PrefixIndex, "_enqueue", enqueue)


@fault
def a_match_without_its_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PrefixIndex.match

    def match(index: PrefixIndex, tokens: Sequence[int], salt: bytes, limit: int) -> PrefixMatch:
        return honest(index, tokens, next(iter(index._roots), salt), limit)

    monkeypatch.setattr(PrefixIndex, "match", match)


@fault
def a_match_up_to_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PrefixIndex.match

    def match(index: PrefixIndex, tokens: Sequence[int], salt: bytes, limit: int) -> PrefixMatch:
        return honest(index, tokens, salt, limit + 1)

    monkeypatch.setattr(PrefixIndex, "match", match)


@fault
def a_key_trusted_without_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alike(bytes):
        def __ne__(self, other: object) -> bool:
            return False

    honest = Chains.of

    def chain(
        chains: Chains, tokens: Sequence[int], end: int, salt: bytes
    ) -> Iterator[tuple[int, bytes, bytes]]:
        for page_end, digest, page in honest(chains, tokens, end, salt):
            yield page_end, digest, Alike(page)

    def weak(above: bytes, page: bytes) -> bytes:
        return bytes([(sum(above) + sum(page)) % 2])

    monkeypatch.setattr("millpond.state.chain.page_digest", weak)
    monkeypatch.setattr("millpond.state.audit.page_digest", weak)
    monkeypatch.setattr(Chains, "of", chain)


@fault
def published_where_the_state_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PrefixIndex.publish

    def publish(index: PrefixIndex, tokens: tuple[int, ...], end: int, *rest: object) -> bool:
        return honest(index, tokens, max(end - index.page_size, index.page_size), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(PrefixIndex, "_require_whole", lambda *_: None)
    monkeypatch.setattr(PrefixIndex, "publish", publish)


@fault
def a_duplicate_that_keeps_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PrefixIndex.publish

    def publish(index: PrefixIndex, *args: object) -> bool:
        lease = args[3]
        assert isinstance(lease, ReaderLease)
        spare = index._pool.share(lease, lease.holder)
        fresh = honest(index, *args)  # type: ignore[arg-type]
        if fresh:
            index._pool.release(spare)
        return fresh

    monkeypatch.setattr(PrefixIndex, "publish", publish)


@fault
def an_evicted_slot_freed_under_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PrefixIndex._forget

    def forget(index: PrefixIndex, checkpoint: Checkpoint, *, evicted: bool = False) -> Departure:
        slot = checkpoint.lease.slot
        departure = honest(index, checkpoint, evicted=evicted)
        for lease in index._pool.leases(slot):
            index._pool.release(lease)
        return departure

    monkeypatch.setattr(PrefixIndex, "_forget", forget)


@fault
def a_branch_that_does_not_come_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageNode, "nearest_checkpoints", lambda _: [])


@fault
def an_anchor_that_left_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EvictionOrder, "_above", lambda _, standing: standing.above)


@fault
def leased_slots_counted_as_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixIndex, "_frees_a_slot", lambda *_: True)


@fault
def pages_in_use_counted_as_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixIndex, "_is_evictable", lambda *_: True)


@fault
def an_epoch_that_forgets_its_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    def clear(index: PrefixIndex) -> None:
        index._roots.clear()
        index._checkpoints.clear()
        index._queue.clear()
        index._num_pages = 0

    monkeypatch.setattr(PrefixIndex, "clear", clear)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_the_machine_finds(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    # Hypothesis also tries constants of whatever modules are loaded, so how soon a fault is found
    # depends on which tests are collected with this one: leave room.
    search = settings(
        max_examples=2_000,
        stateful_step_count=50,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Stage.generate],
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, Broken)):
        run_state_machine_as_test(World, settings=search)
