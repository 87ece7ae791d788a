"""State ops over rows drawn at random, NaN wherever nobody may read: as the reference, and each
row as by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.ops.batch import RowSlots, VerifyRows, WriteLog
from millpond.ops.reference import conv, delta, steps
from tests.ops.batches import ints, make_rows, strided_bank
from tests.ops.triton.delta_rows import DTYPES, KINDS, Mixer, compare_banks
from tests.ops.triton.layers import poisoned
from tests.ops.triton.side_by_side import NAN, bank_copy, equal_bytes, run
from tests.ops.triton.tolerances import within

pytestmark = pytest.mark.usefixtures(poisoned.__name__)

EXAMPLES = {"cpu": 2, "cuda": 25}
LIVE, SLOTS, DRAFTS = 6, 30, 3
"""Slots 0 to LIVE - 1 hold states; what is written goes there in place, or behind them."""

PROMPTS = (0, 1, 2, 63, 64, 65, 100, 128, 192)
SINGLES = (0, 1, 1, 1, 2, 3, 5)
"""Tokens of a row in chunk form and token by token."""


def some_slots(draw: st.DrawFn, count: int) -> tuple[list[int], list[int], list[int]]:
    """Inputs (shared or none), outputs (in place where nobody else reads, none, or new), the rest.

    No slot is written twice, and none that another row reads.
    """
    state_in = draw(st.lists(st.integers(-1, LIVE - 1), min_size=count, max_size=count))
    free = draw(st.permutations(range(LIVE, SLOTS)))
    state_out = []
    for source in state_in:
        own = source >= 0 and state_in.count(source) == 1
        choices = ["new", "new", "none", *["in place"] * own]
        how = draw(st.sampled_from(choices))
        state_out.append(source if how == "in place" else free.pop() if how == "new" else -1)
    return state_in, state_out, free


@st.composite
def some_rows(draw: st.DrawFn, tokens: tuple[int, ...], step: int) -> RowSlots:
    """Exports at multiples of `step` and at rows' ends."""
    lengths = draw(st.lists(st.sampled_from(tokens), min_size=1, max_size=6))
    state_in, state_out, free = some_slots(draw, len(lengths))
    exports = []
    for row, length in enumerate(lengths):
        for end in {*range(step, length + 1, step), length} - {0}:
            if draw(st.integers(0, 2)) == 0:
                exports.append((row, end, free.pop() if draw(st.integers(0, 4)) else -1))
    return make_rows(lengths, state_in, state_out, draw(st.permutations(exports)))


@st.composite
def some_verify_rows(draw: st.DrawFn) -> VerifyRows:
    count = draw(st.integers(1, 6))
    state_in, state_out, free = some_slots(draw, count)
    seats = list(draw(st.permutations(range(count + 2))))[:count]
    padding = [draw(st.integers(0, 4)) == 0 for _ in range(count)]

    def numbers(most: int) -> list[int]:
        return draw(st.lists(st.integers(0, most), min_size=count, max_size=count))

    base, pending = numbers(200), numbers(DRAFTS)
    ends = [b + draw(st.integers(0, DRAFTS + 2)) for b in base]
    # An export at the row's own end is not planned: that state is the output.
    ends = [-1 if e == b + p + 1 else e for e, b, p in zip(ends, base, pending, strict=True)]
    none = [-1] * count
    return VerifyRows(
        width=DRAFTS + 1,
        state_in=kept(state_in, padding),
        state_out=kept(state_out, padding),
        base=ints(base),
        pending=ints(pending),
        num_drafts=ints(numbers(DRAFTS)),
        parity=ints(numbers(1)),
        seats=kept(seats, padding),
        export_end=ints(ends),
        export_slot=kept([free.pop() for _ in none], padding),
    )


def kept(numbers: Sequence[int], padding: Sequence[bool]) -> torch.Tensor:
    return ints([-1 if out else n for n, out in zip(numbers, padding, strict=True)])


