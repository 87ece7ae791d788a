"""What one step with drafts may assume, touch and report, on models of both families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import millpond
from millpond.errors import Broken, StepFailed
from millpond.evaluate.cases import Dialect
from millpond.executor.uni import UniExecutor
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import Export, StepPlan, Verified, VerifyRow, Written
from millpond.runtime.propose import Live, Proposer
from millpond.runtime.worker import load
from millpond.state.lease import PageId, Seat, SlotId
from tests.exactness.drafting import DraftDriver, Script
from tests.exactness.driver import Run
from tests.exactness.families import FAMILIES, executor
from tests.exactness.prompts import BASE, GREEDY, OTHER, SEEDED
from tests.support.counting import changed_entries, snapshot
from tests.support.recording import Truth

BUNDLED = Path(millpond.__file__).parent / "bundled" / "millpond-tiny-glm"
NOBODY = VerifyRow(
    request="padding",
    seat=Seat(-1),
    start=0,
    pending=0,
    num_drafts=3,
    state_in=SlotId(-1),
    state_out=SlotId(-1),
    export=Export(1, SlotId(-1)),
)


class Noting:
    """Lets another propose, and notes the drafts by the token they follow, and its position."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.made: dict[tuple[int, int], tuple[int, ...]] = {}

    def propose(self, live: Live) -> torch.Tensor:
        """Token ids [n, K]."""
        drafts = self.inner.propose(live)
        for row, position, token in zip(
            drafts.tolist(), live.position.tolist(), live.token.tolist(), strict=True
        ):
            self.made[position, token] = tuple(row)
        return drafts


def live_run(
    family: str,
    num_drafts: int,
    *,
    accept: int | None = None,
    length: int = 100,
    num_seats: int = 4,
) -> tuple[DraftDriver, Run]:
    """A run that has drawn its first token; `accept` of its drafts will be right from then on."""
    sizes = {"num_slots": 12, "num_pages": 24, "num_seats": num_seats}
    made = DraftDriver(executor(family, Truth(), "steps", num_drafts=num_drafts, **sizes))
    run = made.start(BASE[:length], GREEDY)
    if accept is not None:
        plain = DraftDriver(executor(family, Truth(), "plain", **sizes))
        twin = plain.start(run.prompt, GREEDY)
        plain.step([(twin, length, ())])
        plain.decode([twin], 40)
        script = Script(num_drafts, lambda _: accept)
        script.texts[run.seat] = tuple(twin.tokens)
        made.executor.worker.runner.proposer = script
    made.step([(run, length, ())])
    return made, run


def verify_row(made: DraftDriver, run: Run, **changes: Any) -> VerifyRow:
    made._extend(run, len(run.tokens))
    given: dict[str, Any] = {
        "request": run.name,
        "seat": Seat(run.seat),
        "start": run.folded,
        "pending": made.pending.get(run.name, 0),
        "num_drafts": made.num_drafts,
        "state_in": SlotId(run.slot or 0),
        "state_out": SlotId(run.slot or 0),
    }
    return VerifyRow(**{**given, **changes})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_no_seat_touches_nothing(family: str) -> None:
    made, run = live_run(family, 3, accept=2)
    made.verify([(run, 3, None)])
    worker = made.executor.worker
    arenas, counters = worker.runner.arenas, worker.runner.staging.counters
    before = [snapshot(a) for a in (arenas.slots, arenas.pages, arenas.seats)]
    table = counters.of(torch.arange(-1, 4))
    result = worker.execute(StepPlan(step=9, verify=(NOBODY, NOBODY)))
    assert (result.emitted, result.verified, result.written) == ((), (), ())
    for arena, old in zip((arenas.slots, arenas.pages, arenas.seats), before, strict=True):
        assert changed_entries(arena, old) == {}
    for old, new in zip(_numbers(table), _numbers(counters.of(torch.arange(-1, 4))), strict=True):
        assert torch.equal(old, new)
    # Beside rows that have a seat it changes nothing either.
    mixed = StepPlan(step=10, verify=(NOBODY, verify_row(made, run), NOBODY))
    result = worker.execute(mixed)
    assert result.verified == (Verified(Seat(run.seat), 3, 2),)
    assert result.written == (Written(SlotId(run.slot or 0), run.folded + 3),)


def _numbers(c: Any) -> tuple[torch.Tensor, ...]:
    return c.base, c.pending, c.first, c.num_drafts, c.parity, c.drafts


