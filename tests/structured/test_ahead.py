"""Guided rows while another step is in flight: their forward runs before their masks are known."""

from __future__ import annotations

import threading

import pytest
from msgspec.structs import replace

from millpond.engine import guidance
from millpond.plan.step import Launched, StepPlan
from tests.structured.engines import House, Told, read
from tests.structured.test_constrained import REGEX, asked, read_some


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock decides who goes ahead."""
    monkeypatch.setattr(guidance, "GRACE", 60.0)
    monkeypatch.setattr(guidance, "GRACE_AHEAD", 60.0)


def requests(house: House) -> list:
    plain = [house.request(max_tokens=60, ignore_eos=True, seed=9), house.request(max_tokens=5)]
    return asked(house) + plain


@pytest.fixture(scope="module")
def plain_texts() -> list[Told]:
    house = House()
    told = [told for answers in house.tell(*requests(house)) for told in answers]
    house.close()
    return told


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_texts_are_those_of_one_step_at_a_time(plain_texts: list[Told], num_drafts: int):
    house = House(num_drafts, ahead=True)
    told = [told for answers in house.tell(*requests(house)) for told in answers]
    stats, events = house.engine.stats(), house.executor.events
    house.close()
    assert [one.tokens for one in told] == [one.tokens for one in plain_texts]
    assert [one.finish for one in told] == [one.finish for one in plain_texts]
    later = [plan.step for plan in house.executor.plans if plan.draws_later]
    assert len(later) > 10
    for step in later:  # launched beside the one before, told when that has ended
        order = [events.index((what, step)) for what in ("launch", "draw", "end")]
        assert order == sorted(order)
        assert events.index(("launch", step)) < events.index(("end", step - 1)) < order[1]
    assert stats.steps_ahead > stats.steps - 5
    assert (num_drafts > 0) == (sum(one.accepted for one in told) > 10)
    assert (stats.slots_free, stats.pages_free) == (stats.slots_total, stats.pages_total)


def test_a_guide_that_has_not_shown_to_be_quick_holds_up_nobody(monkeypatch):
    house = House(ahead=True)
    gate, fill = threading.Event(), guidance._fill

    def gated(share) -> None:
        assert gate.wait(60)
        fill(share)

    monkeypatch.setattr(guidance, "_fill", gated)
    monkeypatch.setattr(guidance, "GRACE", 0.0)
    slow = house.engine.submit(house.request(constraint=REGEX))
    plain = house.engine.submit(house.request(max_tokens=10, ignore_eos=True))
    told = Told()
    while told.finish is None:
        assert house.engine.step()
        told = read_some(plain, told)
    assert len(told.tokens) == 10
    assert len(read_some(slow, Told()).tokens) == 1
    gate.set()
    while house.engine.step():
        pass
    ended = read(slow, 1)[0]
    assert (ended.finish, ended.error) == ("stop", None)
    assert not any(plan.draws_later for plan in house.executor.plans)
    house.close()


def test_an_abort_and_a_failed_step_while_masks_are_awaited_leave_nothing(
    plain_texts: list[Told],
):
    house = House(ahead=True)
    streams = [house.engine.submit(request) for request in requests(house)]
    launch = house.executor.launch
    for _ in range(8):
        assert house.engine.step()
    streams[2].abort()
    for _ in range(3):
        assert house.engine.step()
    broken: list[int] = []

    def failing(plan: StepPlan) -> Launched:
        if not broken and plan.draws_later:
            broken.append(plan.step)
            plan = replace(plan, verify=(replace(plan.verify[0], start=1 << 20), *plan.verify[1:]))
        return launch(plan)

    house.executor.launch = failing
    while house.engine.step():
        pass
    stats = house.engine.stats()
    assert (stats.steps_failed, len(broken)) == (1, 1)
    assert (stats.slots_free, stats.pages_free) == (stats.slots_total, stats.pages_total)
    assert house.engine.healthy
    numbers = (2, 1, 1, 1, 1, 1, 1)
    told = [one for stream, n in zip(streams, numbers, strict=True) for one in read(stream, n)]
    aborted, whole = told.pop(3), plain_texts[3]
    assert (aborted.finish, aborted.tokens) == ("abort", whole.tokens[: len(aborted.tokens)])
    assert told == plain_texts[:3] + plain_texts[4:]
    house.close()
