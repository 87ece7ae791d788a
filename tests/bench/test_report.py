"""One table and one plot of a run: what is counted, what stands beside it, what it does not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import report
from bench.engine.ceilings import (
    G8,
    least_seconds,
    prompt_seconds,
    step_seconds,
    tokens_a_step,
)
from bench.engine.drive import Run, Watched
from bench.engine.tower import build
from bench.engine.traffic import Draw, at_once
from bench.engine.workloads import WORKLOADS, Scale

Record = dict[str, Any]
TALK = dict(conversations=16, turns=6, more=1024, out=64)


@pytest.fixture(scope="module")
def measures() -> Record:
    """Of a real repetition, so that the report and the workloads agree on names."""
    one = next(WORKLOADS["A"](Scale(0.01, 0.01)))
    watched: Watched = build("tiny-q4", one.need, device="cpu").engine(**one.settings)
    run: Run = watched.run(at_once(Draw(0, 512), 1, 8, 4))
    watched.engine.close()
    return run.measures()


def tower(run: str, **changes: Any) -> Record:
    facts = dict(
        run=run,
        kind="tower",
        date="2026-01-01 00:00",
        commit="abc1234",
        machine="NVIDIA H200, 140 GiB, driver 1",
        versions="Python 3, torch 2",
        model="q4",
        dtype="bfloat16",
        drafts=0,
        num_seats=64,
        num_slots=328,
        num_pages=9000,
        slot_mb=51.5,
        page_mb=2.36,
        seat_mb=2.41,
        load_s=9.0,
        warm_up_s=20.0,
    )
    return facts | changes


def trial(run: str, measures: Record, workload: str, variant: str = "", **of: Any) -> Record:
    return dict(
        run=run,
        kind="trial",
        workload=workload,
        variant=variant,
        trial=of.pop("trial", 1),
        full=of.pop("full", True),
        asked=of.pop("asked", TALK if workload == "D" else dict(requests=1, prompt=512, out=256)),
        measures=measures | of,
    )


def text_of(*records: Record, run: str | None = None) -> str:
    return report.table(report.Results.read([json.dumps(r) for r in records], run))


def row(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {name} |"))


def test_the_best_and_the_median_are_of_counted_repetitions(measures: Record) -> None:
    rates = {0: 9999.0, 1: 300.0, 2: 500.0, 3: 400.0}
    found = text_of(
        tower("1"),
        *(trial("1", measures, "A", trial=t, output_tokens_per_s=r) for t, r in rates.items()),
    )
    assert "500 (400)" in row(found, "A")
    assert "abc1234" in found
    assert "1.047 slots a sequence" in found
    assert "What this does not show" in found


def test_a_bar_is_met_or_missed_beside_the_peers_figures(measures: Record) -> None:
    met = text_of(tower("1"), trial("1", measures, "B", output_tokens_per_s=8200.0))
    missed = text_of(tower("1"), trial("1", measures, "B", output_tokens_per_s=8100.0))
    assert "met: 8,200 of 8,169" in row(met, "B")
    assert "missed: 8,100 of 8,169" in row(missed, "B")
    assert "7,507 / 7,417" in row(met, "B")
    slow = text_of(tower("1"), trial("1", measures, "B", ms_per_token_at_the_end=8.28))
    assert "8.28 (2.00 x the floor)" in row(slow, "B")
    quick = text_of(tower("1"), trial("1", measures, "D", "on", ttft_mean_s=0.2))
    assert "met: 0.2 of 0.21" in row(quick, "D on")


@pytest.mark.parametrize("change", [{"full": False}, {"model": "g8"}, {"machine": "2 x CPU"}])
def test_peers_stand_beside_the_same_work_only(measures: Record, change: Record) -> None:
    full = change.pop("full", True)
    one = trial("1", measures, "B", output_tokens_per_s=9e3, full=full)
    found = text_of(tower("1", **change), one)
    assert ("smaller than it is meant to be" in found) == (not full)
    assert "7,507" not in found
    assert "met" not in row(found, "B")


def test_a_ratio_is_taken_within_one_run(measures: Record) -> None:
    off = trial("1", measures, "C", "off", output_tokens_per_s=1000.0)
    hitless = trial("1", measures, "C", "on, no hits", output_tokens_per_s=980.0)
    assert "missed: 0.980 of 0.99" in row(text_of(tower("1"), off, hitless), "C on, no hits")
    older = dict(off, run="0")
    assert "0.99" not in text_of(tower("0"), older, tower("1"), hitless)


def test_a_shorter_time_is_the_better_one(measures: Record) -> None:
    def told(interior: float) -> str:
        name = "32320, budget 4096"
        split = trial("1", measures, "E", f"{name}, split", ttft_mean_s=1.0)
        other = trial("1", measures, "E", f"{name}, interior", ttft_mean_s=interior)
        return row(text_of(tower("1"), split, other), f"E {name}, interior")

    assert "met: 1.042 of 1.0375" in told(0.96)
    assert "missed: 0.962 of 1.0375" in told(1.04)


def test_the_least_time_of_a_workload_follows_from_bytes_and_products(measures: Record) -> None:
    # As worked out by hand for the peers: a step of A and of B, and the prompts of C.
    assert step_seconds(1, 640) == pytest.approx(1.99e-3, rel=0.01)
    assert step_seconds(64, 1280) == pytest.approx(4.14e-3, rel=0.01)
    assert 64 * prompt_seconds(0, 8192) == pytest.approx(6.0, rel=0.03)
    sizes = dict(requests=64, prompt=8192, shared=4096, out=128)
    off, on, warm = (least_seconds("C", name, sizes) for name in ("off", "on", "on, warm"))
    assert off == least_seconds("C", "on, no hits", sizes | dict(shared=0))
    assert warm < on < 0.6 * off
    assert least_seconds("D", "on", TALK) < 0.5 * least_seconds("D", "off", TALK)
    assert least_seconds("H", "", sizes) is None
    burst = dict(requests=256, prompt=2048, shared=1024, out=64)
    once, each = (least_seconds("G", f"burst, {name}", burst) for name in ("on", "off"))
    assert 0.5 < once / each < 0.6
    matrix = dict(burst, drafts=5, chance=0.8)
    some, none = (least_seconds("I", f"long in, {name}", matrix) for name in ("on", "off"))
    # Of a quarter nothing is known, of the others half.
    assert none - some == pytest.approx(191 * prompt_seconds(0, 1024), rel=0.01)
    assert tokens_a_step(3, 1.0) == 4.0
    drafting = least_seconds("F", "B, 3 drafts, 1", dict(sizes, drafts=3, chance=1.0))
    plain = least_seconds("F", "B, 0 drafts", dict(sizes, drafts=0, chance=None))
    assert drafting < plain
    # 64 tokens that choose 8 of 288 experts leave a sixth alone; nobody looks past 2,052 tokens.
    assert G8.experts_read(1) == pytest.approx(8 * G8.expert)
    assert G8.experts_read(64) / (288 * G8.expert) == pytest.approx(0.835, abs=0.001)
    assert step_seconds(64, 4096, of=G8) == step_seconds(64, 8192, of=G8)
    far = [prompt_seconds(n, n + 1, of=G8) for n in (0, 4096, 8192)]
    assert far[0] < far[1] == pytest.approx(far[2])
    found = text_of(tower("1"), trial("1", measures, "C", "off", asked=sizes, wall_s=2 * off))
    assert "| 50% (" in row(found, "C off")


def test_memory_of_a_sequence_is_held_against_its_bar(measures: Record) -> None:
    records = [trial("1", measures, "F", "B, 3 drafts, 1")]
    assert "met: 1.047 of 1.1" in text_of(tower("1", drafts=3), *records)
    assert "missed: 1.117 of 1.1" in text_of(tower("1", drafts=3, seat_mb=6.0), *records)


def test_caching_is_held_against_none_also_for_those_who_gain_nothing(measures: Record) -> None:
    name = "long in, batch 64, 5 drafts"
    off = trial("1", measures, "I", f"{name}, off", output_tokens_per_s=100.0, ttft_cold_p99_s=1.0)
    on = trial("1", measures, "I", f"{name}, on", output_tokens_per_s=130.0, ttft_cold_p99_s=1.25)
    found = row(text_of(tower("1"), off, on), f"I {name}, on")
    assert "met: 1.300 of 1.006" in found
    assert "missed: 0.800 of 0.95" in found
    assert "cold p99 1.25" in found


def kernels_of(run: str, variant: str, kind: str, delta: float) -> Record:
    parts = {"delta rule": delta, "products": 3000.0}
    told = [dict(name="_fold_verify", per_step=24.0, us_per_step=delta)]
    told.append(dict(name="nvjet_sm90", per_step=130.0, us_per_step=3000.0))
    of_step = dict(steps=4, us_per_step=6000.0, idle=0.05, launches_per_step=400.0)
    return dict(
        run=run, kind="kernels", workload="F", variant=variant, step_kind=kind, parts=parts,
        kernels=told, **of_step,
    )  # fmt: skip


def test_the_delta_rule_of_a_verify_step_is_held_against_that_of_decoding(
    measures: Record,
) -> None:
    def text(verify: float) -> str:
        return text_of(
            tower("1"),
            trial("1", measures, "F", "B, 0 drafts", asked=dict(drafts=0)),
            trial("1", measures, "F", "B, 3 drafts, 1", asked=dict(drafts=3)),
            kernels_of("1", "B, 0 drafts", "decode", 1000.0),
            kernels_of("1", "B, 3 drafts, 1", "verify", verify),
        )

    assert "met: 1.30 of 1.4, its delta rule" in row(text(1300.0), "F B, 3 drafts, 1")
    assert "missed: 1.60 of 1.4, its delta rule" in row(text(1600.0), "F B, 3 drafts, 1")
    assert "its delta rule" not in row(text(1300.0), "F B, 0 drafts")


def test_kernels_are_told_by_part_and_kind_of_step(measures: Record) -> None:
    records = (
        tower("1"),
        kernels_of("1", "B, 3 drafts, 1", "mixed", 500.0),
        kernels_of("1", "B, 3 drafts, 1", "verify", 1300.0),
    )
    found = report.kernels(report.Results.read([json.dumps(r) for r in records]))
    lines = found.splitlines()
    assert "| mixed, 4 watched | verify, 4 watched |" in found
    assert "| **delta rule** | 500 | 1300 |" in lines
    assert "| `nvjet_sm90` | 3000 (130) | 3000 (130) |" in lines
    assert lines.index("| **products** | 3000 | 3000 |") < lines.index(
        "| **delta rule** | 500 | 1300 |"
    )


def test_the_newest_run_is_shown_unless_another_is_asked_for(measures: Record) -> None:
    records = [
        r
        for run, name in (("1", "A"), ("2", "B"))
        for r in (tower(run), trial(run, measures, name))
    ]
    assert row(text_of(*records), "B")
    assert row(text_of(*records, run="1"), "A")
    with pytest.raises(ValueError, match="'3'"):
        text_of(*records, run="3")


def test_what_failed_is_named(measures: Record) -> None:
    error = dict(run="1", kind="error", what="C", error="StepFailed: out of memory", trace="")
    found = text_of(tower("1"), trial("1", measures, "A"), error)
    assert "`C` failed: StepFailed: out of memory" in found


def test_the_command_writes_a_table_and_a_plot(
    measures: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "engine.jsonl"
    records = [tower("1"), trial("1", measures, "B"), trial("1", measures, "D", "on")]
    file.write_text("\n".join(json.dumps(r) for r in records))
    assert report.main([str(file)]) == 0
    assert (tmp_path / "engine-1.md").read_text().startswith("q4 in bfloat16")
    assert (tmp_path / "engine-1.png").stat().st_size > 1000
    error = dict(run="1", kind="error", what="A", error="Refused: no memory", trace="")
    file.write_text(json.dumps(tower("1")) + "\n" + json.dumps(error))
    assert report.main([str(file)]) == 1
    assert "Refused: no memory" in capsys.readouterr().out
