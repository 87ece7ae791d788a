"""Recorded steps of live rows: byte for byte what steps run one by one leave and report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from millpond.errors import Broken, StepFailed
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import SeatMask, StepPlan, VerifyRow, Written
from millpond.runtime import graphs
from millpond.runtime.graphs import CallAgain
from millpond.runtime.propose import Live
from millpond.state.lease import Seat, SlotId
from tests.exactness.drafting import DraftDriver
from tests.exactness.driver import Run
from tests.exactness.families import FAMILIES, VOCAB, Kind
from tests.support.twins import DRAWS, SEATS, Pair, Twins, prompt, texts

KINDS = [
    *(pytest.param(Kind(family), id=family) for family in FAMILIES),
    *(
        pytest.param(
            Kind(family, "cuda", dtype, "steady"), id=f"{family}-{name}", marks=pytest.mark.gpu
        )
        for family in FAMILIES
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    ),
]
"""On a GPU what is recorded is a graph; there products are in blocks of one size, so that bytes do
not depend on how many rows a library sees."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_recorded_steps_leave_and_report_what_single_ones_do(kind: Kind, num_drafts: int) -> None:
    twins = Twins(kind, num_drafts)
    pairs = [twins.begin(index) for index in range(SEATS)]
    assert twins.runner.num_replays == 0
    # Other rows every time, of every number; pages are added on the way, and exports passed.
    batches = ([0], [1, 2], [0, 1, 2], [4, 3, 2, 1], [0, 1, 2, 3, 4], [3], [4, 0], [2, 3, 4])
    for step, some in enumerate(batches):
        rows = [pairs[i] for i in some]
        twins.verify(rows, right=step % (num_drafts + 1), export=step % 3 == 0)
    for step in range(4):
        twins.verify(pairs, right=min(step, num_drafts))
    assert twins.runner.num_replays == 2 * (len(batches) + 4)
    assert {len(run.pages) for run, _ in pairs} >= {2, 3}
    assert any(accepted for _, accepted in twins.recorded.counts) == (num_drafts > 0)
    for index, (run, _) in enumerate(pairs):
        assert tuple(run.tokens) == texts(kind)[index][: len(run.tokens)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recording_for_short_sequences_is_left_when_one_of_them_grows(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "REACHES", (2, 3))
    twins = Twins(family, 3)
    assert twins.runner.num_captures == 2 * 4 * 3
    used = reaches_of(twins, monkeypatch)
    pairs = [twins.begin(i) for i in (0, 3, 1)]  # the last one ends near its second page's end
    for step in range(6):
        twins.verify(pairs[:2], right=2)
        twins.verify(pairs[2:], right=step % 4)
        twins.verify(pairs, right=1)
    of_short, of_long, of_all = used[0::3], used[1::3], used[2::3]
    assert set(of_short) == {2}
    assert of_long[0] == 2
    assert of_long[-1] == of_all[-1] == 3  # what it may draft reaches into the third page
    twins.both(lambda driver, n: driver.finish(pairs[2][n]))
    twins.verify(pairs[:2], right=3)
    assert used[-1] == 2
    for index, (_, run) in zip((0, 3, 1), pairs, strict=True):
        assert tuple(run.tokens) == texts(family)[index][: len(run.tokens)]


def reaches_of(twins: Twins, patch: pytest.MonkeyPatch) -> list[int]:
    """Pages of the recordings used from now on."""
    steady, used = twins.runner._steady, list[int]()
    assert steady is not None
    by_bucket = {id(bucket): reach for (_, reach), bucket in steady._buckets.items()}
    own = steady.forward

    def forward(rows: Any) -> Any:
        bucket = own(rows)
        used.append(by_bucket[id(bucket)])
        return bucket

    patch.setattr(steady, "forward", forward)
    return used


SPECIAL = {
    "penalties": {"temperature": 0.9, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "bias": {"temperature": 0.0, "logit_bias": ((5, 2.0), (9, -3.0))},
    "logprobs": {"temperature": 1.0, "logprobs": 3},
    "min_tokens": {"temperature": 1.0, "min_tokens": 70, "stop_token_ids": (4, 5, 6)},
}


@pytest.mark.parametrize(
    "family, what",
    [("glm", "penalties"), ("qwen", "bias"), ("glm", "logprobs"), ("qwen", "min_tokens")],
)
def test_rows_that_ask_for_more_repeat_the_forward_and_draw_by_themselves(
    family: str, what: str
) -> None:
    twins = Twins(family, 2)
    params = SamplingParams(max_tokens=80, seed=5, **SPECIAL[what])
    pairs = [twins.begin(0), twins.begin(1, params), twins.begin(2)]
    twins.verify([pairs[0], pairs[2]], right=2)
    assert twins.runner.num_replays == 2
    for _ in range(3):
        twins.verify(pairs[1:2])
        twins.verify(pairs)
    assert twins.runner.num_replays == 2 + 6
    (whole,) = texts(family, params)
    assert tuple(pairs[1][0].tokens) == whole[: len(pairs[1][0].tokens)]


def test_a_row_past_its_min_tokens_asks_for_no_more() -> None:
    twins = Twins("qwen", 0)
    pair = twins.begin(0, SamplingParams(max_tokens=80, min_tokens=4, temperature=0.0))
    for _ in range(6):
        twins.verify([pair])
    # Tokens 2 to 4 might have been stop tokens; 5 and on are drawn as any other.
    assert twins.runner.num_replays == 3 + 2 * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_masked_rows_and_told_drafts_are_drawn_by_themselves(family: str) -> None:
    twins = Twins(family, 2)
    pairs = [twins.begin(i) for i in range(3)]
    words = -(-VOCAB // 32)
    evens = np.array([0x55555555] * words, np.uint32).tobytes()

    def act(driver: DraftDriver, number: int) -> None:
        seat = Seat(pairs[1][number].seat)
        masks = (SeatMask(seat, (evens, None, evens)),)
        driver.executor.extra = {"masks": masks, "tell_drafts": (seat,)}
        driver.verify((pair[number], 2, None) for pair in pairs)
        driver.executor.extra = {}

    twins.both(act)
    assert twins.runner.num_replays == 1
    told = twins.results[0]
    assert [d.seat for d in told.drafts] == [pairs[1][1].seat]
    first = next(e.token for e in told.emitted if e.seat == pairs[1][1].seat)
    assert first % 2 == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_between_steps_of_all_kinds(family: str) -> None:
    """Prompts, known tokens, fan-outs, seats that change hands: all of them beside live rows."""
    twins = Twins(family, 2)
    pairs = [twins.begin(i) for i in (0, 1)]
    twins.verify(pairs, right=2)
    fresh = twins.both(lambda driver, _: driver.start(prompt(2), DRAWS[2]))

    def mixed(driver: DraftDriver, number: int) -> None:
        run = fresh[number]
        driver.verify(((pair[number], 2, None) for pair in pairs), [(run, len(run.prompt), ())])

    twins.both(mixed)
    assert twins.runner.num_replays == 2
    pairs.append(fresh)
    twins.verify(pairs, right=1)
    gone = pairs.pop(0)
    twins.both(lambda driver, n: driver.finish(gone[n]))
    pairs.append(twins.begin(4))
    for right in (0, 2, 1):
        twins.verify(pairs, right=right)
    known = texts(family)[3][len(prompt(3)) :][:7]
    again = twins.both(lambda driver, _: driver.start(prompt(3), DRAWS[3], generated=known))
    twins.both(lambda driver, n: driver.step([(again[n], len(again[n].prompt), ())]))
    twins.both(lambda driver, n: driver.step([(again[n], len(again[n].tokens), ())]))
    pairs.append(again)
    twins.verify(pairs, right=2)
    assert twins.runner.num_replays == 2 * 6
    for _, run in pairs:
        assert tuple(run.tokens) in {whole[: len(run.tokens)] for whole in texts(family)}


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_recording_touches_no_slot_no_page_and_no_seat(family: str, num_drafts: int) -> None:
    twins = Twins(family, num_drafts)
    pairs = [twins.begin(i) for i in range(3)]
    twins.verify(pairs)
    twins.runner.capture(capturer=CallAgain())
    twins.both(lambda driver, _: None)
    twins.verify(pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_no_seat_read_nothing_of_anybody(family: str) -> None:
    """What free seats, the place of lost writes and free memory hold is never looked at."""
    twins = Twins(family, 2)
    pairs = [twins.begin(i) for i in (0, 1, 2)]
    taken = {pair[1].seat for pair in pairs}
    free = [seat for seat in range(SEATS) if seat not in taken]

    def spoil(driver: DraftDriver, number: int) -> None:
        staging = driver.executor.worker.runner.staging
        lost = staging.counters.table.shape[1] - 2
        staging.counters.table[:, [*free, lost]] = 10**6 + number
        staging.page_table[free] = 10**6

    for some, right in (([0, 1, 2], 1), ([1], 2), ([2, 0, 1], 0)):
        for number, driver in enumerate((twins.plain, twins.recorded)):
            spoil(driver, number)
        kept = [twins.plain, twins.recorded]
        results = []
        for number, driver in enumerate(kept):
            del twins.results[:]
            runs = [pairs[i][number] for i in some]
            for run in runs:
                twins.plant(driver, run, right)
            driver.verify((run, 2, None) for run in runs)
            results.append(list(twins.results))
        assert results[0] == results[1]
    for index, (_, run) in enumerate(pairs):
        assert tuple(run.tokens) == texts(family)[index][: len(run.tokens)]


def test_drafts_of_somebody_else_are_not_part_of_a_recording() -> None:
    twins = Twins("qwen", 2)
    pairs = [twins.begin(i) for i in (0, 1)]
    for driver in (twins.plain, twins.recorded):
        driver.executor.worker.runner.proposer = Always(7)
    twins.verify(pairs)
    counters = twins.runner.staging.counters.of(torch.tensor([pairs[0][1].seat]))
    assert counters.drafts.tolist() == [[7, 7]]
    assert twins.runner.num_replays == 1


class Always:
    """Proposes one token for ever."""

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, live: Live) -> torch.Tensor:
        """[n, 2]."""
        return torch.full((len(live.seat), 2), self.token)


def test_a_launch_that_fails_leaves_the_next_one_sound() -> None:
    twins = Twins("qwen", 2)
    pairs = [twins.begin(i) for i in (0, 1)]
    twins.verify(pairs)
    runner, model = twins.runner, twins.runner.model
    failing = replace_forward(model, RuntimeError("out of memory"))
    with failing, pytest.raises(StepFailed, match="out of memory"):
        runner.execute(plan_of(twins, pairs[1:]))
    # Its rows' seats hold nothing to rely on; another one's do.
    for _ in range(2):
        twins.verify(pairs[:1], right=1)
    with pytest.raises(StepFailed) as caught:  # a page that its seat has not
        runner.execute(StepPlan(step=9, verify=(live_row(pairs[0][1], start=10**5),)))
    assert isinstance(caught.value.__cause__, Broken)
    twins.verify(pairs[:1], right=2)


def replace_forward(model: Any, error: Exception) -> Any:
    """While entered, forwards of `model` fail."""

    def fail(*args: Any) -> None:
        raise error

    return mock.patch.object(model, "forward", fail)


def live_row(run: Run, **changes: Any) -> VerifyRow:
    given: dict[str, Any] = {
        "request": run.name, "seat": Seat(run.seat), "start": run.folded, "pending": 0,
        "num_drafts": 2, "state_in": SlotId(run.slot or 0), "state_out": SlotId(run.slot or 0),
    }  # fmt: skip
    return VerifyRow(**{**given, **changes})


def plan_of(twins: Twins, pairs: Sequence[Pair]) -> StepPlan:
    return StepPlan(step=9, verify=tuple(live_row(pair[1]) for pair in pairs))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_step_launched_before_the_last_one_is_read_goes_on_from_it(
    family: str, num_drafts: int
) -> None:
    """The host knows only how far rows may have come; what was launched reports its own numbers."""
    twins = Twins(family, num_drafts)
    pairs = [twins.begin(i) for i in (0, 1, 3)]
    ends = [len(run.tokens) - 1 for _, run in pairs]  # the states' ends
    runs = [run for _, run in pairs]
    updates = [u for run in runs for u in twins.recorded._extend(run, len(run.tokens) + 40)]
    flying, found = [], {run.seat: list(run.tokens) for run in runs}
    written: list[Written] = []
    for step in range(6):
        rows = tuple(
            live_row(run, start=end, pending=num_drafts if step else 0, num_drafts=num_drafts)
            for run, end in zip(runs, ends, strict=True)
        )
        plan = StepPlan(step=step, verify=rows, page_updates=tuple(updates) if not step else ())
        flying.append(twins.runner.launch(plan))
        if len(flying) < 2:
            continue
        result = flying.pop(0).result()
        written = list(result.written)
        for emitted in result.emitted:
            found[emitted.seat].append(emitted.token)
    for emitted in flying.pop().result().emitted:
        found[emitted.seat].append(emitted.token)
    for index, run in zip((0, 1, 3), runs, strict=True):
        assert tuple(found[run.seat]) == texts(family)[index][: len(found[run.seat])]
        assert len(found[run.seat]) >= len(run.tokens) + 6
    assert [w.slot for w in written] == [run.slot for run in runs]
    assert twins.runner.num_replays == 2 * 6
