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
from millpond.runtime.graphs import Recorded, bucket_sizes, num_graphs, reach_sizes
from millpond.runtime.sizing import TRIED_SIZES, Peaks, activation_bytes, fitting, graph_bytes
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


def test_the_peak_is_that_of_the_largest_step() -> None:
    assert activation_bytes(Meter().run, C, 200, Meter()) == 0
    meter = Meter()
    found = activation_bytes(meter.run, C, 200, meter)
    assert found == 1000 * (200 + 2)  # a long prompt beside two that run on
    peaks = Peaks(activations=found, graphs=77)
    assert peaks.left(100 * MIB) == 100 * MIB - found - 77
    assert peaks.left(1) == 0


class Driver:
    """A device whose graphs take memory, in lumps: its meter, and what records on it.

    The first one takes `pool` bytes that all share, each `own` bytes, and `a_row` for each row.
    """

    def __init__(self, room: int, *, pool: int, own: int, a_row: int, lump: int) -> None:
        self.room, self.pool, self.own, self.a_row, self.lump = room, pool, own, a_row, lump
        self.taken = 0
        self.graphs: list[int] = []

    def free(self) -> int:
        used = sum(self.graphs) + (self.pool if self.graphs else 0)
        return self.room - self.taken - -(-used // self.lump) * self.lump

    def held(self) -> int:
        return self.taken

    def restart(self) -> None:
        return None

    def peak(self) -> int:
        return self.taken

    def record(self, rows: int) -> None:
        self.graphs.append(self.own + rows * self.a_row)
        if self.free() < 0:
            raise torch.OutOfMemoryError("no memory")

    def all_of(self, most: int, pages: int, capturer: Any) -> None:
        """As a runner records: the largest first, for each reach, two of each."""
        for rows in reversed(bucket_sizes(most)):
            for _ in range(2 * len(reach_sizes(pages))):
                capturer.capture(lambda rows=rows: self.record(rows) or ())


class Records:
    """Records by doing."""

    def capture(self, work: Any) -> Recorded:
        return Recorded(work(), lambda: None)

    def reserved_bytes(self) -> int:
        return 0


@pytest.mark.parametrize("lump", [1, 2 * MIB, 32 * MIB])
@pytest.mark.parametrize(("own", "a_row"), [(7 * MIB, 0), (3 * MIB, 40_000), (MIB // 2, 9_000)])
@pytest.mark.parametrize(("most", "pages"), [(256, 300), (256, 20), (40, 100), (1, 2), (4, 600)])
def test_a_few_graphs_tell_what_all_take_and_little_is_wasted(
    most: int, pages: int, own: int, a_row: int, lump: int
) -> None:
    """All that is left beside them is given away, and they fit; less than 2 % stays unused."""
    room = 40 << 30
    numbers = {"pool": 200 * MIB, "own": own, "a_row": a_row, "lump": lump}
    tried, real = Driver(room, **numbers), Driver(room, **numbers)
    found = graph_bytes(
        lambda capturer: tried.all_of(most, pages, capturer),
        Records(), tried, rows=most, pages=pages,
    )  # fmt: skip
    assert len(tried.graphs) <= TRIED_SIZES * 2 * len(reach_sizes(pages))
    real.taken = room - found
    real.all_of(most, pages, Records())
    assert len(real.graphs) == num_graphs(most, pages)
    assert 0 <= real.free() < room * 0.02


def test_a_step_that_does_not_fit_is_refused_with_what_to_change() -> None:
    meter = Meter(room=100_000)
    words = r"200 prompt tokens and 3 running requests.*KiB are free.*max_prefill_token_num"
    with pytest.raises(Refused, match=words):
        activation_bytes(meter.run, C, 200, meter)
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


@pytest.mark.parametrize("failures", [0, 1, 2, 3])
def test_graphs_that_find_no_room_after_the_split_are_given_more_by_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failures: int
) -> None:
    gpu = OnGpu(max_batch_size=2, session_len=64, max_prefill_token_num=64)
    gpu.meter.room = 4 << 30
    loaded: Loaded = gpu  # type: ignore[assignment]
    asked: list[int] = []
    left = [failures]

    def capture(self: Worker, progress: object) -> None:
        if left[0]:
            left[0] -= 1
            try:
                raise torch.OutOfMemoryError("no memory")
            finally:  # as a recording that is broken off
                raise RuntimeError("the recording is invalid")

    def resize(available: int) -> Resolved:
        asked.append(available)
        return gpu.resolved(available)

    monkeypatch.setattr(Worker, "capture", capture)
    if failures == 3:
        with pytest.raises(Refused, match="memory for graphs does not fit"):
            bring_up(loaded, gpu.resolved(MEMORY), gpu.meter, resize)
    else:
        built = bring_up(loaded, gpu.resolved(MEMORY), gpu.meter, resize)
        assert built.resolved == gpu.resolved(asked[-1])
    assert len(asked) == min(3, failures + 1)
    assert asked == sorted(asked, reverse=True)
    assert len(set(asked)) == len(asked)
    told = [m for m in caplog.messages if "more than was measured" in m]
    assert len(told) == min(2, failures)
