"""Damage one mechanism at a time: the comparisons of this folder must see each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from millpond.memory.arena import Arena
from millpond.nn import batch as staging
from millpond.ops.batch import RowSlots, WriteLog
from millpond.ops.reference import attention, conv, delta, linear, slots
from millpond.plan.step import FanOut, Row
from millpond.runtime.runner import ModelRunner
from millpond.runtime.seats import SeatSampling
from tests.exactness.engines import Ask, House, serve
from tests.exactness.prompts import GREEDY, PROMPTS, SEEDED, TWO
from tests.exactness.test_schedules import TRUTHS, expected
from tests.support.recording import Truth

Plant = Callable[[pytest.MonkeyPatch], None]

ASKS = (
    Ask(PROMPTS[4], TWO),  # 127 tokens: its fan-out has a partial page and an unfinished pool
    Ask(PROMPTS[0], GREEDY),
    Ask(PROMPTS[0], SEEDED, arrives=5),  # resumes
    Ask(PROMPTS[1], GREEDY, arrives=6),  # branches off
)
HOUSE = House(settings={"checkpoint_interval": 64, "max_prefill_tokens": 512})


def faults_seen(family: str, plant: Plant) -> list[str]:
    """What differs from the undamaged engine when `plant` is in place."""
    cold = [expected(family, Ask(ask.tokens, ask.params)) for ask in ASKS]
    truth = Truth(digests=dict(TRUTHS[family].digests))
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        try:
            served = serve(family, HOUSE, ASKS, truth, "damaged")
        except AssertionError as error:
            return [f"the engine gave up: {error}"]
    seen = truth.differences + served.executor.bytes_beyond
    if served.texts != cold:
        seen.append("text")
    return seen


def healthy(patch: pytest.MonkeyPatch) -> None:
    """No damage."""


def _exports_early(module: Any, tokens: int, *, admitted: bool) -> Plant:
    """`module` exports the state `tokens` too early; it reports so only where it is `admitted`."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = module.write_targets
        asked: list[torch.Tensor] = []

        def early(rows: RowSlots) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            row, folded, slot = original(rows)
            asked[:] = [folded]
            shift = tokens * (torch.arange(len(folded)) >= rows.num_rows).long()
            return row, (folded - shift).clamp(min=1), slot

        def claim(self: WriteLog, written: torch.Tensor, folded: torch.Tensor) -> None:
            planned = asked[0] if asked and len(asked[0]) == len(folded) else folded
            self.entries.append((written, planned))

        patch.setattr(module, "write_targets", early)
        if not admitted:
            patch.setattr(WriteLog, "record", claim)

    return plant


conv_window_of_an_export_is_one_token_early = _exports_early(conv, 1, admitted=False)
state_of_an_export_is_one_chunk_early = _exports_early(delta, 64, admitted=False)


def _only_ends(module: Any) -> Plant:
    """Writes of `module` reach the rows' own slots and no export; the report claims them all."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        targets, write = module.write_targets, module.write_slots
        ends = [0]

        def counted(rows: RowSlots) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            ends[0] = rows.num_rows
            return targets(rows)

        def partly(bank: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
            write(bank, ids[: ends[0]], values[: ends[0]])

        patch.setattr(module, "write_targets", counted)
        patch.setattr(module, "write_slots", partly)

    return plant


conv_window_is_not_exported = _only_ends(conv)
boundary_hidden_is_not_exported = _only_ends(slots)


def boundary_hidden_is_never_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(slots, "write_slots", lambda bank, ids, values: None)


def pool_tail_is_not_fanned_out(patch: pytest.MonkeyPatch) -> None:
    original = Arena.copy

    def without_tails(self: Arena, sources: Any, targets: Any) -> None:
        if not any(t.name == "tail" for t in self.spec.tensors):
            original(self, sources, targets)

    patch.setattr(Arena, "copy", without_tails)


def partial_page_is_not_fanned_out(patch: pytest.MonkeyPatch) -> None:
    original = ModelRunner._fan_out

    def without_pages(self: ModelRunner, fan_outs: Any) -> None:
        original(self, [FanOut(f.source, f.target, None, None) for f in fan_outs])

    patch.setattr(ModelRunner, "_fan_out", without_pages)


def no_slot_reads_slot_zero(patch: pytest.MonkeyPatch) -> None:
    def clamped(bank: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return bank.index_select(0, ids.clamp(min=0))

    patch.setattr(delta, "read_slots", clamped)
    patch.setattr(conv, "read_slots", clamped)


def rows_read_the_slot_they_write(patch: pytest.MonkeyPatch) -> None:
    original = staging._pack_slots

    def crossed(rows: tuple[Row, ...]) -> tuple[Any, ...]:
        cu_seqlens, _, state_out, *exports = original(rows)
        return cu_seqlens, state_out, state_out, *exports

    patch.setattr(staging, "_pack_slots", crossed)


def seats_are_taken_for_rows(patch: pytest.MonkeyPatch) -> None:
    original = SeatSampling.rows

    def by_row(self: SeatSampling, seats: tuple[int, ...], seat: torch.Tensor) -> Any:
        return original(self, range(len(seats)), torch.arange(len(seat)))

    patch.setattr(SeatSampling, "rows", by_row)


def products_are_not_padded(patch: pytest.MonkeyPatch) -> None:
    for module in (linear, attention):
        patch.setattr(module, "padded_rows", lambda rows: rows)


PLANTS: dict[str, tuple[str, Plant]] = {
    "conv_window_of_an_export_is_one_token_early": (
        "qwen",
        conv_window_of_an_export_is_one_token_early,
    ),
    "state_of_an_export_is_one_chunk_early": ("glm", state_of_an_export_is_one_chunk_early),
    "conv_window_is_not_exported": ("glm", conv_window_is_not_exported),
    "boundary_hidden_is_not_exported": ("qwen", boundary_hidden_is_not_exported),
    "boundary_hidden_is_never_written": ("glm", boundary_hidden_is_never_written),
    "pool_tail_is_not_fanned_out": ("glm", pool_tail_is_not_fanned_out),
    "partial_page_is_not_fanned_out": ("qwen", partial_page_is_not_fanned_out),
    "no_slot_reads_slot_zero": ("glm", no_slot_reads_slot_zero),
    "rows_read_the_slot_they_write": ("qwen", rows_read_the_slot_they_write),
    "seats_are_taken_for_rows": ("qwen", seats_are_taken_for_rows),
    "products_are_not_padded": ("glm", products_are_not_padded),
}


@pytest.mark.parametrize("family", ["glm", "qwen"])
def test_the_undamaged_engine_shows_no_difference(family: str) -> None:
    assert faults_seen(family, healthy) == []


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_seen(name: str) -> None:
    family, plant = PLANTS[name]
    seen = faults_seen(family, plant)
    assert seen


def test_a_missing_boundary_vector_shows_in_the_draft_layers_pages_alone() -> None:
    seen = faults_seen("glm", boundary_hidden_is_not_exported)
    assert seen
    assert "text" not in seen
    assert any(line.startswith("page") for line in seen)


def test_an_export_that_is_reported_at_another_end_is_never_found() -> None:
    cached = []
    for plant in (healthy, _exports_early(conv, 1, admitted=True)):
        truth = Truth(digests=dict(TRUTHS["glm"].digests))
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            served = serve("glm", HOUSE, ASKS, truth, "reported")
        assert served.texts == [expected("glm", Ask(a.tokens, a.params)) for a in ASKS]
        assert truth.differences == []
        cached.append(served.cached)
    assert cached == [[0, 64, 192, 128], [0, 0, 0, 0]]
