"""On a GPU: memory is measured and split, and once an engine is ready nothing compiles."""

from __future__ import annotations

import logging

import pytest

from millpond.config import PytorchEngineConfig, SpeculativeConfig
from millpond.executor.build import build_executor
from millpond.front.compose import plan_model
from millpond.front.startup import Startup
from millpond.plan.counts import counts_of
from tests.runtime.test_warmup import KINDS, serve


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "drafts"), KINDS)
def test_a_gpu_is_ready_with_graphs_and_compiles_nothing_while_it_serves(
    kind: str, drafts: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = PytorchEngineConfig(
        device="cuda", cache_memory="256MiB", max_batch_size=8, session_len=1024
    )
    planned = plan_model(
        f"millpond-tiny-{kind}", config, SpeculativeConfig(num_speculative_tokens=drafts)
    )
    startup = Startup()
    with caplog.at_level(logging.INFO, "millpond"):
        built = build_executor(
            planned.directory, planned.resolved, resize=planned.resized, on_phase=startup.enter
        )
    startup.enter("ready")
    assert list(startup.seconds) == ["planning", "loading", "warm-up", "profiling", "capture"]
    (line,) = [m for m in caplog.messages if m.startswith("memory of cuda")]
    assert f"{built.resolved.num_slots} slots" in line
    before = counts_of(built.executor)
    assert before is not None
    assert before.graph_captures > 0
    serve(built.executor)
    after = counts_of(built.executor)
    assert after is not None
    assert after.late_compiles == before.late_compiles
    assert after.graph_replays > 0
