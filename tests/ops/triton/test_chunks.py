"""The chunk form's kernels against the reference: outputs, states, exports, cuts, extreme decay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millpond.ops.batch import WriteLog
from millpond.ops.reference.delta import delta_prefill
from tests.ops.batches import make_rows
from tests.ops.triton.delta_rows import DTYPES, KINDS, Layer, compare_banks
from tests.ops.triton.side_by_side import NAN, bank_copy, equal_bytes, run
from tests.ops.triton.tolerances import within

chunks = pytest.importorskip("millpond.ops.triton.chunks")
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    # Products of pairs that are masked may be infinite; numpy tells of it.
    pytest.mark.filterwarnings("ignore:overflow encountered in matmul"),
]


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
    bank[7:] = NAN
    rows = make_rows(lengths, sources, targets, exports)
    (o, state, report), (o_found, state_found, report_found) = both(layer, device, bank, rows)
    torch.testing.assert_close(o_found, o, **within("chunks", dtype))
    line = "chunks" if dtype == torch.float32 else "chunks of bf16"
    compare_banks(state_found, state, bank, line)
    assert report_found == report
    assert len(report) == 3 + 5


def fold(layer: Layer, device: torch.device, bank, rows, at: slice = slice(None)) -> torch.Tensor:
    parts = [x[at] for x in layer.inputs]
    return run("delta_prefill", device, *parts, gate=layer.gate, bank=bank, rows=rows)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_prompt_cut_on_the_grid_or_beside_others_gives_the_same_bytes(
    kind: str, device: torch.device
) -> None:
    layer = Layer(kind, 64 + 64 + 9, torch.bfloat16, key_heads=1)
    whole, cut = layer.bank(6), layer.bank(6)
    o = fold(layer, device, whole, make_rows([137], [-1], [1], [(0, 128, 3), (0, 64, 2)]))
    # The middle part beside a row of other tokens, and in place.
    first = fold(layer, device, cut, make_rows([64], [-1], [2]), slice(64))
    tail = fold(layer, device, cut, make_rows([64, 9], [2, 0], [3, -1]), slice(64, 137))
    last = fold(layer, device, cut, make_rows([9], [3], [1]), slice(128, 137))
    assert equal_bytes(torch.cat((first, tail[:64], last)), o)
    for slot in (1, 2, 3):
        assert equal_bytes(cut[slot], whole[slot])


@pytest.mark.parametrize(
    "kind, steep",
    [
        pytest.param("gdn", 900.0, id="head decay that erases all, among small ones"),
        pytest.param("kda_softplus", 80.0, id="steep channel decay among small ones"),
        pytest.param("kda", 1e4, id="channel decay at its bound"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_extreme_decay_neither_overflows_nor_loses_what_stays(
    kind: str, steep: float, dtype: torch.dtype, device: torch.device
) -> None:
    layer = Layer(kind, 64, dtype, key_heads=1)
    hits = torch.rand(layer.decay.shape, generator=layer.made) < (0.2 if steep < 1e3 else 0.9)
    layer.decay.copy_(torch.where(hits, steep, -6.0))
    bank = layer.bank(3)
    (o, state, _), (o_found, state_found, _) = both(layer, device, bank, make_rows([64], [0], [1]))
    assert o_found.isfinite().all()
    torch.testing.assert_close(o_found, o, **within("chunks", dtype))
    line = "chunks" if dtype == torch.float32 else "chunks of bf16"
    compare_banks(state_found, state, bank, line)


def test_keys_that_repeat_do_not_blow_up_the_triangular_solve(device: torch.device) -> None:
    """One key, beta near 1, no decay: powers of the system's matrix would reach 1e17."""
    layer = Layer("kda", 64, torch.float32, key_heads=1)
    k = layer.qkv[1]
    k.copy_(k[:1].clone().expand_as(k))
    layer.beta.fill_(9.0)
    layer.decay.fill_(-40.0)
    bank = layer.bank(3)
    (o, state, _), (o_found, state_found, _) = both(layer, device, bank, make_rows([64], [0], [1]))
    torch.testing.assert_close(o_found, o, **within("chunks", torch.float32))
    compare_banks(state_found, state, bank, "chunks")


def test_an_export_where_the_kernel_has_no_state_is_neither_written_nor_reported(
    device: torch.device,
) -> None:
    layer = Layer("kda", 70, torch.bfloat16, key_heads=1)
    bank = layer.bank(6)
    bank[3:] = NAN
    rows = make_rows([70], [-1], [1], [(0, 65, 3), (0, 71, 4), (0, 0, 5), (0, 70, 2)])
    fold(layer, device, bank, rows)
    assert rows.written.agreed() == {(1, 70), (2, 70)}
    assert equal_bytes(bank[1], bank[2])
    assert bank[3:].isnan().all()


def test_inputs_are_read_where_they_lie_unless_tokens_lie_off_the_grid_of_copies() -> None:
    rows = torch.randn(5, 3 * 64 + 8).bfloat16()
    part = rows[1:, 64:128]
    assert chunks.lined_up(part) is part
    for askew in (rows[:, 4:68], torch.randn(5, 67).bfloat16()[:, :64]):
        copy = chunks.lined_up(askew)
        assert equal_bytes(copy, askew)
        assert copy.stride(0) == 64
