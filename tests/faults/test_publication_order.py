"""Kind: a checkpoint can be found before its bytes are written, or although they never are."""

from __future__ import annotations

import pytest
import torch

from millpond.errors import StepFailed
from millpond.plan.step import Export, StepPlan, StepResult
from millpond.state.lease import SlotId
from tests.faults.families import FAMILIES, prefill, worker
from tests.faults.house import Ask, House, answer, prompt
from tests.support.fake_model import LINEAR_LAYERS, FakeModel

LONG = prompt(1_000)


def written(house: House) -> set[tuple[int, int]]:
    """Every (slot, end) that any step has reported."""
    return {(w.slot, w.end) for result in house.executor.results for w in result.written}


def planned_exports(house: House) -> set[tuple[int, int]]:
    return {(e.slot, e.end) for row in house.executor.rows() for e in row.exports}


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_prompt_cancelled_in_flight_hits_no_deeper_than_its_last_finished_chunk(
    chunk,
):
    """Chunks are 256 tokens; the client leaves while one is on the device, and returns at once."""
    house = House()
    first = house.ask(LONG)

    def leave(plan: StepPlan) -> None:
        if any(row.start == 256 * chunk for row in plan.prefill):
            first.stream.abort()

    house.executor.before = leave
    house.run(first)
    assert first.finish == ["abort"]
    deepest = max((end for _, end in written(house)), default=0)
    house.executor.before = lambda plan: None
    again = house.served(LONG)
    assert again.cached <= deepest <= 256 * (chunk + 1)
    assert again.is_right
    house.assert_nothing_is_held()


@pytest.mark.parametrize("chunk", [0, 1, 3])
def test_nothing_of_a_failed_forward_can_be_found(chunk):
    """The forward of one chunk is lost; the states it would have exported must not be hit."""
    house = House(checkpoint_interval=64)
    house.ask(LONG)
    failed: list[StepPlan] = []

    def fail(plan: StepPlan) -> None:
        if not failed and any(row.start == 256 * chunk for row in plan.prefill):
            failed.append(plan)
            raise StepFailed("planted")

    house.executor.before = fail
    while not failed:
        assert house.engine.step()
    match = house.ledger.index.match(LONG, house.ledger.salt(""), len(LONG) - 1)
    assert match.end <= 256 * chunk
    lost = {(e.slot, e.end) for row in failed[0].prefill for e in row.exports}
    assert lost.isdisjoint(written(house))
    house.run()
    assert house.served(LONG).is_right
    house.assert_nothing_is_held()


@pytest.mark.parametrize("budget", [100, 1_000, 1_001])
@pytest.mark.parametrize("alignment", [64, 192])
@pytest.mark.parametrize("mode", ["interior", "split"])
def test_a_budget_off_the_grid_still_plans_only_what_is_written(budget, alignment, mode):
    house = House(
        budget=budget,
        slots=40,
        checkpoint_mode=mode,
        prefill_save_alignment=alignment,
        checkpoint_interval=alignment,
    )
    tokens = prompt(2_500)
    assert house.served(tokens).is_right
    assert planned_exports(house) <= written(house)
    for row in house.executor.rows():
        assert all(e.end % 64 == 0 and row.start < e.end < row.end for e in row.exports)
    published = sum(house.engine.stats().checkpoints_published.values())
    assert published == 2_499 // alignment
    again = house.served(tokens)
    assert again.is_right
    assert again.cached == 2_499 // alignment * alignment


@pytest.mark.parametrize("silent", LINEAR_LAYERS)
def test_an_export_that_one_layer_did_not_write_is_not_published(silent):
    house = House(model=FakeModel(layers_silent={silent}), budget=1_024)
    assert house.served(LONG).is_right
    assert planned_exports(house)  # they were wanted
    assert house.engine.stats().checkpoints_published == {}
    again = house.served(LONG)
    assert again.cached == 0
    assert again.is_right
    house.assert_nothing_is_held()


def test_a_report_that_leaves_one_export_out_publishes_the_others_only():
    house = House(budget=1_024, slots=20, checkpoint_interval=256)

    def drop(plan: StepPlan, result: StepResult) -> StepResult:
        kept = tuple(w for w in result.written if w.end != 960)
        return StepResult(step=result.step, emitted=result.emitted, written=kept)

    house.executor.after = drop
    assert house.served(LONG).is_right
    assert (960 in {end for _, end in planned_exports(house)}) is True
    again = house.served(LONG)
    assert again.cached == 768
    assert again.is_right


def test_an_export_is_one_value_that_carries_position_and_slot():
    for half in ({"end": 64}, {"slot": SlotId(1)}):
        with pytest.raises(TypeError):
            Export(**half)


@pytest.mark.parametrize("mode", ["interior", "split"])
def test_the_same_prompt_three_times_gives_the_same_text(mode):
    house = House(checkpoint_mode=mode)
    asks: list[Ask] = [house.served(LONG, 20) for _ in range(3)]
    assert [ask.cached for ask in asks] == [0, 960, 960]
    assert all(ask.tokens == [answer(LONG, 20)] for ask in asks)


def test_a_prefix_that_is_being_computed_is_not_found_before_its_step_is_committed():
    """Both prompts are new and equal: in one forward each computes its own, unless one waits."""
    house = House(budget=4_096, hold_and_join=False)
    both = [house.ask(LONG) for _ in range(2)]
    house.run(*both)
    assert [ask.cached for ask in both] == [0, 0]
    assert all(ask.is_right for ask in both)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_of_a_slot_is_written_by_an_export(family, tmp_path):
    """Exported inside a forward, or left by one that ends there: the same bytes, and no NaN."""
    tokens = prompt(150)
    interior = worker(family, tmp_path)
    result = interior.execute(prefill(0, tokens, (0, 150), None, 0, ((64, 1), (128, 2))))
    assert {(w.slot, w.end) for w in result.written} == {(0, 150), (1, 64), (2, 128)}

    split = worker(family, tmp_path)
    for step, (span, before, after) in enumerate(
        [((0, 64), None, 1), ((64, 128), 1, 2), ((128, 150), 2, 0)]
    ):
        last = split.execute(prefill(step, tokens, span, before, after))
        assert {(w.slot, w.end) for w in last.written} == {(after, span[1])}
    assert last.emitted == result.emitted

    for tensor in interior.runner.arenas.slots.spec.tensors:
        ours, theirs = (
            w.runner.arenas.slots.view(tensor.layer, tensor.name)[:3] for w in (interior, split)
        )
        assert ours.isfinite().all(), tensor
        assert torch.equal(ours, theirs), tensor