def poisoned_bank(bank: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """Every slot that no row reads is NaN."""
    for slot in set(range(len(bank))) - set(read.tolist()):
        bank[slot] = NAN
    return bank


def repeated(device: torch.device, strategy: st.SearchStrategy, check: Callable[..., None]) -> None:
    @settings(max_examples=EXAMPLES[device.type], derandomize=True, database=None)
    @given(rows=strategy)
    def some(rows: RowSlots | VerifyRows) -> None:
        check(rows)

    some()


def both(op, device, args, kept, rows, named):  # type: ignore[no-untyped-def]
    """Output, what is kept, and report: of the reference, and of the kernel."""
    name, reference = op
    made = []
    for how in (reference, None):
        own = {n: bank_copy(x.mT).mT if n == "window" else bank_copy(x) for n, x in kept.items()}
        log = replace(rows, written=WriteLog())
        if how is None:
            out = run(name, device, *args, **own, **named, rows=log)
        else:
            out = how(*args, **own, **named, rows=log)
        made.append((out, own, log.written.agreed()))
    return made


def longest(rows: RowSlots) -> tuple[slice, RowSlots, int]:
    """The tokens of the longest row, that row by itself, and where it writes among the others."""
    row = max(range(rows.num_rows), key=lambda r: rows.lengths[r])
    at = slice(*rows.cu_seqlens[row : row + 2].tolist())
    alone = make_rows(rows.lengths[row : row + 1], [int(rows.state_in[row])], [SLOTS - 1])
    return at, alone, int(rows.state_out[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_rows_of_prompts(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    convolve, fold = ("conv_prefill", conv.conv_prefill), ("delta_prefill", delta.delta_prefill)

    def check(rows: RowSlots) -> None:
        layer = Mixer(kind, rows.num_tokens, dtype, key_heads=1)
        bank = {"bank": poisoned_bank(layer.bank(SLOTS), rows.state_in)}
        gate = {"gate": layer.gate}
        reference, found = both(fold, device, layer.inputs, bank, rows, gate)
        torch.testing.assert_close(found[0], reference[0], **within("chunks", dtype))
        line = "chunks of bf16" if dtype == torch.bfloat16 else "chunks"
        compare_banks(found[1]["bank"], reference[1]["bank"], bank["bank"], line)
        assert found[2] == reference[2]

        before = strided_bank(SLOTS, (layer.channels, layer.weight.shape[1] - 1), dtype)
        window = {"bank": poisoned_bank(before, rows.state_in)}
        taps = layer.weight.contiguous()
        expected, convolved = both(convolve, device, (layer.x, taps), window, rows, {})
        torch.testing.assert_close(convolved[0], expected[0], **within("conv", dtype))
        assert equal_bytes(convolved[1]["bank"], expected[1]["bank"])
        assert convolved[2] == expected[2]

        at, alone, slot = longest(rows)
        parts = tuple(part[at] for part in layer.inputs)
        _, by_itself = both(fold, device, parts, bank, alone, gate)
        assert equal_bytes(by_itself[0], found[0][at])
        if slot >= 0:
            assert equal_bytes(by_itself[1]["bank"][SLOTS - 1], found[1]["bank"][slot])
        _, by_itself = both(convolve, device, (layer.x[at], taps), window, alone, {})
        assert equal_bytes(by_itself[0], convolved[0][at])

    repeated(device, some_rows(PROMPTS, 64), check)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_rows_of_single_tokens(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    op = ("mix_decode", steps.mix_decode)

    def check(rows: RowSlots) -> None:
        layer = Mixer(kind, rows.num_tokens, dtype, key_heads=1)
        kept = {
            "window": poisoned_bank(layer.window(SLOTS), rows.state_in),
            "bank": poisoned_bank(layer.bank(SLOTS), rows.state_in),
        }
        gate = {"gate": layer.gate}
        expected, found = both(op, device, layer.args, kept, rows, gate)
        torch.testing.assert_close(found[0], expected[0], **within("steps", dtype))
        compare_banks(found[1]["bank"], expected[1]["bank"], kept["bank"], line_of(dtype))
        assert equal_bytes(found[1]["window"], expected[1]["window"])
        assert found[2] == expected[2]

        at, alone, slot = longest(rows)
        x, weight, decay, beta = layer.args
        _, by_itself = both(op, device, (x[at], weight, decay[at], beta[at]), kept, alone, gate)
        assert equal_bytes(by_itself[0], found[0][at])
        if slot >= 0:
            for name in kept:
                assert equal_bytes(by_itself[1][name][SLOTS - 1], found[1][name][slot])

    repeated(device, some_rows(SINGLES, 1), check)


def line_of(dtype: torch.dtype) -> str:
    return "steps of bf16" if dtype == torch.bfloat16 else "steps"


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_verify_rows(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    def check(rows: VerifyRows) -> None:
        layer = Mixer(kind, rows.num_tokens, dtype)
        filled = rows.filled.flatten()
        for part in (layer.x, layer.decay, layer.beta):
            part[~filled] = NAN
        held = torch.arange(DRAFTS) < torch.where(rows.seats >= 0, rows.pending, 0)[:, None]
        rings = {
            name: ring_of(rows, held, shape, dtype)
            for name, shape in (
                ("ring", (layer.channels,)),
                ("ring_decay", layer.decay_shape),
                ("ring_beta", (layer.heads,)),
            )
        }
        kept = {
            "window": poisoned_bank(layer.window(SLOTS), rows.state_in),
            "bank": poisoned_bank(layer.bank(SLOTS), rows.state_in),
            **rings,
        }
        op = ("mix_verify", steps.mix_verify)
        expected, found = both(op, device, layer.args, kept, rows, {"gate": layer.gate})
        torch.testing.assert_close(found[0], expected[0], **within("steps", dtype))
        compare_banks(found[1]["bank"], expected[1]["bank"], kept["bank"], line_of(dtype))
        assert equal_bytes(found[1]["window"], expected[1]["window"])
        assert found[2] == expected[2]
        same_rings(rows, {n: found[1][n] for n in rings}, expected[1], rings)

    repeated(device, some_verify_rows(), check)


def ring_of(
    rows: VerifyRows, held: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Both banks of every seat; only what is pending can be read."""
    ring = strided_bank(rows.num_rows + 2, (2, DRAFTS, *shape), dtype)
    kept_values = ring.clone()
    ring[:] = NAN
    for row, seat in enumerate(rows.seats.tolist()):
        if seat >= 0:
            at = seat, int(rows.parity[row]), held[row]
            ring[at] = kept_values[at]
    return ring


def same_rings(
    rows: VerifyRows,
    found: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    before: dict[str, torch.Tensor],
) -> None:
    """The drafts of every row in the other bank, byte for byte; seats of no row as they were."""
    seats = rows.seats.tolist()
    for name, ring in found.items():
        for row, seat in enumerate(seats):
            if seat >= 0:
                at = seat, 1 - int(rows.parity[row]), slice(int(rows.num_drafts[row]))
                assert equal_bytes(ring[at], expected[name][at])
                pending = seat, int(rows.parity[row])
                assert equal_bytes(ring[pending], before[name][pending])
        for seat in set(range(len(ring))) - set(seats):
            assert equal_bytes(ring[seat], before[name][seat])
