"""Decode and verify at fixed addresses: what a captured step reads anew each time it is replayed.

On a GPU the calls are captured once and replayed; under the interpreter they are repeated. Between
two replays only numbers at fixed addresses change: slots, counters, parity, seats, tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import torch

from millpond.ops.batch import VerifyRows, WriteLog
from millpond.ops.reference.verify import delta_verify
from millpond.ops.triton.backend import BACKEND
from tests.ops.batches import ints
from tests.ops.triton.side_by_side import equal_bytes, moved
from tests.ops.triton.test_tokens import Layer
from tests.ops.triton.tolerances import within

MOST, ROWS, SLOTS = 2, 3, 6


def step(number: int) -> VerifyRows:
    """Other slots, counts and seats every time; the last row is padding at first, then live."""
    live = ROWS - 1 + number % 2
    none = [-1] * (ROWS - live)
    return VerifyRows(
        width=MOST + 1,
        state_in=ints([*range(live), *none]),
        state_out=ints([*range(3, 3 + live), *none]),
        base=ints([10 * number] * ROWS),
        pending=ints([(number + i) % (MOST + 1) for i in range(ROWS)]),
        num_drafts=ints([(2 * number + i) % (MOST + 1) for i in range(ROWS)]),
        parity=ints([(number + i) % 2 for i in range(ROWS)]),
        seats=ints([*[(i + number) % ROWS for i in range(live)], *none]),
        export_end=ints([-1] * ROWS),
        export_slot=ints([-1] * ROWS),
    )


def replayable(call: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], object]:
    """The call as a graph, or itself."""
    if device.type != "cuda":
        return call
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    return lambda: (graph.replay(), kept)[1]


def test_a_replayed_step_follows_the_numbers_at_its_addresses(device: torch.device) -> None:
    layer = Layer("kda", ROWS * (MOST + 1), torch.float32)
    banks = [layer.bank(SLOTS), layer.bank(SLOTS)]
    rings = [layer.random(ROWS, 2, MOST, *shape) for shape in (layer.decay_shape, (layer.heads,))]
    old = layer.split(layer.random(ROWS, MOST, layer.channels))
    rows = step(0)
    there = {
        "pending": moved(tuple(x.contiguous() for x in old), device),
        "gate": moved(layer.gate, device),
        "bank": banks[1].to(device),
        "ring_decay": rings[0].to(device, copy=True),
        "ring_beta": rings[1].to(device, copy=True),
        "rows": moved(rows, device),
    }
    args = [x.contiguous().to(device) for x in layer.inputs]
    call = replayable(lambda: BACKEND.ops["delta_verify"](*args, **there), device)
    there["bank"].copy_(banks[0])  # compiling has run it once
    there["ring_decay"].copy_(rings[0])
    there["ring_beta"].copy_(rings[1])
    for number in range(4):
        rows = step(number)
        for field in fields(rows):
            if isinstance(value := getattr(rows, field.name), torch.Tensor):
                getattr(there["rows"], field.name).copy_(value)
        found = call()
        expected = delta_verify(
            *layer.inputs, pending=old, gate=layer.gate, bank=banks[0], ring_decay=rings[0],
            ring_beta=rings[1], rows=replace(rows, written=WriteLog()),
        )  # fmt: skip
        torch.testing.assert_close(found.cpu(), expected, **within("tokens", torch.float32))
        torch.testing.assert_close(there["bank"].cpu(), banks[0], **within("tokens", "state"))
        for name, ring in zip(("ring_decay", "ring_beta"), rings, strict=True):
            for row in torch.nonzero(rows.seats >= 0).flatten().tolist():
                at = (
                    int(rows.seats[row]),
                    1 - int(rows.parity[row]),
                    slice(int(rows.num_drafts[row])),
                )
                assert equal_bytes(there[name][at].cpu(), ring[at])
            there[name].copy_(ring)  # entries after those are anything, and may be read next
