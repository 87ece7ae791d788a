"""The bundled models on a GPU: the same replies whatever the mode, and the same release gates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millpond.front.cli import main
from tests.gpu.agreement import MODELS, agreement, cases_of, comparisons, mode, report
from tests.gpu.agreement import run as run_mode

PLACES = [
    pytest.param(model, device, marks=marks, id=f"{model}-{device}")
    for device, marks in (("cpu", pytest.mark.slow), ("cuda", pytest.mark.gpu))
    for model in MODELS
]
everywhere = pytest.mark.parametrize(("model", "device"), PLACES)

SILENT = 0.01
"""Nats: the drift gate."""


@everywhere
def test_in_fp32_every_mode_says_the_same(
    model: str, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        found, states = report(model, device, "float32", cases_of(model, 1), print)
    assert len(found) >= 7
    assert states.broken == []
    assert states.exports > 0
    for name, one in found.items():
        assert one.places == (), name
        assert one.drift <= SILENT, name


@everywhere
def test_the_release_gates_hold(model: str, device: str, tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    flags = (
        f"{model} --device {device} --dtype float32 --cases 4 --tasks ledger,recall,json,speech"
        f" --max-batch-size 16 --session-len 1024 --json {path}"
        " --compare no-enable-prefix-caching,max-batch-size=4,speculative-num-draft-tokens=0"
        " --speculative-num-draft-tokens 3 --debug-poison"
    ).split()
    assert main(["eval", *flags]) == 0
    found = json.loads(path.read_text("utf-8"))
    assert found["ok"]
    assert found["drift"] <= SILENT
    assert found["tasks"]["ledger"]["cached"] > 0.3


def test_what_differs_is_counted_and_placed() -> None:
    """On the CPU, by a mode that is made to differ."""
    model = MODELS[0]
    cases = cases_of(model, 1)[:2]
    one = run_mode(model, mode("cpu", "float32"), cases)
    assert agreement(one, one).places == ()
    assert agreement(one, one).equal == 2
    outcomes = {
        task: tuple(replaced(outcome, place=3) for outcome in some)
        for task, some in one.outcomes.items()
    }
    two = type(one)(one.mode, outcomes, one.drafts)
    assert agreement(one, two).places == (3, 3)
    assert "0 of 2 equal" in str(agreement(one, two))
    assert [name for name, *_ in comparisons("cuda", "float32")].count("cuda / CPU") == 1


def replaced(outcome, place: int):  # type: ignore[no-untyped-def]
    """The outcome with another token at a place."""
    tokens = (*outcome.tokens[:place], -1, *outcome.tokens[place + 1 :])
    return type(outcome)(outcome.case, tokens, outcome.top, outcome.cached)
