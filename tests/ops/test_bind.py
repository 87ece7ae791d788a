"""Binding: who serves an op, and what is said when nobody can."""

from __future__ import annotations

import logging

import pytest
import torch

from millpond.errors import Refused
from millpond.ops.bind import OP_NAMES, Backend, backends, bind
from millpond.ops.reference import delta

CPU = torch.device("cpu")


def backend(name: str, rank: int, ops: dict, why: str | None = None, grid: int = 16) -> Backend:
    return Backend(
        name=name, rank=rank, unusable=lambda device: why, ops=ops, export_granularity=grid
    )


def fast(*args: object) -> object:
    return args


TORCH = next(b for b in backends() if b.name == "torch")


def test_the_reference_serves_every_op_and_nothing_unknown() -> None:
    assert set(TORCH.ops) == set(OP_NAMES)
    bound = bind(CPU, among=[TORCH])
    assert bound.delta_prefill is delta.delta_prefill
    assert bound.export_granularity == delta.EXPORT_GRANULARITY


def test_every_installed_backend_offers_known_ops_only() -> None:
    for found in backends():
        assert set(found.ops) <= set(OP_NAMES)


def test_the_highest_usable_rank_serves_what_it_has() -> None:
    good = backend("good", 5, {"delta_prefill": fast, "linear": fast})
    broken = backend("broken", 9, {"linear": print}, why="needs another device")
    bound = bind(CPU, among=[TORCH, broken, good][::-1])
    assert bound.linear is fast
    assert bound.export_granularity == 16
    assert bound.rms_norm is TORCH.ops["rms_norm"]


def test_a_named_backend_comes_first_and_one_op_may_be_named_apart() -> None:
    good = backend("good", 5, {"delta_prefill": fast, "linear": fast})
    bound = bind(CPU, backend="torch", among=[good, TORCH])
    assert bound.linear is TORCH.ops["linear"]
    bound = bind(CPU, delta_prefill_backend="torch", among=[good, TORCH])
    assert bound.delta_prefill is delta.delta_prefill
    assert bound.export_granularity == delta.EXPORT_GRANULARITY
    assert bound.linear is fast


@pytest.mark.parametrize(
    "choice",
    [
        {"backend": "broken"},
        {"backend": "unheard_of"},
        {"delta_prefill_backend": "broken"},
        {"delta_prefill_backend": "flash_kda"},
        {"delta_prefill_backend": "partial"},
    ],
)
def test_what_cannot_serve_is_refused_with_every_backends_reason(choice: dict[str, str]) -> None:
    broken = backend("broken", 9, {"delta_prefill": fast}, why="needs another device")
    partial = backend("partial", 1, {"linear": fast})
    with pytest.raises(Refused) as caught:
        bind(CPU, among=[TORCH, broken, partial], **choice)
    message = str(caught.value)
    assert next(iter(choice.values())) in message
    assert "broken: needs another device" in message
    assert "torch: usable" in message
    for absent in {"unheard_of", "flash_kda"} & set(choice.values()):
        assert f"{absent}: not part of this installation" in message


def test_an_op_that_nobody_has_is_refused_by_name() -> None:
    partial = backend("partial", 1, {"linear": fast})
    with pytest.raises(Refused, match=r"'linear_float'.*partial: lacks it"):
        bind(CPU, among=[partial])


def test_one_line_says_who_serves_what(caplog: pytest.LogCaptureFixture) -> None:
    good = backend("good", 5, {"linear": fast})
    broken = backend("broken", 9, {}, why="needs another device")
    with caplog.at_level(logging.INFO, logger="millpond.ops.bind"):
        bind(CPU, among=[good, broken, TORCH])
    assert [r.getMessage() for r in caplog.records] == [
        "ops on cpu: good: linear; torch: all others; not broken (needs another device)"
    ]


def test_triton_says_what_it_lacks_on_a_cpu() -> None:
    reason = r"triton: (Triton is not installed|needs CUDA, or Triton's interpreter)"
    with pytest.raises(Refused, match=reason):
        bind(CPU, backend="triton")
