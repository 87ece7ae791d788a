"""Slots, seats and tokens whose element offset passes 2^31, in every op that addresses slots."""

from __future__ import annotations

import pytest
import torch

from millpond.ops.batch import RowSlots, VerifyRows
from millpond.ops.reference import conv, delta, steps
from tests.ops.batches import ints, make_rows
from tests.ops.triton.delta_rows import Mixer
from tests.ops.triton.layers import far
from tests.ops.triton.side_by_side import equal_bytes
from tests.ops.triton.tolerances import within

SLOTS, SEATS, MOST = 3, 2, 1
REFERENCE = {
    "conv_prefill": conv.conv_prefill,
    "delta_prefill": delta.delta_prefill,
    "mix_decode": steps.mix_decode,
    "mix_verify": steps.mix_verify,
}


LAST = SLOTS - 1


def rows_of(name: str, source: int, target: int, export: int) -> RowSlots | VerifyRows:
    """One row of the last seat, between two slots, and an export."""
    if not name.endswith("verify"):
        return make_rows([2], [source], [target], [(0, 2, export)])
    one = {"base": 5, "pending": 1, "num_drafts": 1, "parity": 1, "seats": SEATS - 1}
    return VerifyRows(
        width=MOST + 1, state_in=ints([source]), state_out=ints([target]),
        **{field: ints([value]) for field, value in one.items()},
        export_end=ints([7]), export_slot=ints([export]),
    )  # fmt: skip


def apart(x: torch.Tensor, device: torch.device, *, really: bool) -> torch.Tensor:
    return far(x.to(device)) if really else x.clone()


@pytest.mark.parametrize("slots", [(LAST, LAST, 0), (0, 1, LAST)], ids=["row", "export"])
@pytest.mark.parametrize("name", REFERENCE)
def test_far_slots_seats_and_tokens_are_reached(
    name: str, slots: tuple[int, int, int], device: torch.device
) -> None:
    from millpond.ops.triton.backend import BACKEND

    layer = Mixer("kda", 2, torch.float32, key_heads=1)
    window = layer.random(SLOTS, 3, layer.channels)
    state = layer.random(SLOTS, layer.heads, layer.v_dim, layer.k_dim)
    rings = {n: x.contiguous() for n, x in layer.rings(SEATS, MOST).items()}
    results = []
    for really in (False, True):
        place = device if really else torch.device("cpu")
        op = BACKEND.ops[name] if really else REFERENCE[name]
        rows = rows_of(name, *slots)
        if really:
            moved = {f: getattr(rows, f) for f in rows.__dataclass_fields__ if f != "written"}
            moved = {f: x.to(place) if isinstance(x, torch.Tensor) else x for f, x in moved.items()}
            rows = type(rows)(**moved)
        x, decay, beta = (
            apart(t.contiguous(), place, really=really) for t in (layer.x, layer.decay, layer.beta)
        )
        gate = delta.Gate(layer.gate.a_log.to(place), layer.gate.dt_bias.to(place), -5.0)
        weight = layer.weight.to(place)
        windows = apart(window, place, really=really).mT
        states = apart(state, place, really=really)
        held = {}
        if name.endswith("verify"):
            held = {n: apart(ring, place, really=really) for n, ring in rings.items()}
        banks = (windows, states)
        if name == "conv_prefill":
            banks = (windows,)
            out = op(x, weight, bank=windows, rows=rows)
        elif name == "delta_prefill":
            banks = (states,)
            out = op(*layer.split(x), decay, beta, gate=gate, bank=states, rows=rows)
        else:
            out = op(
                x, weight, decay, beta, gate=gate, window=windows, bank=states, **held, rows=rows
            )
        results.append((out, banks, held, rows.written.agreed()))
        assert not really or all(b.stride(0) * (SLOTS - 1) >= 2**31 for b in banks)
    (out, banks, held, report), (out_found, banks_found, held_found, report_found) = results
    near = within("chunks", torch.float32)
    torch.testing.assert_close(out_found.cpu(), out, **near)
    for found, expected in zip(banks_found, banks, strict=True):
        for slot in range(SLOTS):
            torch.testing.assert_close(found[slot].cpu(), expected[slot], **near)
    for ring, values in held.items():
        assert all(equal_bytes(held_found[ring][s].cpu(), values[s]) for s in range(SEATS))
    assert report_found == report
    assert len(report) == 2
