"""One step on one rank: order on the device, what is reported, and what a failure leaves behind."""

from __future__ import annotations

import pytest
import torch

from millpond.errors import Broken, StepFailed
from millpond.memory.arena import Arenas
from millpond.memory.host_ring import Landing
from millpond.nn.batch import Staging
from millpond.ops.bind import bind
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import (
    Export,
    FanOut,
    PageUpdate,
    Row,
    SeatLoad,
    StepPlan,
    StepResult,
    Written,
)
from millpond.runtime.runner import ModelRunner
from millpond.runtime.seats import SeatSampling
from millpond.runtime.verify import Verifier
from millpond.state.lease import PageId, Seat, SlotId
from tests.memory.test_host_ring import SlowDevice
from tests.support.counting import CountWrites, changed_entries, snapshot
from tests.support.fake_model import (
    ATTENTION_LAYER,
    VOCAB,
    FakeModel,
    checksum,
    expected_token,
    fake_layout,
)

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
PROMPT = tuple((7 * i + i // 5) % VOCAB for i in range(150))


def make_runner(num_slots: int = 8, num_pages: int = 12, num_seats: int = 5) -> ModelRunner:
    arenas = Arenas.allocate(
        fake_layout(), num_slots=num_slots, num_pages=num_pages, num_seats=num_seats, device=CPU
    )
    for arena in (arenas.slots, arenas.pages, arenas.seats):
        arena.fill_nan(range(arena.count))
    ops = bind(CPU)
    seats = SeatSampling(num_seats, VOCAB, CPU, ops)
    return ModelRunner(FakeModel(), arenas, Staging(num_seats, 8, CPU), Verifier(seats, ops))


def load(
    seat: int, tokens: tuple[int, ...] = PROMPT, index: int = 0, params: SamplingParams = GREEDY
) -> SeatLoad:
    return SeatLoad(
        seat=Seat(seat),
        request=f"r{seat}",
        sample_index=index,
        params=params,
        tokens=tokens,
        prompt_len=len(tokens),
    )


def give(seat: int, first: int, *pages: int) -> PageUpdate:
    return PageUpdate(Seat(seat), first, tuple(PageId(p) for p in pages))


def row(
    seat: int,
    start: int,
    tokens: tuple[int, ...],
    slots: tuple[int | None, int],
    exports: tuple[tuple[int, int], ...] = (),
    emit: tuple[int, ...] = (),
) -> Row:
    state_in, state_out = slots
    return Row(
        request=f"r{seat}",
        seat=Seat(seat),
        start=start,
        tokens=tokens,
        state_in=None if state_in is None else SlotId(state_in),
        state_out=SlotId(state_out),
        exports=tuple(Export(end, SlotId(slot)) for end, slot in exports),
        emit_seats=tuple(Seat(s) for s in emit),
    )


def whole_prompt(exports: tuple[tuple[int, int], ...] = ((64, 4), (128, 6))) -> StepPlan:
    return StepPlan(
        step=1,
        seat_loads=(load(2),),
        page_updates=(give(2, 0, 7, 3, 5),),
        prefill=(row(2, 0, PROMPT, (None, 1), exports, emit=(2,)),),
    )


def tokens_of(result: StepResult) -> dict[int, int]:
    assert all(e.finite for e in result.emitted)
    return {e.seat: e.token for e in result.emitted}


def state(runner: ModelRunner, slot: int) -> float:
    return float(runner.arenas.slots.view(0, "recurrent")[slot])


def test_a_step_draws_the_token_and_reports_every_state_it_wrote() -> None:
    runner = make_runner()
    result = runner.execute(whole_prompt())
    assert tokens_of(result) == {2: expected_token(list(PROMPT))}
    assert set(result.written) == {
        Written(SlotId(1), 150),
        Written(SlotId(4), 64),
        Written(SlotId(6), 128),
    }
    assert state(runner, 4) == checksum(list(PROMPT[:64]))
    assert state(runner, 6) == checksum(list(PROMPT[:128]))


def test_a_row_resumes_from_a_slot_it_does_not_write() -> None:
    runner = make_runner()
    runner.execute(whole_prompt())
    before = runner.arenas.slots.storage[6].clone()
    other = (*PROMPT[:128], 9, 8, 7)
    result = runner.execute(
        StepPlan(
            step=2,
            seat_loads=(load(0, other),),
            page_updates=(give(0, 0, 7, 3, 8),),
            prefill=(row(0, 128, other[128:], (6, 0), emit=(0,)),),
        )
    )
    assert tokens_of(result) == {0: expected_token(list(other))}
    assert torch.equal(runner.arenas.slots.storage[6], before)
    assert result.written == (Written(SlotId(0), 131),)


def test_decode_rows_run_in_place_beside_a_prefill_and_after_it() -> None:
    runner = make_runner()
    first = tokens_of(runner.execute(whole_prompt()))[2]
    mixed = runner.execute(
        StepPlan(
            step=2,
            seat_loads=(load(4, PROMPT[:70]),),
            page_updates=(give(4, 0, 0, 2),),
            prefill=(row(4, 0, PROMPT[:70], (None, 5), emit=(4,)),),
            decode=(row(2, 150, (first,), (1, 1), emit=(2,)),),
        )
    )
    expect = expected_token([*PROMPT, first])
    assert tokens_of(mixed) == {2: expect, 4: expected_token(list(PROMPT[:70]))}
    assert Written(SlotId(1), 151) in mixed.written


def test_several_known_tokens_are_refolded_in_per_token_form() -> None:
    runner = make_runner()
    runner.execute(whole_prompt(exports=()))
    known = (3, 1, 4, 1, 5)
    result = runner.execute(
        StepPlan(step=2, decode=(row(2, 150, known, (1, 0), emit=(2,)),)),
    )
    assert tokens_of(result) == {2: expected_token([*PROMPT, *known])}


def test_logits_are_made_only_where_a_token_is_drawn() -> None:
    runner = make_runner()
    asked: list[int] = []
    original = runner.model.logits
    runner.model.logits = lambda h: asked.append(len(h)) or original(h)  # type: ignore[method-assign]
    runner.execute(
        StepPlan(
            step=1,
            seat_loads=(load(2),),
            page_updates=(give(2, 0, 7, 3, 5),),
            prefill=(row(2, 0, PROMPT[:128], (None, 1)),),
        )
    )
    assert asked == []
    result = runner.execute(
        StepPlan(step=2, prefill=(row(2, 128, PROMPT[128:], (1, 1), emit=(2,)),))
    )
    assert asked == [1]
    assert tokens_of(result) == {2: expected_token(list(PROMPT))}


def test_a_fan_out_gives_every_sample_its_own_partial_page_and_tail() -> None:
    runner = make_runner()
    loads = (load(2), load(0, index=1), load(3, index=2))
    pages = (give(2, 0, 7, 3, 5), give(0, 0, 7, 3, 8), give(3, 0, 7, 3, 9))
    fan = tuple(FanOut(Seat(2), Seat(t), PageId(5), PageId(p)) for t, p in ((0, 8), (3, 9)))
    first = runner.execute(
        StepPlan(
            step=1,
            seat_loads=loads,
            page_updates=pages,
            prefill=(row(2, 0, PROMPT, (None, 1), emit=(2, 0, 3)),),
            fan_outs=fan,
        )
    )
    assert tokens_of(first) == dict.fromkeys((2, 0, 3), expected_token(list(PROMPT)))
    # All three read the one sealed slot; each writes its own.
    branch = {2: 11, 0: 22, 3: 33}
    rows = tuple(
        row(seat, 150, (token,), (1, slot), emit=(seat,))
        for (seat, token), slot in zip(branch.items(), (0, 4, 6), strict=True)
    )
    second = runner.execute(StepPlan(step=2, decode=rows))
    assert tokens_of(second) == {s: expected_token([*PROMPT, t]) for s, t in branch.items()}
    assert state(runner, 1) == checksum(list(PROMPT))


def test_poison_comes_before_everything_a_step_writes() -> None:
    runner = make_runner()
    runner.execute(whole_prompt())
    plan = StepPlan(
        step=2,
        poison_slots=(SlotId(6), SlotId(5)),
        poison_pages=(PageId(3), PageId(0)),
        seat_loads=(load(0, PROMPT[:64]),),
        page_updates=(give(0, 0, 3),),
        prefill=(row(0, 0, PROMPT[:64], (None, 6), emit=(0,)),),
    )
    assert tokens_of(runner.execute(plan)) == {0: expected_token(list(PROMPT[:64]))}
    key = runner.arenas.pages.view(ATTENTION_LAYER, "key")
    assert key[0].isnan().all()
    assert runner.arenas.slots.view(2, "conv")[5].isnan().all()


def test_reading_a_poisoned_slot_or_page_is_not_finite() -> None:
    for poison in ({"poison_slots": (SlotId(1),)}, {"poison_pages": (PageId(3),)}):
        runner = make_runner()
        runner.execute(whole_prompt())
        result = runner.execute(
            StepPlan(step=2, decode=(row(2, 150, (5,), (1, 0), emit=(2,)),), **poison)
        )
        assert [e.finite for e in result.emitted] == [False]


def test_a_seat_load_clears_tail_and_page_table_of_the_seat_alone() -> None:
    runner = make_runner()
    runner.execute(whole_prompt())
    tails = runner.arenas.seats.view(ATTENTION_LAYER, "tail")
    kept = runner.arenas.seats.storage[2].clone()
    runner.execute(StepPlan(step=2, seat_loads=(load(0),)))
    assert torch.equal(runner.arenas.seats.storage[2], kept)
    runner.execute(StepPlan(step=3, seat_loads=(load(2),)))
    assert tails[2].isnan().all()
    assert runner.staging.page_table[2].eq(-1).all()


def test_an_export_one_layer_did_not_write_is_not_reported() -> None:
    runner = make_runner()
    assert isinstance(runner.model, FakeModel)
    runner.model.layers_silent = {2}
    result = runner.execute(whole_prompt())
    assert result.written == (Written(SlotId(1), 150),)


def test_a_failed_forward_raises_step_failed_with_its_cause_and_the_next_step_runs() -> None:
    runner = make_runner()
    assert isinstance(runner.model, FakeModel)
    runner.execute(whole_prompt())
    runner.model.fail = RuntimeError("the device is out of memory")
    with pytest.raises(StepFailed, match="out of memory") as caught:
        runner.execute(StepPlan(step=2, decode=(row(2, 150, (5,), (1, 0), emit=(2,)),)))
    assert isinstance(caught.value.__cause__, RuntimeError)
    runner.model.fail = None
    result = runner.execute(StepPlan(step=3, decode=(row(2, 150, (6,), (1, 0), emit=(2,)),)))
    assert tokens_of(result) == {2: expected_token([*PROMPT, 6])}


def test_a_launch_that_fails_is_told_when_the_device_is_done_with_what_was_queued() -> None:
    """Until then a kernel may write the slots that the host gives to somebody else."""
    runner, device, done = make_runner(), SlowDevice(), list[str]()
    assert isinstance(runner.model, FakeModel)
    runner._landing = Landing(CPU, device)
    runner.model.fail = RuntimeError("half way")
    launched = runner.launch(whole_prompt())
    device.queued.append(lambda: done.append("a kernel"))
    with pytest.raises(StepFailed, match="half way"):
        launched.result()
    assert done == ["a kernel"]


def test_a_plan_that_runs_beyond_a_seats_pages_never_reaches_the_model() -> None:
    runner = make_runner()
    assert isinstance(runner.model, FakeModel)
    plan = StepPlan(
        step=1,
        seat_loads=(load(2),),
        page_updates=(give(2, 0, 7),),
        prefill=(row(2, 0, PROMPT, (None, 1)),),
    )
    with pytest.raises(StepFailed) as caught:
        runner.execute(plan)
    assert isinstance(caught.value.__cause__, Broken)
    assert runner.model.num_forwards == 0


def test_a_step_writes_its_outputs_and_exports_and_not_one_byte_more() -> None:
    runner = make_runner()
    slots = runner.arenas.slots
    size = sum(t.num_bytes for t in slots.spec.tensors)
    before = snapshot(slots)
    with CountWrites(slots) as count:
        runner.execute(whole_prompt())
    assert set(changed_entries(slots, before)) == {1, 4, 6}
    assert count.num_bytes == 3 * size
    before = snapshot(slots)
    with CountWrites(slots) as count:
        runner.execute(StepPlan(step=2, decode=(row(2, 150, (5,), (1, 0), emit=(2,)),)))
    assert set(changed_entries(slots, before)) == {0}
    assert count.num_bytes == size
