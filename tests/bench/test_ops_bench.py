"""Cases of single ops: what they must move and compute, and that wrong ones are all named."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench.ops import __main__ as ops
from bench.ops import cases as linear
from bench.ops import layers, measure
from millpond.ops.reference.backend import BACKEND as REFERENCE

CPU, FP32 = torch.device("cpu"), torch.float32
SMALL = "small-kda,small-gdn,small-q4,small-g8"


def cases(only: str = ",".join(ops.FAMILIES)) -> list[ops.Make]:
    return ops.wanted(SMALL, only, CPU, FP32)


@pytest.mark.parametrize("most", [None, 1, 5, 100])
def test_pairs_of_queries_and_positions_are_counted(most: int | None) -> None:
    prefill, decode = [(0, 3), (4, 7)], [0, 9]
    positions = [p for start, count in prefill for p in range(start, start + count)] + decode
    expected = sum(min(p + 1, most or p + 1) for p in positions)
    assert layers.seen(prefill, decode, most) == expected


def test_a_decode_step_of_attention_reads_every_key_and_value_once() -> None:
    q4 = layers.SHAPES["q4"]
    case = layers.gqa(q4, CPU, torch.bfloat16, "", ([], [1279] * 2))
    queries_and_outputs = 2 * 2 * 16 * 256
    assert case.least_bytes == 2 * (2 * 1280 * 2 * 4 * 256 + queries_and_outputs)
    assert case.least_flops == 2 * 1280 * 4 * 16 * 256


def test_every_family_has_cases_that_equal_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "serving", REFERENCE.ops.__getitem__)
    for family in ops.FAMILIES:
        assert cases(family), family
    assert ops.check(cases(), FP32) == (0, len(cases()))
    assert ops.check(cases(), FP32, until=0.0) == (0, 0)


def test_every_wrong_case_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serving(name: str) -> Callable[..., object]:
        op = REFERENCE.ops[name]
        if name == "rms_norm":
            return lambda *a, **k: op(*a, **k) * 1.001
        if name == "pool_keys":  # returns nothing: what it wrote is wrong

            def wrong(*a: object, **k: torch.Tensor) -> None:
                op(*a, **k)
                k["tails"][0, 0, 0, 0] += 1.0

            return wrong
        if name == "moe_route_sigmoid":

            def raising(*a: object, **k: object) -> object:
                raise RuntimeError("out of resources")

            return raising
        return op

    monkeypatch.setattr(measure, "serving", serving)
    wrong, _ = ops.check(cases("norms,indexer,moe"), FP32)
    printed = capsys.readouterr().out
    assert wrong == 5 == printed.count("ops: ")
    for named in ("rms_norm (tokens 3)", "rms_norm (tokens 70)", "pool_keys", "out of resources"):
        assert named in printed


def test_whole_numbers_differ_by_the_share_that_does() -> None:
    one, other = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])
    assert measure.difference(one, other) == 0.25
    assert measure.difference(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")


def test_a_step_of_rows_moves_states_windows_and_what_drafts_leave_once_each_way() -> None:
    kda, bf16 = linear.SHAPES["kda"], 2
    case = linear.mix_verify(kda, CPU, torch.bfloat16, 2, 3, 2)
    channels, decays = 3 * 64 * 128, 64 * 128
    slots = 2 * 2 * (4 * 64 * 128 * 128 + 3 * channels * bf16)
    rings = 2 * (2 + 3) * (channels + decays + 64) * bf16
    tokens = 2 * 4 * (channels + 64 * 128 + decays + 64) * bf16
    assert case.least_bytes == slots + rings + tokens + 4 * 4 * channels


def test_no_kind_of_case_has_its_second_before_all_had_their_first() -> None:
    made = [(m.func.__name__, m.args[0].name) for m in ops.wanted("kda,q4", "mix,norms", CPU, FP32)]
    kinds = [*[("mix_decode", "kda")], *[("mix_verify", "kda")] * 4, *[("norm", "q4")] * 2]
    assert made[:7] == kinds
    assert made[7] == ("mix_decode", "kda")
    first = ops.wanted("kda,q4", "mix,norms", CPU, FP32, first=1)
    assert [(m.func.__name__, m.args[0].name) for m in first] == kinds


def run(makes: list[ops.Make], path: Path | None = None, each: float = 30.0) -> ops.Table:
    """Measure on a device of round rates."""
    table = ops.Table(path, "float32")
    chosen = Namespace(limit=60.0, each=each, peer=1.0)
    ops.measure(makes, FP32, measure.Rates(1e12, 1e12), table, chosen)
    return table


def test_a_case_that_differs_has_no_time_and_what_is_kept_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wrong = True

    def serving(name: str) -> Callable[..., object]:
        op = REFERENCE.ops[name]
        return (lambda *a, **k: op(*a, **k) * 1.001) if wrong and name == "swiglu" else op

    monkeypatch.setattr(measure, "serving", serving)
    monkeypatch.setattr(ops, "timed", lambda case, _: measure.Times(8.0, 9.0))
    path = tmp_path / "ops.jsonl"
    makes = cases("mix,norms")
    assert len(run(makes, path).wrong) == 4
    printed = capsys.readouterr().out
    assert printed.count("\n| ") + printed.startswith("| ") == len(makes) - 4
    assert "| swiglu |" not in printed
    assert "| mix_verify | small-kda | rows 3, K 3, folded 2 | 8.0 | 9.0 | " in printed
    assert " | 1.00 |  |  |\n" in printed  # as long as decoding
    wrong = False
    assert not run(makes, path).wrong
    assert capsys.readouterr().out.count("| swiglu |") == 4
    run(makes, path)
    assert not capsys.readouterr().out


def test_a_case_that_takes_too_long_is_named_and_the_next_one_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "serving", REFERENCE.ops.__getitem__)

    def timed(case: ops.Case, seconds: float) -> measure.Times:
        if case.op == "swiglu":
            time.sleep(20.0)
        return measure.Times(8.0, 9.0)

    monkeypatch.setattr(ops, "timed", timed)
    norms = [make for make in cases("norms") if make.args[0].name == "small-q4"]
    run([norms[1], norms[0]], each=2.0)
    printed = capsys.readouterr().out
    assert printed.count("took too long") == 1
    assert "| zero_centred_rms_norm |" in printed


def nap(seconds: float) -> None:
    with measure.at_most(seconds):
        time.sleep(5.0)


def test_a_limit_within_a_limit_does_not_move_it() -> None:
    def both() -> None:
        with measure.at_most(0.4):
            with pytest.raises(measure.TooLongError):
                nap(0.1)
            time.sleep(5.0)

    began = time.monotonic()
    with pytest.raises(measure.TooLongError):
        both()
    assert time.monotonic() - began < 4.0
