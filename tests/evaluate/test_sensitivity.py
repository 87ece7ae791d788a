"""The bundled models show the faults they are there to show: the release gates on damage."""

from __future__ import annotations

import pytest

from millpond.front.directory import BUNDLED
from tests.support.sensitivity import GATES, ROWS, Table, markdown, measure

MODELS = sorted(p.name for p in BUNDLED.iterdir() if (p / "model.safetensors").is_file())
COUNT = 16


@pytest.fixture(scope="module", params=MODELS)
def tables(request: pytest.FixtureRequest) -> Table:
    """The gated shares of a model, and those of the undamaged hand-off."""
    found: Table = {}
    for task in ("ledger", "recall"):
        gated = {name for name, of, _ in GATES if of == task} | {"none"}
        rows = [row for row in ROWS if row[0] in gated]
        for name, shares in measure(BUNDLED / request.param, [task], COUNT, rows=rows).items():
            found.setdefault(name, {}).update(shares)
    return found


def test_an_undamaged_hand_off_changes_nothing(tables: Table) -> None:
    assert all(share >= 0.9 for share in tables["none"].values()), tables["none"]


@pytest.mark.parametrize("fault, task, limit", GATES)
def test_damage_shows_in_the_answers(tables: Table, fault: str, task: str, limit: float) -> None:
    assert tables[fault][task] <= limit


def test_the_table_marks_what_a_gate_forbids() -> None:
    shown = markdown({"state zeroed": {"ledger": 0.5}, "KV zeroed": {"ledger": 0.5}})
    assert "| state zeroed | reply | 0.50 (≤ 0.3: NO) |" in shown
    assert "| KV zeroed | question | 0.50 |" in shown
