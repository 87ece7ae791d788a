"""The inline executor, and the refusal of those that do not exist yet."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

from millpond.config import Resolved
from millpond.errors import Broken, Refused
from millpond.executor.build import build_executor
from millpond.executor.uni import UniExecutor
from millpond.ops.bind import bind
from millpond.plan.step import Executor, StepPlan
from millpond.runtime.place import choose_device, choose_dtype
from millpond.runtime.worker import Worker
from tests.support.fake_model import VOCAB, FakeModel, fake_layout


def worker(**given: bool) -> Worker:
    return Worker(
        FakeModel(),
        fake_layout(),
        device=torch.device("cpu"),
        num_slots=5,
        num_pages=7,
        num_seats=3,
        vocab_size=VOCAB,
        max_position=130,
        ops=bind(torch.device("cpu")),
        **given,
    )


def test_capabilities_are_what_was_allocated() -> None:
    executor: Executor = UniExecutor(worker())
    facts = executor.capabilities
    assert (facts.num_slots, facts.num_pages, facts.num_seats) == (5, 7, 3)
    assert (facts.export_granularity, facts.vocab_size, facts.max_position) == (64, VOCAB, 130)


def test_a_sequence_of_the_longest_length_has_room_in_the_page_table() -> None:
    assert worker().runner.staging.page_table.shape == (3, 3)


def test_with_debug_poison_nothing_is_readable_before_it_is_written() -> None:
    arenas = worker(debug_poison=True).runner.arenas
    for arena in (arenas.slots, arenas.pages, arenas.seats):
        assert arena.storage.eq(0xFF).all()


def test_a_closed_executor_runs_nothing() -> None:
    executor = UniExecutor(worker())
    assert executor.launch(StepPlan(step=1)).result().step == 1
    executor.close()
    executor.close()
    with pytest.raises(Broken, match="closed"):
        executor.launch(StepPlan(step=2))


@pytest.mark.parametrize("name", ["mp", "ray"])
def test_an_executor_that_does_not_exist_is_refused_by_name(name: str) -> None:
    with pytest.raises(Refused, match=name):
        build_executor(Path("nowhere"), cast(Resolved, None), name)


def test_auto_means_float32_on_the_cpu_and_a_named_dtype_is_used_as_asked() -> None:
    cpu = torch.device("cpu")
    assert choose_dtype("auto", cpu) == torch.float32
    assert choose_dtype("bfloat16", cpu) == torch.bfloat16
    assert choose_dtype("auto", torch.device("cuda")) == torch.bfloat16
    with pytest.raises(Refused, match="int8"):
        choose_dtype("int8", cpu)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_cuda_is_refused_and_auto_falls_to_the_cpu() -> None:
    assert choose_device("auto").type == "cpu"
    for name in ("cuda", "cuda:1"):
        with pytest.raises(Refused, match="finds no CUDA"):
            choose_device(name)


@pytest.mark.parametrize("name", ["mps", "meta", "abacus"])
def test_a_device_we_cannot_use_is_refused_by_name(name: str) -> None:
    with pytest.raises(Refused, match=name):
        choose_device(name)
