"""Damage one mechanism of speculation at a time: comparing with plain decode must show each."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from millpond.errors import StepFailed
from millpond.nn.batch import Staging
from millpond.nn.counters import Counters, SeatCounters
from millpond.ops.batch import ForwardBatch, VerifyRows
from millpond.ops.reference import staging
from millpond.ops.reference import verify as ops
from millpond.runtime import verify as runtime
from millpond.runtime.seats import SeatSampling
from tests.exactness.drafting import DraftDriver, Script
from tests.exactness.families import FAMILIES, executor
from tests.exactness.test_mtp import ASKS, TRUTHS, plain
from tests.support.recording import Truth

Plant = Callable[[pytest.MonkeyPatch], None]
K = 3


def faults_seen(family: str, plant: Plant) -> list[str]:
    """What differs from plain decode when `plant` is in place."""
    texts = [plain(family, prompt, params)[0] for prompt, params in ASKS]
    truth = Truth(digests=dict(TRUTHS[family].digests))
    dice = random.Random(4)
    made = DraftDriver(executor(family, truth, "damaged", num_drafts=K, num_slots=40, num_pages=60))
    script = Script(K, lambda _: dice.choice((0, 1, 2, 3, 3)))
    made.executor.worker.runner.proposer = script
    runs = [made.start(prompt, params) for prompt, params in ASKS]
    for run, text in zip(runs, texts, strict=True):
        script.texts[run.seat] = (*run.prompt, *text)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        try:
            made.step([(run, len(run.prompt), ()) for run in runs])
            for count in (3, 3, 1, 3, 2, 3):
                inside = [made.pending.get(run.name, 0) for run in runs]
                made.verify(
                    (run, count, run.folded + n if n else None)
                    for run, n in zip(runs, inside, strict=True)
                )
        except (AssertionError, StepFailed) as error:
            return [f"gave up: {error}"]
    seen = truth.differences + made.executor.bytes_beyond
    if any(run.text != text[: len(run.text)] for run, text in zip(runs, texts, strict=True)):
        seen.append("text")
    return seen


def healthy(patch: pytest.MonkeyPatch) -> None:
    """No damage."""


def _counters(**changes: Callable[[Counters], torch.Tensor]) -> Plant:
    """The seats' counters are written otherwise."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = SeatCounters.put

        def put(self: SeatCounters, seats: torch.Tensor, counters: Counters) -> None:
            found: dict[str, Any] = {name: change(counters) for name, change in changes.items()}
            original(self, seats, replace(counters, **found))

        patch.setattr(SeatCounters, "put", put)

    return plant


ring_banks_are_not_exchanged = _counters(parity=lambda c: torch.zeros_like(c.parity))
accepted_drafts_are_not_folded = _counters(
    base=lambda c: c.base + c.pending, pending=lambda c: torch.zeros_like(c.pending)
)


def _batches(change: Callable[[ForwardBatch, VerifyRows], ForwardBatch]) -> Plant:
    """The batches of verify rows are staged otherwise."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = Staging.batch

        def batch(self: Staging, *given: Any) -> ForwardBatch:
            made = original(self, *given)
            return made if made.verify is None else change(made, made.verify)

        patch.setattr(Staging, "batch", batch)

    return plant


def _padding_is_stored(made: ForwardBatch, rows: VerifyRows) -> ForwardBatch:
    first = made.first_verify_token
    page = made.token_page[first:].view(-1, rows.width)
    return replace(made, token_page=torch.cat((made.token_page[:first], _spread(page).flatten())))


def _spread(page: torch.Tensor) -> torch.Tensor:
    return torch.where(page < 0, page[:, :1], page)


padding_is_stored = _batches(_padding_is_stored)
an_export_is_one_token_late = _batches(
    lambda made, rows: replace(made, verify=replace(rows, export_end=rows.export_end + 1))
)


def rings_keep_the_token_before(patch: pytest.MonkeyPatch) -> None:
    original = ops.write_ring
    patch.setattr(ops, "write_ring", lambda ring, x, rows: original(ring, x.roll(1, 1), rows))


def draft_keys_forget_the_last_pending_draft(patch: pytest.MonkeyPatch) -> None:
    original = ops.read_ring

    def read(ring: torch.Tensor, rows: VerifyRows) -> torch.Tensor:
        values = original(ring, rows)
        return values * 0.5 if ring.ndim == 4 and values.shape[-1] == 64 else values

    patch.setattr(ops, "read_ring", read)


def penalties_forget_the_drafts_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        runtime,
        "counts_before",
        lambda generated, drafts: generated[:, None].repeat(1, drafts.shape[1] + 1, 1),
    )


def noise_is_that_of_the_first_place(patch: pytest.MonkeyPatch) -> None:
    original = SeatSampling.choose

    def choose(
        self: SeatSampling, logits: torch.Tensor, rows: Any, position: Any, *rest: Any
    ) -> Any:
        first = position.view(-1, K + 1)[:, :1] if len(position) > len(ASKS) else position
        return original(self, logits, rows, first.expand(-1, K + 1).flatten(), *rest)

    def only_verify(self: SeatSampling, logits: Any, rows: Any, position: Any, *rest: Any) -> Any:
        chosen = choose if len(position) > len(ASKS) else original
        return chosen(self, logits, rows, position, *rest)

    patch.setattr(SeatSampling, "choose", only_verify)


def one_draft_too_many_is_accepted(patch: pytest.MonkeyPatch) -> None:
    original = staging.count_accepted
    patch.setattr(
        staging, "count_accepted", lambda t, d, n: torch.minimum(original(t, d, n) + 1, n)
    )


FAULTS = (
    ring_banks_are_not_exchanged,
    accepted_drafts_are_not_folded,
    padding_is_stored,
    an_export_is_one_token_late,
    rings_keep_the_token_before,
    draft_keys_forget_the_last_pending_draft,
    penalties_forget_the_drafts_before,
    noise_is_that_of_the_first_place,
    one_draft_too_many_is_accepted,
)
NAMES = {fault: name for name, fault in globals().items() if fault in FAULTS}


@pytest.mark.parametrize("family", FAMILIES)
def test_undamaged_speculation_differs_in_nothing(family: str) -> None:
    assert faults_seen(family, healthy) == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fault", FAULTS, ids=NAMES.get)
def test_a_damaged_mechanism_is_seen(family: str, fault: Plant) -> None:
    assert faults_seen(family, fault) != []
