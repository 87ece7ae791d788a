"""Kernels and graphs of the device tower reach the metrics; what counts nothing shows none."""

from __future__ import annotations

import torch

from millpond.engine.loop import Engine
from millpond.engine.settings import EngineSettings
from millpond.executor.uni import UniExecutor
from millpond.front.metrics import Metrics
from millpond.ops.bind import bind
from millpond.plan.counts import DeviceCounts, counts_of
from millpond.runtime.worker import Worker
from tests.support.fake_model import VOCAB, FakeModel, fake_layout

SETTINGS = EngineSettings(max_batch_size=2, max_prefill_tokens=64, session_len=64)


def worker() -> Worker:
    cpu = torch.device("cpu")
    return Worker(
        FakeModel(), fake_layout(), device=cpu, num_slots=4, num_pages=4, num_seats=2,
        vocab_size=VOCAB, max_position=128, ops=bind(cpu),
    )  # fmt: skip


def told(engine: Engine) -> dict[str, float]:
    metrics = Metrics()
    metrics.read_engine(engine.stats)
    lines = metrics.exposition().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_kernels_and_graphs_are_in_the_metrics() -> None:
    executor = UniExecutor(worker())
    executor.counts = lambda: DeviceCounts(  # type: ignore[method-assign]
        compiles=41, late_compiles=2, graph_captures=34, graph_replays=1000
    )
    engine = Engine(SETTINGS, executor)
    found = told(engine)
    assert found['millpond_jit_compiles_total{phase="start"}'] == 41
    assert found['millpond_jit_compiles_total{phase="serving"}'] == 2
    assert found["millpond_graph_captures"] == 34
    assert found["millpond_graph_replays_total"] == 1000
    engine.close(drain=False)


def test_what_a_worker_counts_comes_through_and_others_show_nothing() -> None:
    executor = UniExecutor(worker())
    assert counts_of(executor) == executor.counts()
    executor.close()
    assert executor.counts() == DeviceCounts()

    class Silent:
        capabilities = executor.capabilities
        launch = executor.launch

        def close(self) -> None:
            """Nothing to give back."""

    engine = Engine(SETTINGS, Silent())
    assert engine.stats().device is None
    assert not any("jit" in name or "graph" in name for name in told(engine))
    engine.close(drain=False)
