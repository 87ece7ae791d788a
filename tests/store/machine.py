"""The host tower's machine with a store beyond it, and everything that can befall transfers.

Ranks report at different times, objects are lost and damaged, the store goes away, engines end and
others begin over the same store, and all that happens while prompts run, are evicted and flushed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from millpond.engine.scheduler import Scheduler
from millpond.engine.storing import Storing
from millpond.engine.tiers import Tiers
from millpond.engine.transfers import Holding, Transfers
from millpond.plan.step import PAGE_SIZE
from millpond.state.pool import StatePool
from millpond.store import rank
from millpond.store.backend import StoreUnavailable
from millpond.store.connector import Connector, Limits
from tests.engine.machine import HostTower, prompts, wishes
from tests.store.towers import Shelf, StoredTower

Fault = Callable[[pytest.MonkeyPatch], None]
FAULTS: list[Fault] = []


class StoredHost(HostTower):
    """See the module."""

    @initialize(
        num_slots=st.sampled_from([12, 9, 7, 5]),
        num_pages=st.sampled_from([60, 40, 30]),
        batch=st.sampled_from([2, 3, 4]),
        checkpoints=st.sampled_from([10, 4, 2, 1]),
        num_drafts=st.sampled_from([0, 3]),
        along=st.sampled_from([64, 0]),
        interval=st.sampled_from([64, 128, 0]),
        num_ranks=st.sampled_from([2, 2, 1]),
        staged=st.sampled_from([None, None, 1, 3]),
        limits=st.builds(Limits, gets=st.integers(1, 3), puts=st.integers(1, 4)),
        luck=st.integers(0, 1 << 16),
        first=st.lists(prompts, min_size=1, max_size=3),
        wish=wishes,
    )
    def build(
        self,
        num_slots,
        num_pages,
        batch,
        checkpoints,
        num_drafts,
        along,
        interval,
        num_ranks,
        staged,
        limits,
        luck,
        first,
        wish,
    ):
        self.shelf = Shelf()
        self.beyond = dict(num_ranks=num_ranks, batch=staged, limits=limits)
        self.kept: dict[str, Any] = {}
        self.outages = 0
        super().build(
            num_slots=num_slots,
            num_pages=num_pages,
            batch=batch,
            budget=300,
            mode="interior",
            alignment=64,
            granularity=64,
            interval=interval,
            checkpoints=checkpoints,
            caching=True,
            num_drafts=num_drafts,
            along=along,
            ahead=luck % 2 == 1,
            luck=luck,
            first=first,
            wish=wish,
        )

    def new_tower(self, **numbers: Any) -> StoredTower:
        self.kept = numbers or self.kept
        tower = StoredTower(self.shelf, eager=False, **self.beyond, **self.kept)
        for store in tower.stores:
            store.before = self._out_of_order
        return tower

    # What transfers do.

    @rule(which=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5)), min_size=1, max_size=8))
    def transfers_end(self, which):
        for number, job in which:
            ranks = self.tower.ranks
            ranks[number % len(ranks)].do(job)

    @rule(in_flight=st.booleans())
    def all_transfers_end(self, in_flight):
        if in_flight:
            self.during.append(self.tower.settle)
        else:
            self.tower.settle()

    @rule()
    def everything_runs_and_is_stored(self):
        for _ in range(30):
            self.tower.settle()
            if not self._step():
                break

    @rule(seconds=st.sampled_from([0.01, 0.3, 6.0]))
    def time_passes(self, seconds):
        self.tower.now += seconds

    # What a store does.

    @rule(kind=st.sampled_from(["/m/", "/s/", "/p/"]), which=st.integers(0, 50), bit=st.booleans())
    def lose_or_damage_an_object(self, kind, which, bit):
        named = [key for key in self.shelf.objects if kind in key]
        keys = sorted(named, key=lambda key: key.split("-")[0])  # generations are random
        if not keys:
            return
        key = keys[which % len(keys)]
        data = bytearray(self.shelf.objects.pop(key))
        if bit:
            # Of a state the tokens, of a page the entries: what a reader would believe.
            data[16 if kind == "/s/" else 0] ^= 1
            self.shelf.objects[key] = bytes(data)

    @rule(calls=st.integers(1, 4))
    def go_away_for_some_calls(self, calls):
        self.outages = calls

    @rule(
        which=st.integers(0, 50),
        pages=st.booleans(),
        then=st.sampled_from(["one rank ends", "flush", "abort", "damage", "nothing"]),
    )
    def ask_again_when_the_device_has_forgotten(self, which, pages, then):
        """And let something happen while the get is under way."""
        for _ in range(30):
            self.tower.settle()
            if not self._step():
                break
        index = self.engine._ledger.index
        while index.evict_slot():
            pass
        if pages:
            index.evict_pages(100)
        prompt = self._pick(which).request.tokens if self.asked else ()
        if len(prompt) <= PAGE_SIZE:
            return
        request = self.tower.request(prompt, max_tokens=3)
        self._submit(request)
        self._step()
        self.tower.ranks[0].do()
        self._step()
        if then == "one rank ends":
            self.tower.ranks[-1].do()
        elif then == "damage":
            for kind in ("/s/", "/p/"):
                self.lose_or_damage_an_object(kind, which, bit=True)
        elif then == "flush":
            self.flush(in_flight=False)
            self.tower.settle()
        elif then == "abort" and request.request_id in self.asked:
            self.asked[request.request_id].aborted = True
            self.engine.abort(request.request_id)
        self._step()

    @rule()
    def end_and_begin_again(self):
        """Another life, or another engine, over the same store."""
        self.run_dry()
        for asked in self.asked.values():
            self._check_answer(asked)
        self.engine.close()
        self._nothing_is_left()
        luck, during = self.dice, self.during
        self.tower = self.new_tower()
        self.engine, self.executor = self.tower.engine, self.tower.executor
        self.executor.right = self._right
        self.executor.is_late = lambda plan: self.dice.random() < self.late
        self.executor.during = self._interfere
        self.executor.fail = self._fail
        self.executor.writes = lambda slot, end: (slot, end) not in self.unwritten
        self.executor.finite = self._finite
        self.asked, self.flushes, self.dice, self.during = {}, 0, luck, during

    def teardown(self):
        if not hasattr(self, "tower") or not self.engine.healthy:
            return
        super().teardown()
        self._nothing_is_left()

    def _nothing_is_left(self) -> None:
        ledger = self.engine._ledger
        assert ledger.pool.num_free == ledger.pool.size
        assert ledger.pages.num_free == ledger.pages.size
        assert not self.tower.tiers.transfers.leases

    def _out_of_order(self, name: str, keys: Any) -> None:
        if self.outages:
            self.outages -= 1
            raise StoreUnavailable("gone")

    def numbers_add_up(self):
        pass  # counted by engine; several lived here


def planted(fault: Fault) -> Fault:
    """Register a fault."""
    FAULTS.append(fault)
    return fault


@planted
def the_first_rank_to_report_ends_a_transfer(patch: pytest.MonkeyPatch) -> None:
    begin, reported = Connector._begin, Connector._reported

    def impatient(self: Connector, job: Any, ranks: Any) -> None:
        begin(self, job, ranks)
        if job.number in self._jobs:
            self._jobs[job.number].missing = 1

    def once(self: Connector, report: Any) -> None:
        if report.number in self._jobs:
            reported(self, report)

    patch.setattr(Connector, "_begin", impatient)
    patch.setattr(Connector, "_reported", once)


@planted
def a_put_gives_its_slot_back_as_soon_as_it_has_begun(patch: pytest.MonkeyPatch) -> None:
    put, pin = Storing._put, StatePool.pin

    def faulty(self: Storing, checkpoint: Any) -> bool:
        done = put(self, checkpoint)
        for number, holding in list(self._puts.items()):
            self._transfers.release(holding)
            del self._puts[number]
        return done

    patch.setattr(Storing, "_put", faulty)
    patch.setattr(Storing, "ended", lambda self, job: None)
    patch.setattr(StatePool, "pin", pin)


@planted
def a_get_that_failed_is_published(patch: pytest.MonkeyPatch) -> None:
    loaded = Tiers._loaded
    patch.setattr(
        Tiers, "_loaded", lambda self, one, report: loaded(self, one, replace(report, why=""))
    )


@planted
def a_get_of_an_earlier_epoch_is_published(patch: pytest.MonkeyPatch) -> None:
    loaded = Tiers._loaded

    def faulty(self: Tiers, one: Any, report: Any) -> None:
        one.epoch = self._ledger.epoch
        loaded(self, one, report)

    patch.setattr(Tiers, "_loaded", faulty)
    patch.setattr(Connector, "cancel", lambda self, number: None)


@planted
def checksums_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rank, "checksum", lambda view: 0)


@planted
def what_a_get_fills_is_poisoned_as_free_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "spare", lambda self, slots, pages: None)


@planted
def an_abort_gives_back_the_slot_of_its_get(patch: pytest.MonkeyPatch) -> None:
    left, release = Tiers.left, Transfers.release

    def faulty(self: Tiers, sequence: Any) -> None:
        wait = self._waits.get(sequence)
        for number, one in list(self._gets.items()):
            if wait in one.waits and one.holding in self.transfers._holdings:
                release(self.transfers, one.holding)
                del self._gets[number]
        left(self, sequence)

    ended = Tiers.ended

    def tolerant(self: Tiers, job: Any, report: Any) -> None:
        if job.number in self._gets or job.number in self._lookups or not hasattr(job, "record"):
            ended(self, job, report)

    patch.setattr(Tiers, "left", faulty)
    patch.setattr(Tiers, "ended", tolerant)


@planted
def a_get_may_take_any_slot(patch: pytest.MonkeyPatch) -> None:
    """One that somebody still holds."""
    receive = Transfers.receive

    def faulty(self: Transfers, known: Any, fresh: int, protect: Any, name: str) -> Any:
        holding = receive(self, known, fresh, protect, name)
        taken = [s for s in range(self._ledger.pool.size) if self._ledger.pool.holders(s)]
        if isinstance(holding, Holding) and taken:
            parts = Holding.parts

            def wrong(one: Holding) -> Any:
                found = parts.__get__(one)
                return replace(found, slot=taken[0]) if one is holding else found

            patch.setattr(Holding, "parts", property(wrong))
        return holding

    patch.setattr(Transfers, "receive", faulty)
