"""Cases of single ops: what they must move and compute, and that wrong ones are all named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from bench.ops import __main__ as ops
from bench.ops import layers
from millpond.ops.reference.backend import BACKEND as REFERENCE

CPU, FP32 = torch.device("cpu"), torch.float32
SMALL = "small-kda,small-gdn,small-q4,small-g8"


def cases(only: str = ",".join(ops.FAMILIES)) -> list[Callable[[], ops.Case]]:
    return list(ops.wanted(SMALL, only, CPU, FP32))


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
    monkeypatch.setattr(ops, "serving", REFERENCE.ops.__getitem__)
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

    monkeypatch.setattr(ops, "serving", serving)
    wrong, _ = ops.check(cases("norms,indexer,moe"), FP32)
    printed = capsys.readouterr().out
    assert wrong == 5 == printed.count("ops: ")
    for named in ("rms_norm (tokens 3)", "rms_norm (tokens 70)", "pool_keys", "out of resources"):
        assert named in printed


def test_whole_numbers_differ_by_the_share_that_does() -> None:
    one, other = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])
    assert ops.difference(one, other) == 0.25
    assert ops.difference(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")
