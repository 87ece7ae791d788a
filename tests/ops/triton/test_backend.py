"""The Triton backend as a whole: its ops are where it says, and it serves where it can."""

from __future__ import annotations

import inspect

import torch

from millpond.ops.bind import OP_NAMES, bind
from millpond.ops.reference.backend import BACKEND as REFERENCE
from millpond.ops.triton.backend import BACKEND


def test_every_op_is_in_its_module_and_takes_what_the_reference_takes(
    device: torch.device,
) -> None:
    bound = bind(device, quiet=True)
    for name in OP_NAMES:
        if name in BACKEND.ops:
            assert getattr(bound, name) is BACKEND.ops[name]
            found, wanted = (inspect.signature(b.ops[name]) for b in (BACKEND, REFERENCE))
            assert list(found.parameters) == list(wanted.parameters), name
    assert set(BACKEND.ops) <= set(OP_NAMES)
    assert bound.export_granularity == 64
