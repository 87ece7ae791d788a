"""The machine of the host tower where crowds share beginnings: holds, priorities, and few slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from millpond.engine import holding
from millpond.engine.holding import Holds
from millpond.engine.request import NO_SEAT
from millpond.engine.sharing import SharedPrefixes
from millpond.engine.turns import Turns
from millpond.plan.step import PAGE_SIZE
from tests.engine.machine import BASES, HostTower, wishes
from tests.support.symbolic import VOCAB

priorities = st.lists(st.integers(0, 2), min_size=2, max_size=7)


class Crowds(HostTower):
    """Many prompts at once that begin alike, of all priorities, often cut so that holds last."""

    run_plans_at_once_or_when_asked = None  # one step at a time here

    @initialize(
        num_slots=st.sampled_from([12, 6, 4, 3, 2, 1]),
        num_pages=st.sampled_from([60, 30, 13]),
        batch=st.sampled_from([5, 3, 2]),
        budget=st.sampled_from([1000, 256, 128]),
        mode=st.sampled_from(["split", "interior"]),
        interval=st.sampled_from([64, 128, 0]),
        checkpoints=st.sampled_from([30, 4, 1]),
        overtakes=st.sampled_from([0, 1, 3, 1000]),
        ahead=st.booleans(),
        luck=st.integers(0, 1 << 16),
        crowd=priorities,
    )
    def build(
        self,
        num_slots,
        num_pages,
        batch,
        budget,
        mode,
        interval,
        checkpoints,
        overtakes,
        ahead,
        luck,
        crowd,
    ):
        self.numbers = {"max_overtakes": overtakes}
        self.variants = 0
        super().build(
            num_slots=num_slots,
            num_pages=num_pages,
            batch=batch,
            budget=budget,
            mode=mode,
            alignment=64,
            granularity=64,
            interval=interval,
            checkpoints=checkpoints,
            caching=True,
            num_drafts=0,
            along=0,
            ahead=ahead,
            luck=luck,
            first=(),
            wish={},
        )
        self.come(crowd, 300, {"n": 1, "max_tokens": 3, "min_tokens": 0}, in_flight=False)

    @rule(
        crowd=priorities,
        shared=st.sampled_from([100, 200, 300, 448, 600]),
        wish=wishes,
        in_flight=st.booleans(),
    )
    def come(self, crowd, shared, wish, in_flight):
        def do():
            for priority in crowd:
                self.variants += 1
                tokens = BASES[0][:shared] + [(self.variants * i) % VOCAB for i in range(90)]
                asks = {**wish, "priority": priority, "cache_salt": "", "max_tokens": 3}
                self._submit(self.tower.request(tokens, **self._fitting(asks)))

        if in_flight:
            self.during.append(do)
        else:
            do()

    @rule(shared=st.sampled_from([300, 600]))
    def one_of_higher_priority_comes_late(self, shared):
        wish = {"n": 1, "max_tokens": 3, "min_tokens": 0}
        self.come([0], shared, wish, in_flight=False)
        self._step()
        self.come([3], shared, wish, in_flight=False)
        self._step()

    @rule(which=st.integers(0, 9))
    def preempt(self, which):
        scheduler = self.engine._scheduler
        if scheduler.running:
            scheduler.preempt(scheduler.running[which % len(scheduler.running)])

    @rule(in_flight=st.booleans())
    def flush_amid_holds(self, in_flight):
        for _ in range(6):
            if len(self.engine._scheduler.holds):
                self.flush(in_flight)
                break
            self._step()

    @invariant()
    def a_held_request_has_nothing_and_a_leader_that_will_publish(self):
        if not hasattr(self, "tower"):
            return
        scheduler, ledger = self.engine._scheduler, self.engine._ledger
        for held, hold in scheduler.holds.items():
            assert held in scheduler.waiting
            assert (held.state.leases, held.pages, held.seat) == ((), [], NO_SEAT)
            leader = hold.leader
            assert leader in scheduler.running
            assert leader.epoch == ledger.epoch
            assert leader.folded < hold.anchor <= leader.prompt_len
            assert leader.tokens[: hold.anchor] == held.tokens[: hold.anchor]
            assert leader.request.spec.priority >= held.request.spec.priority
            assert scheduler.holds._spent.get(held, 0) < hold.saves, "it pays no longer"

    @invariant()
    def those_that_wait_or_are_folded_are_compared_and_nobody_else(self):
        if not hasattr(self, "tower"):
            return
        scheduler = self.engine._scheduler
        folding = [one for one in scheduler.running if one.folded < one.prompt_len]
        here = {one for one in (*scheduler.waiting, *folding) if one.prompt_len > PAGE_SIZE}
        assert set(scheduler.shared._last) == here

    @invariant()
    def whoever_was_overtaken_often_enough_goes_first(self):
        if not hasattr(self, "tower"):
            return
        scheduler = self.engine._scheduler
        for queue in (scheduler.waiting, scheduler.running):
            assert queue == sorted(queue, key=lambda one: one.order)
        for one in scheduler.waiting:
            assert one.is_first or one.due is not None


Fault = Callable[[pytest.MonkeyPatch], None]


def nobody_hears_that_a_leader_stopped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holds, "stopped", lambda *_: None)


def nobody_hears_that_an_anchor_was_reached(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holds, "reached", lambda *_: None)


def a_hold_outlives_a_flush(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holds, "clear", lambda *_: None)


def anybody_may_lead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(holding, "_may_lead", lambda *_: True)


def a_prompt_that_left_is_still_compared(patch: pytest.MonkeyPatch) -> None:
    discard = SharedPrefixes.discard

    def faulty(shared: SharedPrefixes, sequence: Any, *, folded: bool = False) -> None:
        if folded:
            discard(shared, sequence)

    patch.setattr(SharedPrefixes, "discard", faulty)


def a_preempted_request_bears_nothing_any_more(patch: pytest.MonkeyPatch) -> None:
    came = Turns.came

    def faulty(turns: Turns, sequence: Any, others: int) -> None:
        if sequence.patience is None:
            came(turns, sequence, others)

    patch.setattr(Turns, "came", faulty)


FAULTS: list[Fault] = [
    nobody_hears_that_a_leader_stopped,
    nobody_hears_that_an_anchor_was_reached,
    a_hold_outlives_a_flush,
    anybody_may_lead,
    a_prompt_that_left_is_still_compared,
    a_preempted_request_bears_nothing_any_more,
]
"""To plant in holds and turns; all must be found."""
