"""The chunk form's kernels against the reference: outputs, states, exports, cuts, extreme decay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millpond.ops.batch import WriteLog
from millpond.ops.reference.delta import delta_prefill
from tests.ops.batches import make_rows
from tests.ops.triton.side_by_side import NAN, bank_copy, run
from tests.ops.triton.test_tokens import DTYPES, KINDS, Layer, compare_banks
from tests.ops.triton.tolerances import within


def both(layer: Layer, device: torch.device, bank, rows):
    """Outputs, banks and reports of the reference and of the kernels."""
    made = []
    for kernels in (False, True):
        state, log = bank_copy(bank), replace(rows, written=WriteLog())
        named = dict(gate=layer.gate, bank=state, rows=log)
        if kernels:
            o = run("delta_prefill", device, *layer.inputs, **named)
        else:
            o = delta_prefill(*layer.inputs, **named)
        made.append((o, state, log.written.agreed()))
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_prompt_rows_give_the_outputs_states_exports_and_report_of_the_reference(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    lengths = [130, 1, 0, 64]
    sources = [3, 3, 4, 5]
    targets = [7, -1, 9, 5]
    # Not in order, two at one place, at a row's end, of no slot.
    exports = [(3, 64, 11), (0, 128, 12), (0, 64, 13), (0, 64, 14), (0, 128, -1), (1, 1, 15)]
    layer = Layer(kind, sum(lengths), dtype, key_heads=1)
    bank = layer.bank(16)
    bank[[0, *range(7, 16)]] = NAN
    rows = make_rows(lengths, sources, targets, exports)
    (o, state, report), (o_found, state_found, report_found) = both(layer, device, bank, rows)
    torch.testing.assert_close(o_found, o, **within("chunks", dtype))
    line = "chunks" if dtype == torch.float32 else "chunks of bf16"
    compare_banks(state_found, state, bank, line)
    assert report_found == report
    assert len(report) == 3 + 5