@pytest.mark.parametrize("family", FAMILIES)
def test_the_devices_own_counts_decide_where_the_host_knows_bounds_only(family: str) -> None:
    made, run = live_run(family, 3, accept=1)
    made.verify([(run, 3, None)])
    base, pending = run.folded, made.pending[run.name]
    assert pending == 1
    slot = made._take_slot()
    bounds = {"start": base - 2, "pending": pending + 4, "export": Export(base + 1, SlotId(slot))}
    result = made.executor.worker.execute(
        StepPlan(step=9, verify=(verify_row(made, run, **bounds),))
    )
    assert set(result.written) == {
        Written(SlotId(run.slot or 0), base + pending + 1),
        Written(SlotId(slot), base + 1),
    }
    script = made.executor.worker.runner.proposer
    assert isinstance(script, Script)
    expected = script.texts[run.seat][len(run.tokens) :][:2]
    assert [e.token for e in result.emitted] == list(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seat_that_changes_hands_brings_nothing_pending_along(family: str) -> None:
    made, run = live_run(family, 3, accept=3, num_seats=1)
    made.verify([(run, 3, None)])
    assert made.pending[run.name] == 3
    made.finish(run)
    other = made.start(OTHER[:90], GREEDY)
    assert other.seat == run.seat
    assert other.load is not None
    made.executor.worker.execute(StepPlan(step=9, seat_loads=(other.load,)))
    counters = made.executor.worker.runner.staging.counters.of(torch.tensor([other.seat]))
    assert [int(x) for x in _numbers(counters)[:-1]] == [0] * 5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_page_that_cannot_be_read_ends_the_run_where_it_is_first_seen(family: str) -> None:
    made, run = live_run(family, 3, accept=3)
    page = PageId(run.pages[0])
    row = verify_row(made, run)
    result = made.executor.worker.execute(
        StepPlan(step=9, poison_pages=(page,), verify=(row,)),
    )
    assert [e.finite for e in result.emitted] == [False]
    assert result.verified == (Verified(Seat(run.seat), 3, 0),)


def test_drafts_without_room_are_dropped_and_known_tokens_without_room_are_a_defect() -> None:
    made, run = live_run("qwen", 7, length=126)  # two tokens before its second page ends
    seat, worker = Seat(run.seat), made.executor.worker
    worker.runner.staging._num_pages[seat] = 2
    worker.runner.staging.page_table[seat, 2:] = -1
    slot = SlotId(run.slot or 0)
    row = VerifyRow(
        request=run.name,
        seat=seat,
        start=126,
        pending=0,
        num_drafts=1,
        state_in=slot,
        state_out=slot,
    )
    assert len(worker.execute(StepPlan(step=9, verify=(row,))).emitted) >= 1
    with pytest.raises(StepFailed) as caught:
        worker.execute(StepPlan(step=10, verify=(verify_row(made, run, num_drafts=7),)))
    assert isinstance(caught.value.__cause__, Broken)


def test_a_runner_without_drafts_verifies_none() -> None:
    made, run = live_run("qwen", 0)
    row = verify_row(made, run, num_drafts=1)
    with pytest.raises(StepFailed, match="nobody who makes them"):
        made.executor.worker.execute(StepPlan(step=9, verify=(row,)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("accept", [0, 2, 3])
def test_drafts_are_made_from_the_hidden_vector_of_the_last_accepted_token(
    family: str, accept: int
) -> None:
    made, run = live_run(family, 3, accept=accept)
    plain, twin = live_run(family, 0)
    runner = made.executor.worker.runner
    script, seen = runner.proposer, []
    assert script is not None

    class Watching:
        def propose(self, live: Live) -> torch.Tensor:
            seen.append(live)
            return script.propose(live)

    runner.proposer = Watching()
    made.speculate([run], 12)
    slot = plain.executor.arenas.slots
    hidden = {}
    while len(twin.tokens) <= len(run.tokens):
        plain.step([(twin, len(twin.tokens), ())])
        hidden[twin.folded] = slot.view(-1, "boundary_hidden")[twin.slot].clone()
    for live in seen:
        position = int(live.position)
        assert int(live.token) == twin.tokens[position]
        assert torch.equal(live.hidden[0], hidden[position])
        assert live.ends[0] > position


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "sampled"])
def test_drafts_after_a_hit_are_those_of_a_cold_run(family: str, params: SamplingParams) -> None:
    """Draft keys and boundary data are of the checkpoint: no page is lost, nothing is replayed."""
    prompt = BASE[:150]
    sizes = {"num_slots": 16, "num_pages": 24, "num_seats": 4}
    made = DraftDriver(executor(family, Truth(), "hit", num_drafts=3, **sizes))
    runner = made.executor.worker.runner
    assert runner.proposer is not None
    own, notes = runner.proposer, []
    for resume in (False, True):
        saved = next((s for s in made.saved if s.end == 128), None) if resume else None
        assert (saved is not None) == resume
        run = made.start(prompt, params, resume=saved)
        runner.proposer = noting = Noting(own)
        made.step([(run, len(prompt), () if resume else (64, 128))])
        made.speculate([run], 12)
        notes.append((noting.made, run.text))
        made.finish(run)
    assert notes[0] == notes[1]
    assert len(notes[0][0]) > 4


@pytest.mark.parametrize("num_drafts", [1, 3, 5, 7])
def test_the_bundled_model_drafts_well_and_its_text_stays_what_it_was(num_drafts: int) -> None:
    dialect = Dialect(BUNDLED)
    texts = []
    for k in (0, num_drafts):
        worker = load(
            BUNDLED,
            dtype="float32",
            device="cpu",
            num_slots=6,
            num_pages=24,
            num_seats=3,
            session_len=1024,
            num_draft_tokens=k,
            debug_poison=True,
        )
        made = DraftDriver(UniExecutor(worker))
        runs = []
        for task, params in (("speech", GREEDY), ("json", SEEDED)):
            runs.append(made.start(dialect.case(task, 1).prompt, params))
        made.step([(run, len(run.prompt), ()) for run in runs])
        made.speculate(runs, 16) if k else made.decode(runs, 16)
        texts.append([run.text[:16] for run in runs])
        if k:
            assert sum(a for _, a in made.counts) > 0.4 * sum(n for n, _ in made.counts)
    assert texts[0] == texts[1]
