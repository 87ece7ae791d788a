"""On one device, not a byte depends on the schedule: cold, warm, cut, batched, drafted, pushed out.

That is what our kernels promise of themselves. The matrix products between them are a library's,
which promises nothing of the kind; here they are made in blocks of one size, and then states,
pages, texts and log probabilities are equal byte for byte, and every state is finite.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.exactness import test_ahead, test_cuts, test_mtp, test_schedules, test_speculation
from tests.exactness.driver import Driver
from tests.exactness.engines import Ask, House, Served
from tests.exactness.families import FAMILIES, Kind, executor
from tests.exactness.prompts import BASE, GREEDY, OTHER, PROMPTS, SEEDED, TWO
from tests.support.recording import Truth

FORMS = [
    pytest.param(Kind("qwen", products="steady"), id="qwen-cpu-fp32"),
    *(
        pytest.param(
            Kind(family, "cuda", dtype, "steady"),
            marks=[pytest.mark.gpu, pytest.mark.xdist_group(f"{family} {name}")],
            id=f"{family}-gpu-{name}",
        )
        for family in FAMILIES
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    ),
]
"""On the CPU a little, for the tests of exactness show it at length, with the engine's products."""

MANY = {"cpu": (5,), "cuda": (1, 2, 3, 8, 17, 33, 64)}
DRAFTS = {"cpu": (3,), "cuda": (0, 1, 3, 5)}
EXAMPLES = {"cpu": 1, "cuda": 8}


@pytest.fixture(params=FORMS)
def kind(request: pytest.FixtureRequest) -> Kind:
    for truths in (test_cuts.TRUTHS, test_mtp.TRUTHS, test_schedules.TRUTHS):
        truths[request.param].differences.clear()  # what failed before has been told
    return request.param


def is_sound(served: Served) -> bool:
    """Whether all that was published is what some forward left, finite and unchanged."""
    assert served.executor.bytes_beyond == []
    assert served.executor.num_states > 0
    return True


def test_interior_split_and_no_checkpoints_cold_and_warm(kind: Kind) -> None:
    asks = [Ask(PROMPTS[0], GREEDY), Ask(PROMPTS[0], SEEDED, 12), Ask(PROMPTS[1], TWO, 24)]
    asks.append(Ask(BASE, GREEDY, 36))
    for mode in ("interior", "split", "off"):
        house = House(settings={"checkpoint_mode": mode, "checkpoint_interval": 64})
        served = test_schedules.check(kind, house, asks, mode)
        assert served.cached == ([0, 192, 128, 192] if mode != "off" else [0, 0, 0, 0])
        assert (served.executor.num_exports > 0) == (mode == "interior")
        assert is_sound(served)


def test_a_state_exported_inside_a_forward_is_the_one_a_cut_forward_leaves(kind: Kind) -> None:
    made = [
        Driver(executor(kind, Truth(), where, num_slots=12, num_pages=12, num_seats=2))
        for where in ("interior", "cut")
    ]
    ends = (64, 128, 192, 256, 320)
    interior, cut = (driver.start(BASE, GREEDY) for driver in made)
    beside = made[0].start(OTHER[:90], SEEDED)
    made[0].step([(beside, 64, (64,)), (interior, len(BASE), ends)])
    for end in (*ends, len(BASE)):
        made[1].step([(cut, end, ())])
    for end in ends:
        found, expected = (
            driver.executor.arenas.slots.storage[slot]
            for driver in made
            for slot in [
                next(s.slot for s in driver.saved if (s.tokens, s.end) == (BASE[:end], end))
            ]
        )
        assert torch.equal(found, expected), end
    slots = [
        driver.executor.arenas.slots.storage[run.slot]
        for driver, run in zip(made, (interior, cut), strict=True)
    ]
    assert torch.equal(*slots)
    assert interior.text == cut.text
    assert made[0].executor.bytes_beyond == made[1].executor.bytes_beyond == []


