"""Decode and verify at fixed addresses: what a captured step reads anew each time it is replayed.

On a GPU the calls are captured once and replayed; under the interpreter they are repeated. Between
two replays only numbers at fixed addresses change: slots, counters, parity, seats, tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import torch

from millpond.ops.batch import VerifyRows, WriteLog
from millpond.ops.reference.steps import mix_verify
from millpond.ops.triton.backend import BACKEND
from tests.ops.batches import ints
from tests.ops.triton.delta_rows import Mixer
from tests.ops.triton.side_by_side import equal_bytes, moved
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
    layer = Mixer("kda", ROWS * (MOST + 1), torch.float32)
    kept = {"window": layer.window(SLOTS), "bank": layer.bank(SLOTS), **layer.rings(ROWS, MOST)}
    rows = step(0)
    there = {name: x.to(device, copy=True) for name, x in kept.items()}
    numbers, gate = moved(rows, device), moved(layer.gate, device)
    args = [x.to(device) for x in layer.args]
    call = replayable(
        lambda: BACKEND.ops["mix_verify"](*args, gate=gate, rows=numbers, **there), device
    )
    for name, x in kept.items():  # compiling has run it once
        there[name].copy_(x)
    for number in range(4):
        rows = step(number)
        for field in fields(rows):
            if isinstance(value := getattr(rows, field.name), torch.Tensor):
                getattr(numbers, field.name).copy_(value)
        found = call()
        expected = mix_verify(
            *layer.args, gate=layer.gate, rows=replace(rows, written=WriteLog()), **kept
        )
        torch.testing.assert_close(found.cpu(), expected, **within("steps", torch.float32))
        torch.testing.assert_close(there["bank"].cpu(), kept["bank"], **within("steps", "state"))
        assert equal_bytes(there["window"].cpu(), kept["window"])
        for name in ("ring", "ring_decay", "ring_beta"):
            for row in torch.nonzero(rows.seats >= 0).flatten().tolist():
                at = (
                    int(rows.seats[row]),
                    1 - int(rows.parity[row]),
                    slice(int(rows.num_drafts[row])),
                )
                assert equal_bytes(there[name][at].cpu(), kept[name][at])
            there[name].copy_(kept[name])  # entries after those are anything, and may be read next
