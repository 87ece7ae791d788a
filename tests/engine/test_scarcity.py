"""One slot, or one page, fewer than wanted, at every moment at which anything looks for one."""

from __future__ import annotations

import random

import pytest

from millpond.engine.scheduler import Scheduler
from millpond.state.pages import PagePool
from millpond.state.pool import StatePool
from millpond.state.running import RunningState
from tests.support.towers import Tower, collect

SHARED = random.Random(0).choices(range(50), k=200)


class Squeeze:
    """At the `at`-th look everything free is gone, until the plan is made."""

    def __init__(self, patch: pytest.MonkeyPatch, what: str, at: int) -> None:
        self.looks = 0
        self.at = at
        self.planning = False
        self.taken: list = []
        self.pool: StatePool | PagePool | None = None
        num_free = (StatePool if what == "slots" else PagePool).num_free.fget
        plan_output, schedule = RunningState.plan_output, Scheduler.schedule

        def look(pool):
            self.looks += self.planning
            if self.planning and self.looks == self.at:
                self.pool, free = pool, num_free(pool)
                if isinstance(pool, StatePool):
                    self.taken = [pool.take("squeeze") for _ in range(free)]
                else:
                    self.taken = pool.take(free)
            return num_free(pool)

        def looking(state, pool):
            look(pool)
            return plan_output(state, pool)

        def scheduling(scheduler):
            self.planning = True
            scheduled = schedule(scheduler)
            self.planning = False
            taken, self.taken = self.taken, []
            if isinstance(self.pool, StatePool):
                for lease in taken:
                    self.pool.release(lease)
            elif taken:
                self.pool.release(taken)
            if taken:
                scheduler.unblock()
            return scheduled

        patch.setattr(Scheduler, "schedule", scheduling)
        if what == "slots":
            patch.setattr(StatePool, "num_free", property(look))
            patch.setattr(RunningState, "plan_output", looking)
        else:
            patch.setattr(PagePool, "num_free", property(look))


def serve() -> None:
    """A crowd of two priorities, samples that part, and an arrival amid it."""
    tower = Tower(num_slots=7, num_pages=24, checkpoint_interval=64, decode_checkpoint_interval=64)

    def request(number: int, **how: int):
        tail = random.Random(number).choices(range(50), k=30)
        return tower.request(SHARED + tail, seed=number, **how)

    requests = [request(n, n=1 + n % 2, max_tokens=40, priority=n % 2) for n in range(4)]
    streams = [tower.engine.submit(one) for one in requests]
    for _ in range(3):
        tower.step()
    requests.append(request(9, priority=2))
    streams.append(tower.engine.submit(requests[-1]))
    tower.run()
    tower.run()  # a step that found nothing at all left everybody for the next one
    assert [collect(stream) for stream in streams] == [tower.naive(one) for one in requests]
    tower.assert_nothing_is_held()


@pytest.mark.parametrize("what", ["slots", "pages"])
def test_everything_ends_well_whenever_it_is_missing(what):
    with pytest.MonkeyPatch.context() as patch:
        squeeze = Squeeze(patch, what, at=0)
        serve()
    looks = squeeze.looks
    assert looks > 15
    for at in range(1, looks, max(1, looks // 60)):
        with pytest.MonkeyPatch.context() as patch:
            Squeeze(patch, what, at=at)
            serve()
