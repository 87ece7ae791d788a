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
from millpond.ops.reference import conv, delta, verify
from tests.ops.batches import ints, make_rows, strided_bank
from tests.ops.triton.layers import poisoned
from tests.ops.triton.side_by_side import NAN, bank_copy, equal_bytes, run
from tests.ops.triton.test_tokens import DTYPES, KINDS, Layer, compare_banks
from tests.ops.triton.tolerances import within

pytestmark = pytest.mark.usefixtures(poisoned.__name__)

EXAMPLES = {"cpu": 2, "cuda": 25}
LIVE, SLOTS, CHANNELS, WIDTH, DRAFTS = 6, 30, 70, 4, 3
"""Slots 0 to LIVE - 1 hold states; what is written goes there in place, or behind them."""

FORMS = {
    "prefill": ((0, 1, 2, 63, 64, 65, 100, 128, 192), "chunks", delta.delta_prefill),
    "decode": ((0, 1, 1, 1, 2, 3, 5), "tokens", delta.delta_decode),
}


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
def some_rows(draw: st.DrawFn, form: str) -> RowSlots:
    lengths = draw(st.lists(st.sampled_from(FORMS[form][0]), min_size=1, max_size=6))
    state_in, state_out, free = some_slots(draw, len(lengths))
    exports = []
    for row, length in enumerate(lengths):
        step = 64 if form == "prefill" else 1
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


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_any_rows_of_known_tokens(
    form: str, kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    def check(rows: RowSlots) -> None:
        layer = Layer(kind, rows.num_tokens, dtype, key_heads=1)
        x = layer.random(rows.num_tokens, CHANNELS).to(dtype)
        weight = layer.random(CHANNELS, WIDTH)
        bank = poisoned_bank(layer.bank(SLOTS), rows.state_in)
        windows = poisoned_bank(strided_bank(SLOTS, (CHANNELS, WIDTH - 1), dtype), rows.state_in)

        _, line, reference = FORMS[form]
        named = dict(gate=layer.gate)
        expected, states, report = of_reference(reference, layer.inputs, bank, rows, named)
        found, states_found, report_found = of_kernel(
            f"delta_{form}", device, layer.inputs, bank, rows, named
        )
        torch.testing.assert_close(found, expected, **within(line, dtype))
        rounds = line == "chunks" and dtype == torch.bfloat16
        compare_banks(states_found, states, bank, "chunks of bf16" if rounds else line)
        assert report_found == report

        inputs = (x, weight)
        convolved, left, report = of_reference(
            getattr(conv, f"conv_{form}"), inputs, windows, rows, {}
        )
        convolved_found, left_found, report_found = of_kernel(
            f"conv_{form}", device, inputs, windows, rows, {}
        )
        torch.testing.assert_close(convolved_found, convolved, **within("conv", dtype))
        assert equal_bytes(left_found, left)
        assert report_found == report

        row = max(range(rows.num_rows), key=lambda r: rows.lengths[r])
        at = slice(*rows.cu_seqlens[row : row + 2].tolist())
        alone = make_rows(rows.lengths[row : row + 1], [int(rows.state_in[row])], [SLOTS - 1])
        parts = tuple(part[at] for part in layer.inputs)
        by_itself, state, _ = of_kernel(f"delta_{form}", device, parts, bank, alone, named)
        assert equal_bytes(by_itself, found[at])
        if (slot := int(rows.state_out[row])) >= 0:
            assert equal_bytes(state[SLOTS - 1], states_found[slot])
        by_itself, _, _ = of_kernel(f"conv_{form}", device, (x[at], weight), windows, alone, {})
        assert equal_bytes(by_itself, convolved_found[at])

    repeated(device, some_rows(form), check)


def of_reference(op, inputs, bank, rows, named):  # type: ignore[no-untyped-def]
    """Output, bank and report of the reference."""
    bank, rows = bank_copy(bank), replace(rows, written=WriteLog())
    out = op(*inputs, bank=bank, rows=rows, **named)
    return out, bank, rows.written.agreed()


def of_kernel(name, device, inputs, bank, rows, named):  # type: ignore[no-untyped-def]
    """The same of the kernel."""
    bank, rows = bank_copy(bank), replace(rows, written=WriteLog())
    out = run(name, device, *inputs, bank=bank, rows=rows, **named)
    return out, bank, rows.written.agreed()


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_verify_rows(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    def check(rows: VerifyRows) -> None:
        layer = Layer(kind, rows.num_tokens, dtype)
        filled = rows.filled.flatten()
        for part in layer.inputs:
            part[~filled] = NAN
        bank = poisoned_bank(layer.bank(SLOTS), rows.state_in)
        held = torch.arange(DRAFTS) < torch.where(rows.seats >= 0, rows.pending, 0)[:, None]
        old = layer.random(rows.num_rows, DRAFTS, layer.channels).to(dtype)
        old[~held] = NAN
        rings = {
            name: ring_of(rows, held, shape, dtype)
            for name, shape in (("ring_decay", layer.decay_shape), ("ring_beta", (layer.heads,)))
        }
        named = dict(gate=layer.gate, pending=layer.split(old))
        made = []
        for op in (of_reference, of_kernel):
            own = {name: bank_copy(ring) for name, ring in rings.items()}
            how = (verify.delta_verify,) if op is of_reference else ("delta_verify", device)
            made.append((*op(*how, layer.inputs, bank, rows, named | own), own))
        (expected, states, report, left), (found, states_found, report_found, left_found) = made
        torch.testing.assert_close(found[filled], expected[filled], **within("tokens", dtype))
        compare_banks(states_found, states, bank, "tokens")
        assert report_found == report
        same_rings(rows, left_found, left, rings)

        x, weight = layer.random(rows.num_tokens, CHANNELS).to(dtype), layer.random(CHANNELS, WIDTH)
        x[~filled] = NAN
        windows = poisoned_bank(strided_bank(SLOTS, (CHANNELS, WIDTH - 1), dtype), rows.state_in)
        ring = {"ring": ring_of(rows, held, (CHANNELS,), dtype)}
        made = []
        for op in (of_reference, of_kernel):
            own = {"ring": bank_copy(ring["ring"])}
            how = (verify.conv_verify,) if op is of_reference else ("conv_verify", device)
            made.append((*op(*how, (x, weight), windows, rows, own), own))
        (expected, states, report, left), (found, states_found, report_found, left_found) = made
        for mine, theirs, at in zip(found, expected, (held, filled), strict=True):
            torch.testing.assert_close(mine[at], theirs[at], **within("conv", dtype))
        assert equal_bytes(states_found, states)
        assert report_found == report
        same_rings(rows, left_found, left, ring)

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
