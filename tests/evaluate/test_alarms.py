"""Faults of state and KV planted into a running engine: accuracy or drift rings for each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

from millpond.config import PytorchEngineConfig, SpeculativeConfig
from millpond.evaluate import Case, Dialect, Mode, run, score
from millpond.evaluate.grading import is_right
from millpond.evaluate.running import Ran
from millpond.front.directory import BUNDLED
from tests.support import faults
from tests.support.faults import Fault
from tests.support.handoff import Bench
from tests.support.planted import Planted, When

MODELS = sorted(p.name for p in BUNDLED.iterdir() if (p / "model.safetensors").is_file())
SIZES = dict(
    device="cpu", dtype="float32", max_batch_size=4, session_len=512, num_kv_pages=64,
    prefix_cache_state_budget=16,
)  # fmt: skip
COLD = Mode(PytorchEngineConfig(**SIZES, enable_prefix_caching=False))
WARM = Mode(PytorchEngineConfig(**SIZES))
DRAFTS = Mode(WARM.engine, SpeculativeConfig(num_speculative_tokens=3))
TASKS = ("ledger", "recall")
COUNT = 5
"""Cases of each task."""
GATE = 0.99
"""What accuracy must reach."""

SILENT, RINGS = 0.01, 0.04
"""The largest drift of a correct engine, and the smallest that is taken for a fault."""


@dataclass(frozen=True)
class Planting:
    """A fault, where it strikes, and in which mode."""

    fault: Fault
    when: When = "resume"
    mode: Mode = WARM

    @property
    def name(self) -> str:
        drafts = self.mode.speculative is not None
        return f"{self.fault.__name__}{' with drafts' if drafts else ''}"


PLANTINGS = (
    Planting(faults.state_swapped),
    Planting(faults.state_two_tokens_old),
    Planting(faults.state_zeroed),
    Planting(faults.window_dropped),
    Planting(faults.state_one_token_ahead),
    Planting(faults.foreign_token_kept, "decode"),
    Planting(faults.rejected_digit_kept, "decode", DRAFTS),
    Planting(faults.first_page_wrong),
    Planting(faults.kv_zeroed),
    Planting(faults.kv_swapped),
)


@dataclass(frozen=True)
class Ground:
    """A model, cases it answers rightly when nothing is damaged, and what it said to them."""

    model: Path
    dialect: Dialect
    cases: tuple[Case, ...]
    cold: Ran

    def alarms(self, mode: Mode) -> tuple[float, float]:
        """(accuracy of the worse task, drift) of a run in `mode` against the cold one."""
        scores = score(run(self.model, mode, self.cases), self.dialect, self.cold)
        drifts = [s.drift for s in scores if s.drift is not None]
        return min(s.accuracy or 0.0 for s in scores), max(drifts)


@lru_cache
def ground(name: str) -> Ground:
    """The shortest prompts that reach over a page, without those the model gets wrong anyway."""
    model = BUNDLED / name
    dialect = Dialect(model)
    cases: list[Case] = []
    for task in TASKS:
        drawn = [dialect.case(task, seed) for seed in range(400, 430)]
        fit = sorted((c for c in drawn if len(c.prompt) > 96), key=lambda c: len(c.prompt))
        cases += fit[: 3 * COUNT]
    cold = run(model, COLD, cases)
    good = {
        task: [o for o in got if is_right(o.case, dialect.spoken(o.tokens))][:COUNT]
        for task, got in cold.outcomes.items()
    }
    assert all(len(some) == COUNT for some in good.values())
    kept = Ran(COLD, {task: tuple(some) for task, some in good.items()}, cold.drafts)
    return Ground(model, dialect, tuple(o.case for some in good.values() for o in some), kept)


@lru_cache
def bench(name: str, num_drafts: int) -> Bench:
    return Bench(BUNDLED / name, num_drafts=num_drafts)


def damaged(name: str, planting: Planting) -> tuple[float, float]:
    """(accuracy, drift) with a fault planted."""
    on = ground(name)
    num_drafts = (
        planting.mode.speculative.num_speculative_tokens if planting.mode.speculative else 0
    )
    other = on.dialect.case("ledger", 7, scale=2).prompt[:500]
    planted = Planted(bench(name, num_drafts), planting.fault, planting.when, other)
    with pytest.MonkeyPatch.context() as patch:
        planted.install(patch)
        found = on.alarms(planting.mode)
    assert planted.struck >= len(on.cases)
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", [WARM, DRAFTS], ids=["warm", "drafts"])
def test_the_alarms_are_silent_on_the_correct_engine(name: str, mode: Mode) -> None:
    accuracy, drift = ground(name).alarms(mode)
    assert accuracy == 1.0
    assert drift <= SILENT


@pytest.mark.parametrize("name", MODELS)
def test_planting_nothing_changes_nothing(name: str) -> None:
    for planting in (Planting(faults.nothing), Planting(faults.nothing, "decode", DRAFTS)):
        accuracy, drift = damaged(name, planting)
        assert (accuracy, drift) == (1.0, pytest.approx(0.0, abs=SILENT))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("planting", PLANTINGS, ids=lambda p: p.name)
def test_an_alarm_rings(name: str, planting: Planting) -> None:
    accuracy, drift = damaged(name, planting)
    assert accuracy < GATE or drift >= RINGS