def test_drafts_change_nothing_cold_or_warm(kind: Kind) -> None:
    asks = test_speculation.ASKS
    later = [Ask(ask.tokens, ask.params, arrives=40 + 3 * i) for i, ask in enumerate(asks)]
    for k in DRAFTS[kind.device]:
        house = House(num_drafts=k, settings=test_speculation.ALONG)
        served = test_speculation.check(kind, house, [*asks, *later])
        assert served.cached[4:] == [64, 0, 64, 64]
        assert is_sound(served)
        if k:
            served = test_speculation.check(kind, house, asks, lambda k=k: k - 1)
            assert (served.stats.accepted_tokens > 0) == (k > 1)
            assert is_sound(served)


def test_a_request_gives_the_bytes_of_itself_alone_in_a_batch_of_any_size(kind: Kind) -> None:
    params = structs.replace(GREEDY, max_tokens=3)
    asks = [Ask(BASE[i : 2 * i + 33], params) for i in range(64)]
    for count in MANY[kind.device]:
        house = House(
            num_slots=2 * count + 12,
            num_pages=3 * count + 16,
            num_seats=count,
            settings={"max_prefill_tokens": 700, "checkpoint_interval": 64},
        )
        assert is_sound(test_schedules.check(kind, house, asks[:: 1 if count > 5 else 7]))


@pytest.mark.parametrize("k", [0, 3])
def test_steps_that_are_replayed_two_in_flight_change_nothing(k: int, kind: Kind) -> None:
    recorded = replace(kind, recorded=True)
    test_schedules.TRUTHS[recorded] = test_schedules.TRUTHS[kind]
    later = [Ask(ask.tokens, ask.params, arrives=40) for ask in test_ahead.ASKS]
    house = House(num_drafts=k, runs_ahead=True, settings=test_speculation.ALONG)
    served = test_speculation.check(recorded, house, [*test_ahead.ASKS, *later])
    assert served.stats.steps_ahead > 0
    assert served.cached[3:] == [64, 0, 64]
    assert served.executor.worker.runner.num_replays > 0
    assert is_sound(served)


def test_answers_pushed_out_are_recomputed(kind: Kind) -> None:
    asks = [Ask(prompt[i : i + 126], SEEDED) for i in (0, 7) for prompt in (BASE, OTHER)]
    house = House(num_slots=5, num_pages=9, num_seats=4, settings={"max_prefill_tokens": 512})
    served = test_schedules.check(kind, house, asks)
    assert served.stats.preemptions > 0
    assert is_sound(served)


def test_answers_pushed_out_with_drafts_pending_are_recomputed(kind: Kind) -> None:
    old = Ask(BASE[:110], structs.replace(test_speculation.SEEDED, max_tokens=30))
    asks = [
        old,
        Ask(OTHER[:190], structs.replace(test_speculation.GREEDY, max_tokens=40), arrives=2),
    ]
    house = House(num_drafts=3, num_slots=5, num_pages=6, num_seats=2)
    served = test_speculation.check(kind, house, asks, lambda: 2)
    assert served.stats.preemptions > 0
    assert is_sound(served)


def test_samples_that_fan_out_are_the_samples_of_lone_requests(kind: Kind) -> None:
    test_cuts.test_samples_that_fan_out_are_the_samples_of_lone_requests(kind, PROMPTS[4])
    test_mtp.test_samples_of_a_fan_out_draft_each_for_itself(kind)


@pytest.mark.parametrize(
    "mix", [test_cuts.cut_and_mix, test_mtp.accept_and_mix, test_speculation.schedule_and_mix]
)
def test_any_plans(mix, kind: Kind) -> None:  # type: ignore[no-untyped-def]
    """Prompts, decode and verify rows, exports, resumes and aborts, drawn at random."""

    @settings(max_examples=EXAMPLES[kind.device], derandomize=True, database=None)
    @given(data=st.data())
    def some(data: st.DataObject) -> None:
        mix(kind, data)

    some()
