"""From a model directory to something that runs plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import millpond
from millpond.errors import Refused
from millpond.models.base import describe
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import PageUpdate, Row, SeatLoad, StepPlan
from millpond.runtime.worker import Worker, load, model_facts
from millpond.state.lease import PageId, Seat, SlotId
from tests.exactness.families import QWEN

BUNDLED = Path(millpond.__file__).parent / "bundled" / "millpond-tiny-glm"


def small(**given: Any) -> Worker:
    return load(
        BUNDLED, **{"device": "cpu", "num_slots": 3, "num_pages": 4, "num_seats": 2, **given}
    )


def first_token(worker: Worker) -> int:
    tokens = (5, 6, 7, 8)
    seat_load = SeatLoad(
        seat=Seat(1),
        request="r",
        sample_index=0,
        params=SamplingParams(max_tokens=1, temperature=0.0),
        tokens=tokens,
        prompt_len=4,
    )
    row = Row(
        request="r",
        seat=Seat(1),
        start=0,
        tokens=tokens,
        state_in=None,
        state_out=SlotId(2),
        emit_seats=(Seat(1),),
    )
    plan = StepPlan(
        step=1,
        seat_loads=(seat_load,),
        page_updates=(PageUpdate(Seat(1), 0, (PageId(3),)),),
        prefill=(row,),
    )
    (emitted,) = worker.execute(plan).emitted
    assert emitted.finite
    return emitted.token


def test_capabilities_come_from_the_model_the_pool_and_the_bound_ops() -> None:
    facts = small(session_len=1000).capabilities
    assert (facts.num_slots, facts.num_pages, facts.num_seats) == (3, 4, 2)
    assert (facts.vocab_size, facts.max_position, facts.export_granularity) == (2048, 1000, 64)
    assert small().capabilities.max_position == 8192


def test_a_step_runs_in_every_dtype_that_is_offered() -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        worker = small(dtype=dtype, debug_poison=True)
        hidden = worker.runner.arenas.slots.view(-1, "boundary_hidden")
        assert hidden.dtype == getattr(torch, dtype)
        assert 0 <= first_token(worker) < 2048


def test_dummy_weights_are_the_same_every_time_and_not_the_trained_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((BUNDLED / "config.json").read_text())
    sizes = {"device": "cpu", "num_slots": 3, "num_pages": 4, "num_seats": 2}
    made = [load(tmp_path, load_format="dummy", **sizes) for _ in range(2)]  # type: ignore[arg-type]
    assert len({first_token(worker) for worker in made}) == 1
    with pytest.raises(Refused, match="safetensors"):
        load(tmp_path, **sizes)  # type: ignore[arg-type]


def test_a_session_longer_than_the_model_is_refused_with_both_numbers() -> None:
    with pytest.raises(Refused, match=r"9000.*8192"):
        small(session_len=9000)


def test_an_unknown_model_or_backend_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    with pytest.raises(Refused, match="abacus"):
        load(tmp_path, device="cpu", num_slots=1, num_pages=1, num_seats=1)
    with pytest.raises(Refused, match="FlashKDA is not installed"):
        small(kda_prefill_backend="flash_kda", dtype="bfloat16")
    with pytest.raises(Refused, match="bfloat16 only, not in float32"):
        small(kda_prefill_backend="flash_kda", dtype="float32")


def test_a_backend_chosen_for_kda_layers_is_refused_for_a_model_without_any(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    sizes = {"device": "cpu", "num_slots": 1, "num_pages": 1, "num_seats": 1}
    for backend in ("torch", "flash_kda"):
        with pytest.raises(Refused, match=f"{backend}.*qwen3_5_moe_text has none"):
            load(tmp_path, load_format="dummy", kda_prefill_backend=backend, **sizes)  # type: ignore[arg-type]
    load(tmp_path, load_format="dummy", **sizes)  # type: ignore[arg-type]
    small(kda_prefill_backend="torch")


def test_drafts_beyond_the_limit_or_without_a_draft_layer_are_refused(tmp_path: Path) -> None:
    for count in (-1, 8):
        with pytest.raises(Refused, match=f"{count} draft tokens.*0 to 7"):
            small(num_draft_tokens=count)
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"mtp_num_hidden_layers": 0}))
    with pytest.raises(Refused, match="has no draft layer to make 3 draft tokens"):
        load(
            tmp_path,
            device="cpu",
            num_slots=1,
            num_pages=1,
            num_seats=1,
            load_format="dummy",
            num_draft_tokens=3,
        )


def test_drafts_take_memory_of_seats_alone_and_only_when_asked_for() -> None:
    description = describe(BUNDLED)
    facts = [
        model_facts(description, dtype="float32", device="cpu", num_draft_tokens=k)
        for k in (0, 1, 3, 7)
    ]
    assert len({(f.slot_bytes, f.page_bytes, f.weight_bytes) for f in facts}) == 1
    assert [f.seat_bytes for f in facts] == sorted({f.seat_bytes for f in facts})
    worker = small(dtype="float32", num_draft_tokens=3)
    assert worker.runner.arenas.seats.storage.shape == (2, facts[2].seat_bytes)
    assert worker.capabilities.num_draft_tokens == 3
    assert small().capabilities.num_draft_tokens == 0
    assert small().runner.proposer is None


def test_a_small_model_runs_on_one_thread_and_leaves_the_process_as_it_was() -> None:
    worker = small()
    seen: list[int] = []
    forward = worker.runner.model.forward
    worker.runner.model.forward = lambda *a: seen.append(torch.get_num_threads()) or forward(*a)  # type: ignore[method-assign]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        first_token(worker)
        assert seen == [1]
        assert torch.get_num_threads() == 3
        worker.num_threads = None
        first_token(worker)
        assert seen == [1, 3]
    finally:
        torch.set_num_threads(before)


def test_facts_count_the_bytes_that_are_then_allocated() -> None:
    facts = model_facts(describe(BUNDLED), dtype="float32", device="cpu")
    arenas = small(dtype="float32").runner.arenas
    assert arenas.slots.storage.shape == (3, facts.slot_bytes)
    assert arenas.pages.storage.shape == (4, facts.page_bytes)
    assert arenas.seats.storage.shape == (2, facts.seat_bytes)
    assert facts.max_position == 8192
    halved = model_facts(describe(BUNDLED), dtype="bfloat16", device="cpu")
    assert halved.page_bytes < facts.page_bytes
    assert halved.weight_bytes < facts.weight_bytes
