"""What is left of a GPU's memory is measured, split by the stated rule, and told in one line."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import millpond
from millpond.config import PytorchEngineConfig, Resolved, resolve
from millpond.errors import Refused, StepFailed
from millpond.executor.build import bring_up
from millpond.models.base import describe
from millpond.plan.step import Capabilities, StepPlan
from millpond.runtime.sizing import GRAPH_BYTES, Peaks, fitting, measure
from millpond.runtime.worker import Loaded, Worker, load_weights, model_facts
from millpond.units import MIB

BUNDLED = Path(millpond.__file__).parent / "bundled" / "millpond-tiny-qwen"
C = Capabilities(
    num_slots=1, num_pages=8, num_seats=3, export_granularity=64, vocab_size=70, max_position=640
)
MEMORY = 64 * MIB


class Meter:
    """A device of 64 MiB: a step takes as many bytes as it has tokens, a thousand times."""

    def __init__(self, room: int = MEMORY) -> None:
        self.room = room
        self.now = self.most = 5000

    def run(self, plan: StepPlan) -> None:
        self.most = max(self.most, self.now + 1000 * plan.num_tokens)
        if self.most > self.room:
            raise StepFailed("step") from torch.OutOfMemoryError("no memory")

    def free(self) -> int:
        return self.room - self.now

    def held(self) -> int:
        return self.now

    def restart(self) -> None:
        self.most = self.now

    def peak(self) -> int:
        return self.most


def test_the_peak_is_that_of_the_largest_step_and_graphs_are_those_of_the_steady_one() -> None:
    assert measure(Meter().run, C, 200, Meter()) == Peaks(activations=0, graphs=0)
    meter = Meter()
    found = measure(meter.run, C, 200, meter, num_graphs=4)
    assert found.activations == 1000 * (200 + 2)  # a long prompt beside two that run on
    assert found.graphs == 1000 * 3 + 4 * GRAPH_BYTES
    assert measure(meter.run, C, 200, meter).graphs == 0
    assert found.left(100 * MIB) == 100 * MIB - found.activations - found.graphs
    assert found.left(1) == 0


def test_a_step_that_does_not_fit_is_refused_with_what_to_change() -> None:
    meter = Meter(room=100_000)
    words = r"200 prompt tokens and 3 running requests.*KiB are free.*max_prefill_token_num"
    with pytest.raises(Refused, match=words):
        measure(meter.run, C, 200, meter)
    with (
        pytest.raises(Refused, match="memory for graphs does not fit"),
        fitting("memory for graphs", meter),
    ):
        raise torch.OutOfMemoryError
    with pytest.raises(StepFailed), fitting("a step", meter):
        raise StepFailed("something else") from ZeroDivisionError()


class OnGpu:
    """Loaded weights that say they are on a GPU, and hear of the workers that are made."""

    def __init__(self, **config: Any) -> None:
        self.loaded = load_weights(BUNDLED, device="cpu")
        self.config = PytorchEngineConfig(device="cuda", dtype="float32", **config)
        self.facts = model_facts(describe(BUNDLED), dtype="float32", device="cpu")
        self.made: list[Worker] = []
        self.phases: list[str] = []
        self.meter = Meter()

    def resolved(self, available: int) -> Resolved:
        return resolve(self.config, self.facts, available=available, device="cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loaded, name)

    def worker(self, **sizes: Any) -> Worker:
        made = self.loaded.worker(**sizes)
        launch = made.runner.launch

        def watched(plan: StepPlan) -> Any:
            self.meter.run(plan)
            return launch(plan)

        made.runner.launch = watched  # type: ignore[method-assign]
        self.made.append(made)
        return made


def test_memory_is_measured_then_split_and_the_log_says_how_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpu = OnGpu(max_batch_size=5, session_len=256, max_prefill_token_num=128)
    loaded: Loaded = gpu  # type: ignore[assignment]
    planned = gpu.resolved(MEMORY)
    asked: list[int] = []

    def resize(available: int) -> Resolved:
        asked.append(available)
        return gpu.resolved(available)

    with caplog.at_level(logging.INFO):
        built = bring_up(loaded, planned, gpu.meter, resize, gpu.phases.append)
    assert gpu.phases == ["warm-up", "profiling", "capture"]
    assert asked == [MEMORY - 5000 - 1000 * (128 + 4)]
    spare, own = gpu.made
    assert spare.capabilities.num_seats == 16
    r, c = built.resolved, own.capabilities
    assert (c.num_slots, c.num_pages, c.num_seats) == (r.num_slots, r.num_pages, r.num_seats)
    assert built.executor.capabilities == c
    (line,) = [m for m in caplog.messages if m.startswith("memory of")]
    for words in (
        "weights",
        "activations 128.9 KiB",
        "graphs",
        f"{r.num_slots} slots",
        f"6 to run, {r.checkpoint_budget} checkpoints",
        f"{r.num_pages} pages",
        "5 seats",
        "free",
    ):
        assert words in line
    assert not own.runner.arenas.slots.storage.any()


def test_what_was_asked_for_and_does_not_fit_once_measured_is_refused_with_what_would() -> None:
    """The plan had room for it; activations took that away."""
    gpu = OnGpu(max_batch_size=3, session_len=256, num_kv_pages=4000, max_prefill_token_num=128)
    page, slot = gpu.facts.page_bytes, gpu.facts.slot_bytes
    gpu.meter.room = int((4000 * page + 8 * (slot + gpu.facts.seat_bytes)) / 0.9)
    planned = gpu.resolved(gpu.meter.room)
    gpu.meter.now = 10 * page
    loaded: Loaded = gpu  # type: ignore[assignment]
    with pytest.raises(Refused, match=r"num_kv_pages=4000 does not fit.*\d+ fit beside"):
        bring_up(loaded, planned, gpu.meter, gpu.resolved)


def test_an_engine_of_one_seat_warms_up_and_measures_over_more() -> None:
    gpu = OnGpu(max_batch_size=1, session_len=64, max_prefill_token_num=64)
    loaded: Loaded = gpu  # type: ignore[assignment]
    built = bring_up(loaded, gpu.resolved(MEMORY), gpu.meter, gpu.resolved)
    assert built.executor.capabilities.num_seats == 1
