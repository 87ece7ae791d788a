"""Decode and verify rows whose tokens are made ready first: as the reference, and to the byte as by
convolution and delta rule one after the other.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millpond.ops.batch import RowSlots, VerifyRows, WriteLog
from millpond.ops.reference import steps
from millpond.ops.triton import choices
from millpond.ops.triton.choices import Choices, TokenChoice
from tests.ops.batches import make_rows, strided_bank
from tests.ops.triton.side_by_side import NAN, bank_copy, equal_bytes, run
from tests.ops.triton.test_tokens import DTYPES, PUBLISHED, Layer, compare_banks, verify_case
from tests.ops.triton.tolerances import within

pytestmark = pytest.mark.usefixtures("poisoned")
WIDTH, SLOTS = 4, 25
FP32, BF16 = DTYPES


class Mixer(Layer):
    """A layer with a convolution before it, and what its slots and seats hold."""

    def __init__(self, kind: str, tokens: int, dtype: torch.dtype) -> None:
        super().__init__(kind, tokens, dtype)
        self.weight = self.random(WIDTH, self.channels).t()
        wide = torch.full((tokens, self.channels + 16), NAN, dtype=dtype)
        wide[:, : self.channels] = self.random(tokens, self.channels).to(dtype)
        self.x = wide[:, : self.channels]

    def window(self) -> torch.Tensor:
        """Channels lie together, as in the weight and as a layer keeps them."""
        return strided_bank(SLOTS, (WIDTH - 1, self.channels), self.dtype).mT

    def rings(self, most: int) -> dict[str, torch.Tensor]:
        """Of as many seats as there are rows with one in `verify_case`, and one more."""
        shapes = {
            "ring": (self.channels,), "ring_decay": self.decay_shape, "ring_beta": (self.heads,),
        }  # fmt: skip
        return {n: strided_bank(most + 2, (2, most, *s), self.dtype) for n, s in shapes.items()}

    def split_steps(
        self, device: torch.device, named: dict[str, torch.Tensor], rows: RowSlots | VerifyRows
    ) -> torch.Tensor:
        """Convolution, then delta rule, on what `named` holds."""
        window, bank = named["window"], named["bank"]
        gates = (self.decay, self.beta)
        if isinstance(rows, RowSlots):
            y = run("conv_decode", device, self.x, self.weight, bank=window, rows=rows)
            args = (*steps.by_head(y, bank), *gates)
            return run("delta_decode", device, *args, gate=self.gate, bank=bank, rows=rows)
        old, y = run(
            "conv_verify", device, self.x, self.weight, bank=window, ring=named["ring"], rows=rows
        )
        return run(
            "delta_verify", device, *steps.by_head(y, bank), *gates,
            pending=steps.by_head(old, bank), gate=self.gate, bank=bank,
            ring_decay=named["ring_decay"], ring_beta=named["ring_beta"], rows=rows,
        )  # fmt: skip


def outcomes(
    layer: Mixer,
    op: str,
    device: torch.device,
    named: dict[str, torch.Tensor],
    rows: RowSlots | VerifyRows,
) -> list[tuple]:
    """Outputs, banks and rings, and reports of the reference, the op, and its parts in turn."""
    made = []
    for how in ("reference", "op", "parts"):
        kept = {
            name: bank_copy(x.mT).mT if name == "window" else bank_copy(x)
            for name, x in named.items()
        }
        log = replace(rows, written=WriteLog())
        args = (layer.x, layer.weight, layer.decay, layer.beta)
        if how == "reference":
            o = getattr(steps, op)(*args, gate=layer.gate, **kept, rows=log)
        elif how == "op":
            o = run(op, device, *args, gate=layer.gate, **kept, rows=log)
        else:
            o = layer.split_steps(device, kept, log)
        made.append((o, kept, log.written.agreed()))
    return made


def compare(made: list[tuple], named: dict[str, torch.Tensor], dtype: torch.dtype, op: str) -> None:
    (expected, kept, report), (found, kept_found, told), (parts, kept_parts, _) = made
    torch.testing.assert_close(found, expected, **within("steps", dtype))
    assert equal_bytes(found, parts)
    states = "steps of bf16" if dtype == torch.bfloat16 else "steps"
    compare_banks(kept_found["bank"], kept["bank"], named["bank"], states)
    assert equal_bytes(kept_found["bank"], kept_parts["bank"])
    assert equal_bytes(kept_found["window"], kept["window"])
    assert told == report, op


@pytest.mark.parametrize(("kind", "dtype"), [("gdn", BF16), ("kda", FP32), ("kda_softplus", BF16)])
def test_decode_rows_are_those_of_convolution_and_delta_rule(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    lengths = [3, 1, 0, 2, 1, 0, 1]
    rows = make_rows(
        lengths, [3, 3, 3, -1, 5, -1, 6], [7, 8, 9, 10, 5, 11, -1],
        [(0, 1, 12), (0, 3, 13), (0, 3, 14), (3, 2, 15), (4, 1, -1), (6, 1, 4)],
    )  # fmt: skip
    layer = Mixer(kind, sum(lengths), dtype)
    named = {"window": layer.window(), "bank": layer.bank(SLOTS)}
    for bank in named.values():
        bank[[4, *range(7, 16)]] = NAN
    compare(outcomes(layer, "mix_decode", device, named, rows), named, dtype, "mix_decode")


@pytest.mark.parametrize(
    ("kind", "dtype", "most"),
    [
        ("kda", BF16, 0), ("gdn", FP32, 1), ("kda_softplus", FP32, 1),
        ("gdn", BF16, 3), ("kda", FP32, 3), ("kda", BF16, 3),
    ],
)  # fmt: skip
def test_verify_rows_are_those_of_convolution_and_delta_rule(
    kind: str, dtype: torch.dtype, most: int, device: torch.device
) -> None:
    rows = verify_case(most)
    layer = Mixer(kind, rows.num_tokens, dtype)
    for x in (layer.x, layer.decay, layer.beta):
        x[~rows.filled.flatten()] = NAN
    named = {"window": layer.window(), "bank": layer.bank(SLOTS), **layer.rings(most)}
    for name in ("window", "bank"):
        named[name][10:] = NAN
    stale = torch.arange(most) >= torch.where(rows.seats >= 0, rows.pending, 0)[:, None]
    for name in ("ring", "ring_decay", "ring_beta"):
        for row in range(most + 1):
            named[name][rows.seats[row], rows.parity[row]][stale[row]] = NAN
    made = outcomes(layer, "mix_verify", device, named, rows)
    compare(made, named, dtype, "mix_verify")
    assert not made[1][0][~rows.filled.flatten()].any()
    for row in range(most + 1):
        at = int(rows.seats[row]), 1 - int(rows.parity[row]), slice(int(rows.num_drafts[row]))
        for name in ("ring", "ring_decay", "ring_beta"):
            assert equal_bytes(made[1][1][name][at], made[0][1][name][at]), name


@pytest.mark.parametrize("kind", PUBLISHED)
def test_states_and_outputs_are_the_same_bytes_whatever_the_tile(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a choice for another GPU, or for another number of rows, changes nobody's text."""
    rows = verify_case(1)
    layer = Mixer(kind, rows.num_tokens, BF16)
    named = {"window": layer.window(), "bank": layer.bank(SLOTS), **layer.rings(1)}
    made = []
    for values in (8, 16, 32):
        tile = Choices(tokens=TokenChoice(values=values))
        monkeypatch.setattr(choices, "_of_device", lambda _, tile=tile: tile)
        kept = {n: bank_copy(x.mT).mT if n == "window" else bank_copy(x) for n, x in named.items()}
        log = replace(rows, written=WriteLog())
        args = (layer.x, layer.weight, layer.decay, layer.beta)
        o = run("mix_verify", device, *args, gate=layer.gate, **kept, rows=log)
        made.append((o[rows.filled.flatten()], kept["bank"]))
    for o, bank in made[1:]:
        assert equal_bytes(o, made[0][0])
        assert equal_bytes(bank, made[0][1])
