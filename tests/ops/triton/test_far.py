"""Slots, seats and tokens whose element offset passes 2^31, in every op that addresses slots."""

from __future__ import annotations

import pytest
import torch

from millpond.ops.batch import RowSlots, VerifyRows
from millpond.ops.reference import conv, delta, verify
from tests.ops.batches import ints, make_rows
from tests.ops.triton.layers import far
from tests.ops.triton.side_by_side import equal_bytes
from tests.ops.triton.test_tokens import Layer
from tests.ops.triton.tolerances import within

SLOTS, SEATS, MOST = 3, 2, 1
REFERENCE = {
    "conv_prefill": conv.conv_prefill,
    "conv_decode": conv.conv_decode,
    "conv_verify": verify.conv_verify,
    "delta_prefill": delta.delta_prefill,
    "delta_decode": delta.delta_decode,
    "delta_verify": verify.delta_verify,
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

    layer = Layer("kda", 2, torch.float32, key_heads=1)
    weight = layer.random(layer.channels, 4)
    mixed = layer.random(2, layer.channels)
    window = layer.random(SLOTS, layer.channels, 3)
    state = layer.random(SLOTS, layer.heads, layer.v_dim, layer.k_dim)
    rings = {
        "ring": layer.random(SEATS, 2, MOST, layer.channels),
        "ring_decay": layer.random(SEATS, 2, MOST, *layer.decay_shape),
        "ring_beta": layer.random(SEATS, 2, MOST, layer.heads),
    }
    pending = layer.split(layer.random(1, MOST, layer.channels))
    results = []
    for really in (False, True):
        place = device if really else torch.device("cpu")
        op = BACKEND.ops[name] if really else REFERENCE[name]
        rows = rows_of(name, *slots)
        if really:
            moved = {f: getattr(rows, f) for f in rows.__dataclass_fields__ if f != "written"}
            moved = {f: x.to(place) if isinstance(x, torch.Tensor) else x for f, x in moved.items()}
            rows = type(rows)(**moved)
        x = apart(mixed, place, really=really)
        bank = apart(window if "conv" in name else state, place, really=really)
        wanted = ("ring",) if "conv" in name else ("ring_decay", "ring_beta")
        held = {
            ring: apart(rings[ring], place, really=really)
            for ring in wanted
            if name.endswith("verify")
        }
        if "conv" in name:
            out = op(x, weight.to(place), bank=bank, **held, rows=rows)
        else:
            gate = delta.Gate(layer.gate.a_log.to(place), layer.gate.dt_bias.to(place), -5.0)
            more = {"pending": tuple(p.to(place) for p in pending)} if held else {}
            decay = apart(layer.decay, place, really=really)
            beta = apart(layer.beta, place, really=really)
            out = op(*layer.split(x), decay, beta, gate=gate, bank=bank, **held, **more, rows=rows)
        out = out if isinstance(out, tuple) else (out,)
        results.append((out, bank, held, rows.written.agreed()))
        assert not really or bank.stride(0) * (SLOTS - 1) >= 2**31
    (out, bank, held, report), (out_found, bank_found, held_found, report_found) = results
    for a, b in zip(out_found, out, strict=True):
        torch.testing.assert_close(a.cpu(), b, **within("chunks", torch.float32))
    for slot in range(SLOTS):
        torch.testing.assert_close(
            bank_found[slot].cpu(), bank[slot], **within("chunks", torch.float32)
        )
    for ring, values in held.items():
        assert all(equal_bytes(held_found[ring][s].cpu(), values[s]) for s in range(SEATS))
    assert report_found == report
    assert len(report) == 2
