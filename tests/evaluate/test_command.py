"""`millpond eval` from the command line to its exit status, on the bundled model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millpond.front.cli import main

SMALL = (
    "--device cpu --max-batch-size 4 --session-len 512 --num-kv-pages 64 --cases 2 "
    "--gate accuracy=0"
).split()


def run(tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "numbers.json"
    status = main(["eval", *SMALL, "--json", str(path), *flags])
    return status, json.loads(path.read_text("utf-8"))


def test_a_warm_mode_hits_and_agrees_with_the_cold_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = run(tmp_path, "--tasks", "tools,chat", "--no-gates", "--gate", "drift=0.01")
    shown = capsys.readouterr().out
    assert status == 0
    assert found["ok"]
    tools = found["tasks"]["tools"]
    assert tools["cached"] > 0.5
    assert tools["diverged"] == 0
    assert tools["drift"] <= 0.01
    assert "enable_prefix_caching=False" in found["compared_with"]
    assert "drift" in shown
    assert "tools" in shown


def test_drafts_are_reported_beside_accuracy(tmp_path: Path) -> None:
    status, found = run(
        tmp_path, "--tasks", "speech,random", "--speculative-num-draft-tokens", "3",
        "--compare", "none", "--no-gates",
    )  # fmt: skip
    assert status == 0
    assert found["compared_with"] is None
    assert found["tasks"]["random"]["accuracy"] is None
    assert 0 < found["tasks"]["random"]["acceptance"] < found["tasks"]["speech"]["acceptance"]
    assert found["tasks"]["speech"]["drift"] is None


def test_a_gate_that_fails_is_the_exit_status(tmp_path: Path) -> None:
    status, found = run(
        tmp_path, "--tasks", "chat", "--compare", "none", "--gate", "chat.margin=1000"
    )
    assert status == 1
    (failed,) = [g for g in found["gates"] if not g["ok"]]
    assert (failed["task"], failed["measure"]) == ("chat", "margin")


def test_the_other_mode_is_the_first_with_what_compare_says(tmp_path: Path) -> None:
    _, found = run(tmp_path, "--tasks", "chat", "--no-warm", "--compare", "checkpoint-mode=split")
    assert found["mode"].endswith("num_kv_pages=64, session_len=512, cold")
    assert "checkpoint_mode=split" in found["compared_with"]
    assert "max_batch_size=4" in found["compared_with"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--tasks", "chess"), "no task 'chess'"),
        (("--gate", "speed=1"), "is not measure=number"),
        (("--compare", "fast"), "unknown flag --fast"),
        (("nowhere",), "no model at nowhere"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *flags]) in (1, 2)
    assert says in capsys.readouterr().err
