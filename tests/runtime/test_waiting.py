"""No call of a launched step makes the host wait for the device, as far as a CPU can show it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from millpond.errors import StepFailed
from millpond.models.base import load
from millpond.ops.bind import bind
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import (
    Export,
    FanOut,
    Launched,
    PageUpdate,
    Row,
    SeatLoad,
    SeatMask,
    StepPlan,
    StepResult,
    VerifyRow,
)
from millpond.runtime.graphs import CallAgain
from millpond.runtime.worker import Worker
from millpond.state.lease import PageId, Seat, SlotId
from tests.exactness.families import FAMILIES, VOCAB, built
from tests.support.waiting import Waiting

PROMPT = tuple(range(5, 75))
PLAIN = SamplingParams(max_tokens=9, temperature=1.0, top_k=5, seed=3)
HEAVY = SamplingParams(
    max_tokens=9,
    temperature=1.0,
    seed=4,
    repetition_penalty=1.2,
    logit_bias=((3, 1.0),),
    logprobs=2,
    min_tokens=6,
    stop_token_ids=(9,),
)


def worker(family: str, num_drafts: int, waiting: Waiting | None) -> Worker:
    """With `waiting` on the CPU, where steps are recorded by a stand-in; else on the GPU."""
    device = torch.device("cpu" if waiting else "cuda")
    description, ops = built(family).description, bind(device)
    if waiting:
        ops = waiting.leave_alone(ops)
    made = Worker(
        load(description, ops, dtype=torch.float32, device=device, load_format="dummy", seed=3),
        description.layout(torch.float32, num_drafts),
        device=device,
        num_slots=8,
        num_pages=12,
        num_seats=4,
        vocab_size=VOCAB,
        max_position=256,
        ops=ops,
        num_draft_tokens=num_drafts,
        num_threads=1,
        debug_poison=True,
    )
    made.runner.capture(capturer=CallAgain() if waiting else None)
    return made


def seated(seat: int, params: SamplingParams) -> SeatLoad:
    return SeatLoad(
        seat=Seat(seat),
        request=f"r{seat}",
        sample_index=0,
        params=params,
        tokens=PROMPT,
        prompt_len=len(PROMPT),
    )


def prompt_row(seat: int, slot: int, *, scored: int | None = None, also: int | None = None) -> Row:
    return Row(
        request=f"r{seat}",
        seat=Seat(seat),
        start=0,
        tokens=PROMPT,
        state_in=None,
        state_out=SlotId(slot),
        exports=(Export(64, SlotId(slot + 4)),),
        emit_seats=(Seat(seat),) if also is None else (Seat(seat), Seat(also)),
        prompt_logprobs=scored,
    )


def live(seat: int, slot: int, num_drafts: int, slot_in: int | None = None) -> VerifyRow:
    return VerifyRow(
        request=f"r{seat}",
        seat=Seat(seat),
        start=len(PROMPT),
        pending=0,
        num_drafts=num_drafts,
        state_in=SlotId(slot if slot_in is None else slot_in),
        state_out=SlotId(slot),
        export=Export(len(PROMPT) + 1, SlotId(7)) if seat == 0 else None,
    )


def plans(k: int) -> dict[str, StepPlan]:
    """One of every kind, to be run in this order."""
    pages = {seat: tuple(PageId(3 * seat + i) for i in range(3)) for seat in range(4)}
    tables = tuple(PageUpdate(Seat(seat), 0, given) for seat, given in pages.items())
    evens = np.array([0x55555555] * (-(-VOCAB // 32)), np.uint32).tobytes()
    both = (live(0, 0, k), live(2, 2, k))
    return {
        "prompts and a fan-out": StepPlan(
            step=1,
            poison_slots=(SlotId(0), SlotId(3)),
            poison_pages=(PageId(1),),
            seat_loads=tuple(seated(s, p) for s, p in enumerate((PLAIN, PLAIN, HEAVY, HEAVY))),
            page_updates=tables,
            prefill=(prompt_row(0, 0, also=1), prompt_row(2, 2, scored=2)),
            fan_outs=(FanOut(Seat(0), Seat(1), PageId(1), PageId(4)),),
        ),
        "live rows": StepPlan(step=2, verify=(live(0, 0, k), live(1, 1, k, slot_in=0))),
        "pages are added": StepPlan(
            step=3,
            verify=(live(0, 0, k),),
            page_updates=(PageUpdate(Seat(0), 2, (PageId(2),)),),
            poison_pages=(PageId(11),),
        ),
        "rows that ask for more": StepPlan(
            step=4,
            verify=both,
            masks=(SeatMask(Seat(2), (evens,)),),
            tell_drafts=(Seat(0),) if k else (),
        ),
        "known tokens beside live rows": StepPlan(
            step=5,
            verify=both,
            prefill=(prompt_row(3, 3),),
            seat_loads=(seated(3, HEAVY),),
            page_updates=tables[3:],
        ),
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_no_call_of_a_step_waits(family: str, num_drafts: int) -> None:
    waiting = Waiting()
    made = worker(family, num_drafts, waiting)
    for what, plan in plans(num_drafts).items():
        with waiting:
            launched = made.launch(plan)
        assert waiting.found == [], what
        launched.result()
    assert made.runner.num_replays == 2 + 2 + 1


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_no_call_of_a_step_waits_for_a_gpu(family: str, num_drafts: int) -> None:
    made = worker(family, num_drafts, None)
    for what, plan in plans(num_drafts).items():
        made.execute(plan)  # compiles its kernels
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched = made.launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        assert launched.result().step == plan.step, what


def later_plans(k: int) -> list[StepPlan]:
    """Prompts after prompts, prompts beside live rows, masks that follow: each after the last."""
    first, *others = plans(k).values()
    prompt = first.prefill[1]
    half = replace(prompt, tokens=PROMPT[:64], exports=(), emit_seats=(), prompt_logprobs=None)
    rest = replace(prompt, start=64, tokens=PROMPT[64:], state_in=half.state_out, exports=())
    begun = replace(first, step=0, prefill=(first.prefill[0], half))
    ended = replace(
        first,
        step=1,
        prefill=(rest,),
        verify=(live(0, 0, k),),
        poison_slots=(),
        poison_pages=(),
        seat_loads=(),
        page_updates=(),
        fan_outs=(),
    )
    masked = replace(others[2], step=9, masks=(), draws_later=True)
    return [begun, ended, *others, masked]


def in_twos(made: Worker, todo: list[StepPlan], masks: tuple[SeatMask, ...]) -> list[StepResult]:
    """Each is launched before the one before it is asked for its result."""
    results, flying = list[StepResult](), list[Launched]()
    for plan in todo:
        flying.append(made.launch(plan))
        if len(flying) == 2:
            results.append(flying.pop(0).result())
        if plan.draws_later:
            flying[0].draw(masks)
    return results + [one.result() for one in flying]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_two_steps_in_flight_leave_and_report_what_one_at_a_time_does(
    family: str, num_drafts: int
) -> None:
    waiting, alone = Waiting(), Waiting()
    made, other = worker(family, num_drafts, waiting), worker(family, num_drafts, alone)
    todo = later_plans(num_drafts)
    masks = plans(num_drafts)["rows that ask for more"].masks
    with waiting:
        found = in_twos(made, todo, masks)
    # Results were asked for within: that is no call on the device either.
    assert waiting.found == []
    told = [replace(p, masks=masks, draws_later=False) if p.draws_later else p for p in todo]
    assert found == [other.launch(plan).result() for plan in told]
    for name in ("slots", "pages", "seats"):
        left, right = (getattr(one.runner.arenas, name).storage for one in (made, other))
        assert torch.equal(left, right), name
    assert torch.equal(made.runner.staging.counters.table, other.runner.staging.counters.table)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_no_call_of_a_step_after_one_in_flight_waits_for_a_gpu(
    family: str, num_drafts: int
) -> None:
    made, other = worker(family, num_drafts, None), worker(family, num_drafts, None)
    todo = later_plans(num_drafts)
    masks = plans(num_drafts)["rows that ask for more"].masks
    told = [replace(p, masks=masks, draws_later=False) if p.draws_later else p for p in todo]
    found = [other.launch(plan).result() for plan in told]  # compiles its kernels
    results, flying = list[StepResult](), list[Launched]()
    for plan in todo:
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            flying.append(made.launch(plan))
            if plan.draws_later:
                flying[-1].draw(masks)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        if len(flying) == 2:
            results.append(flying.pop(0).result())
    assert results + [one.result() for one in flying] == found


def test_a_step_that_was_never_told_what_it_may_draw_fails() -> None:
    made = worker("qwen", 0, Waiting())
    made.launch(plans(0)["prompts and a fan-out"]).result()
    masked = replace(plans(0)["rows that ask for more"], masks=(), draws_later=True)
    with pytest.raises(StepFailed, match="never told"):
        made.launch(masked).result()
    made.launch(plans(0)["live rows"]).result()


def test_calls_that_wait_are_found() -> None:
    waiting, x = Waiting(), torch.arange(5)
    with waiting:
        for call in (
            lambda: int(x[0]),
            lambda: x[x > 2],
            lambda: torch.tensor([1, 2]),
            lambda: x.nonzero(),
            lambda: x.repeat_interleave(x),
            lambda: x.__setitem__(torch.arange(2), 5),
        ):
            before = len(waiting.found)
            call()
            assert len(waiting.found) > before
        with waiting.elsewhere():
            int(x[0])
    assert not any("reads" in found for found in waiting.found[1:])
