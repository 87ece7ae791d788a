"""Decode and verify rows, convolution and delta rule in one op: as the reference, and speculation
to the byte as plain decode.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millpond.ops.batch import RowSlots, VerifyRows, WriteLog
from millpond.ops.reference import steps
from millpond.ops.triton import choices
from millpond.ops.triton.choices import Choices, TokenChoice
from tests.ops.batches import ints, make_rows
from tests.ops.triton.delta_rows import (
    DTYPES,
    KINDS,
    PUBLISHED,
    Mixer,
    compare_banks,
    verify_case,
)
from tests.ops.triton.side_by_side import NAN, bank_copy, equal_bytes, run
from tests.ops.triton.tolerances import within

pytestmark = pytest.mark.usefixtures("poisoned")
SLOTS = 25
FP32, BF16 = DTYPES


def copies(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: bank_copy(x.mT).mT if n == "window" else bank_copy(x) for n, x in named.items()}


def outcomes(
    layer: Mixer,
    op: str,
    device: torch.device,
    named: dict[str, torch.Tensor],
    rows: RowSlots | VerifyRows,
) -> list[tuple]:
    """Outputs, banks and rings, and reports of the reference and of the kernels."""
    made = []
    for kernels in (False, True):
        kept, log = copies(named), replace(rows, written=WriteLog())
        if kernels:
            o = run(op, device, *layer.args, gate=layer.gate, **kept, rows=log)
        else:
            o = getattr(steps, op)(*layer.args, gate=layer.gate, **kept, rows=log)
        made.append((o, kept, log.written.agreed()))
    return made


def compare(made: list[tuple], named: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    (expected, kept, report), (found, kept_found, told) = made
    torch.testing.assert_close(found, expected, **within("steps", dtype))
    states = "steps of bf16" if dtype == torch.bfloat16 else "steps"
    compare_banks(kept_found["bank"], kept["bank"], named["bank"], states)
    assert equal_bytes(kept_found["window"], kept["window"])
    assert told == report


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_decode_rows_give_the_outputs_states_exports_and_report_of_the_reference(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    lengths = [3, 1, 0, 2, 1, 0, 1]
    rows = make_rows(
        lengths, [3, 3, 3, -1, 5, -1, 6], [7, 8, 9, 10, 5, 11, -1],
        [(0, 1, 12), (0, 3, 13), (0, 3, 14), (3, 2, 15), (4, 1, -1), (6, 1, 4)],
    )  # fmt: skip
    layer = Mixer(kind, sum(lengths), dtype)
    named = {"window": layer.window(SLOTS), "bank": layer.bank(SLOTS)}
    for bank in named.values():
        bank[[4, *range(7, 16)]] = NAN
    made = outcomes(layer, "mix_decode", device, named, rows)
    compare(made, named, dtype)
    assert len(made[1][2]) == 6 + 5


def spoil(layer: Mixer, named: dict[str, torch.Tensor], rows: VerifyRows) -> None:
    """NaN wherever a verify row of `verify_case` has nothing to read."""
    for x in (layer.x, layer.decay, layer.beta):
        x[~rows.filled.flatten()] = NAN
    for name in ("window", "bank"):
        named[name][10:] = NAN
    most = rows.width - 1
    stale = torch.arange(most) >= torch.where(rows.seats >= 0, rows.pending, 0)[:, None]
    for name in ("ring", "ring_decay", "ring_beta"):
        for row in range(most + 1):
            named[name][rows.seats[row], rows.parity[row]][stale[row]] = NAN


@pytest.mark.parametrize(
    ("kind", "dtype", "most"),
    [
        ("kda", BF16, 0), ("gdn", FP32, 0), ("gdn", FP32, 1), ("kda_softplus", FP32, 1),
        ("gdn", BF16, 3), ("kda", FP32, 3), ("kda", BF16, 3),
    ],
)  # fmt: skip
def test_verify_rows_fold_what_is_pending_once_and_run_their_drafts_for_outputs(
    kind: str, dtype: torch.dtype, most: int, device: torch.device
) -> None:
    rows = verify_case(most)
    layer = Mixer(kind, rows.num_tokens, dtype)
    named = {"window": layer.window(SLOTS), "bank": layer.bank(SLOTS)}
    named |= layer.rings(most + 2, most)
    spoil(layer, named, rows)
    made = outcomes(layer, "mix_verify", device, named, rows)
    compare(made, named, dtype)
    assert not made[1][0][~rows.filled.flatten()].any()
    for row in range(most + 1):
        at = int(rows.seats[row]), 1 - int(rows.parity[row]), slice(int(rows.num_drafts[row]))
        for name in ("ring", "ring_decay", "ring_beta"):
            assert equal_bytes(made[1][1][name][at], made[0][1][name][at]), name


@pytest.mark.parametrize("width", [2, 3])
def test_a_narrower_convolution_is_one_with_taps_of_zero(width: int, device: torch.device) -> None:
    lengths = [1, 2, 5]
    layer = Mixer("kda", sum(lengths), FP32, width=width)
    named = {"window": layer.window(SLOTS), "bank": layer.bank(SLOTS)}
    rows = make_rows(lengths, [3, -1, 4], [3, 5, -1], [(0, 1, 6), (2, 4, 7)])
    compare(outcomes(layer, "mix_decode", device, named, rows), named, FP32)
    live = verify_case(1)
    layer = Mixer("kda", live.num_tokens, FP32, width=width)
    named = {"window": layer.window(SLOTS), "bank": layer.bank(SLOTS), **layer.rings(3, 1)}
    spoil(layer, named, live)
    compare(outcomes(layer, "mix_verify", device, named, live), named, FP32)


@pytest.mark.parametrize(
    ("kind", "dtype", "export"),
    [
        *((kind, dtype, 2) for kind in KINDS for dtype in DTYPES),
        ("kda", BF16, 1), ("gdn", BF16, 3),
        *((kind, BF16, 2) for kind in PUBLISHED),
    ],
)  # fmt: skip
def test_speculation_gives_the_bytes_of_plain_decode(
    kind: str, dtype: torch.dtype, export: int, device: torch.device
) -> None:
    """Two drafts pending, the certain token, two drafts: as five tokens one by one."""
    most, layer = 2, Mixer(kind, 5, dtype)
    plain, windows = layer.bank(7), layer.window(7)
    plain[1:], windows[1:] = NAN, NAN
    named = {"window": bank_copy(windows.mT).mT, "bank": bank_copy(plain)} | layer.rings(1, most)
    x, weight, decay, beta = layer.args
    outputs = [
        run(
            "mix_decode", device, x[n : n + 1], weight, decay[n : n + 1], beta[n : n + 1],
            gate=layer.gate, window=windows, bank=plain, rows=make_rows([1], [n], [n + 1]),
        )
        for n in range(5)
    ]  # fmt: skip
    for name, raw in zip(("ring", "ring_decay", "ring_beta"), (x, decay, beta), strict=True):
        named[name][0, 0] = raw[:2]
        named[name][0, 1] = NAN
    rows = VerifyRows(
        width=most + 1, state_in=ints([0]), state_out=ints([0]), base=ints([0]), pending=ints([2]),
        num_drafts=ints([2]), parity=ints([0]), seats=ints([0]),
        export_end=ints([export]), export_slot=ints([1]),
    )  # fmt: skip
    o = run(
        "mix_verify", device, x[2:], weight, decay[2:], beta[2:], gate=layer.gate, rows=rows,
        **named,
    )  # fmt: skip
    assert equal_bytes(o, torch.cat(outputs[2:]))
    for slot, n in ((0, 3), (1, export)):
        assert equal_bytes(named["bank"][slot], plain[n])
        assert equal_bytes(named["window"][slot], windows[n])
    for name, raw in zip(("ring", "ring_decay", "ring_beta"), (x, decay, beta), strict=True):
        assert equal_bytes(named[name][0, 1], raw[3:])
    assert rows.written.agreed() == {(0, 3), (1, export)}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_states_and_outputs_are_the_same_bytes_whatever_the_tile(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a choice for another GPU, or for another number of rows, changes nobody's text."""
    rows = verify_case(1)
    layer = Mixer(kind, rows.num_tokens, BF16)
    named = {"window": layer.window(SLOTS), "bank": layer.bank(SLOTS), **layer.rings(3, 1)}
    made = []
    for values in (8, 16, 32):
        tile = Choices(tokens=TokenChoice(values=values))
        monkeypatch.setattr(choices, "_of_device", lambda _, tile=tile: tile)
        kept, log = copies(named), replace(rows, written=WriteLog())
        o = run("mix_verify", device, *layer.args, gate=layer.gate, **kept, rows=log)
        made.append((o[rows.filled.flatten()], kept["bank"]))
    for o, bank in made[1:]:
        assert equal_bytes(o, made[0][0])
        assert equal_bytes(bank, made[0][1])
