"""Speculation on one slot against plain decode, byte by byte: states, windows, vectors, outputs.

Sequences of true tokens are folded one by one by the per-token ops; verify rows fold the same
tokens with drafts that are right up to a chosen place and wrong after it. Everything that no one
may read holds NaN: free slots, rings, padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from millpond.ops.reference import verify
from tests.ops.batches import strided_bank
from tests.ops.verifying import (
    DTYPES,
    NAN,
    Ask,
    Layer,
    Plain,
    Row,
    Speculation,
    joined,
    rows_of,
    same,
)

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = ["gdn", "kda"]


@pytest.mark.parametrize("most", [1, 3, 5, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_acceptance_gives_the_bytes_of_plain_decode(
    kind: str, dtype: torch.dtype, most: int
) -> None:
    """Every acceptance in every bank; few drafts and none; rows that sit a step out; padding."""
    layer, steps = Layer(kind, dtype), 2 * (most + 1) + 3
    rows = rows_of(layer, most + 1, steps * (most + 2) // 2 + 3 * most)
    run = Speculation(layer, most, slots=2 * len(rows), seats=2 * len(rows))
    seen: set[tuple[int, int]] = set()
    for step in range(steps):
        asks = []
        for i, row in enumerate(rows):
            if (step + 2 * i) % 7 == 6:
                continue
            drafts = {4: 0, 9: most // 2}.get((step + i) % 11, most)
            right = min((step + i) % (most + 1), drafts)
            # In place, except every third time: then into the row's other slot.
            out = row.slot if step and step % 3 and row.slot >= 0 else 2 * i + (row.slot == 2 * i)
            seen.add((row.parity, row.pending))
            asks.append(Ask(row, drafts, right, out))
        asks.insert(step % 3, Ask(None, num_drafts=most))
        run.step(asks)
    assert seen == {(bank, n) for bank in (0, 1) for n in range(most + 1)}


@pytest.mark.parametrize("kind", KINDS)
def test_exports_are_written_where_the_row_passes_them_and_nowhere_else(kind: str) -> None:
    """Ends before the base, at it, at every replayed token, at the row's own end, and beyond."""
    most, layer = 5, Layer(kind, torch.bfloat16)
    rows = rows_of(layer, most + 1, 60)
    run = Speculation(layer, most, slots=20, seats=20)
    run.step([Ask(row, most, accepted, 10 + row.seat // 2) for accepted, row in enumerate(rows)])
    for step in range(most + 4):
        asks = []
        for i, row in enumerate(rows):
            export = (row.base - 1 + step, -1 if i == step else i)
            asks.append(Ask(row, most, (i + step) % (most + 1), row.slot, export))
        run.step(asks)
        for bank in run.banks.values():
            bank[:10] = NAN


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_share_the_slot_they_read(kind: str) -> None:
    """One of them writes it in place, one writes nowhere; with replayed drafts and without."""
    layer, most = Layer(kind, torch.float32), 3
    origin = Plain(layer, layer.tokens(5))
    start = {name: bank[5] for name, bank in origin.banks.items()}
    rows = [Row(Plain(layer, layer.tokens(20), start), seat=i, slot=0) for i in range(4)]
    run = Speculation(layer, most, slots=8, seats=8)
    for name, bank in run.banks.items():
        bank[0] = start[name]
    outs = (3, 0, 2, -1)
    run.step([Ask(row, most, i, out) for i, (row, out) in enumerate(zip(rows, outs, strict=True))])
    source = rows[2]
    copies = [replace(source, seat=seat) for seat in (4, 5, 6)]
    for ring in run.rings.values():
        ring[[4, 5, 6]] = ring[source.seat].clone()
    asks = [
        Ask(row, most, i, out) for i, (row, out) in enumerate(zip(copies, (4, 2, 5), strict=True))
    ]
    run.step(asks)


@pytest.mark.parametrize("kind", KINDS)
def test_without_drafts_it_is_plain_decode(kind: str) -> None:
    layer = Layer(kind, torch.bfloat16)
    rows = rows_of(layer, 3, 4)
    run = Speculation(layer, 0, slots=8, seats=8)
    for _ in range(3):
        run.step([Ask(row, out=i) for i, row in enumerate(rows)])


def test_a_row_writes_its_slot_once_and_each_export_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, most = Layer("kda", torch.float32), 4
    rows = rows_of(layer, 3, 20)
    run = Speculation(layer, most, slots=8, seats=8)
    run.step([Ask(row, most, 3, i) for i, row in enumerate(rows)])
    counts: Counter[tuple[int, int]] = Counter()

    def count(bank: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
        counts.update((bank.data_ptr(), slot) for slot in ids.tolist() if slot >= 0)
        write(bank, ids, values)

    write = verify.write_slots
    monkeypatch.setattr(verify, "write_slots", count)
    exports = ((4, 5), (5, 4), (6, 7))  # replayed drafts end at 4, the rows at 5
    asks = [Ask(row, most, 2, row.slot, e) for row, e in zip(rows, exports, strict=True)]
    made = run.step([*asks, Ask(None)])
    assert [len(slots) for slots, _ in made.written.entries] == [8] * 3
    assert set(counts.values()) == {1}
    slots = Counter(slot for _, slot in counts)
    assert slots == dict.fromkeys((0, 1, 2, 4, 5), 3)  # state, window, boundary vector


def test_a_ring_reads_zero_beyond_what_is_pending_and_without_a_seat() -> None:
    ring = strided_bank(4, (2, 3, 5)).fill_(NAN)
    ring[2, 1, :2], ring[0] = 1.0, 2.0
    run = Speculation(Layer("kda", torch.float32), 3, slots=1, seats=4)
    row = Row(None, seat=2, slot=-1, pending=2, parity=1)  # type: ignore[arg-type]
    rows = run.rows([Ask(row), Ask(replace(row, seat=-1))])
    found = verify.read_ring(ring, rows)
    assert found[0, :2].eq(1.0).all()
    assert not found[0, 2].any()
    assert not found[1].any()
    before = ring.clone()
    verify.write_ring(ring, torch.full((2, 3, 5), 7.0), rows)
    assert ring[2, 0].eq(7.0).all()
    before[2, 0] = 7.0
    assert same(ring, before)


class OnDevice(torch.Tensor):
    """Refuses to tell the host its values, and so do tensors made from it."""

    ASKING = frozenset(
        "item tolist nonzero __bool__ __int__ __float__ __index__ __len__ numpy cpu".split()
    )

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in cls.ASKING:
            raise AssertionError(f"{func.__name__} of a counter")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_no_counter_is_read_by_the_host() -> None:
    layer, most = Layer("gdn", torch.float32), 3
    run = Speculation(layer, most, slots=8, seats=8)
    asks = [Ask(row, most, i, i, (1, 5 + i)) for i, row in enumerate(rows_of(layer, 2, 8))]
    plain = run.rows(asks)
    counters = ("base", "pending", "num_drafts", "parity")
    rows = replace(plain, **{n: getattr(plain, n).as_subclass(OnDevice) for n in counters})
    with pytest.raises(AssertionError, match="of a counter"):
        rows.pending.tolist()
    t = joined([run.inputs(a) for a in asks])
    for _ in range(2):
        verify.hidden_before_verify(
            t["hidden"], bank=run.banks["boundary"], ring=run.rings["hidden"], rows=rows
        )
        layer.verify(t, run.banks, run.rings, rows)
        rows = replace(rows, pending=rows.pending + 2, parity=1 - rows.parity)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gives_the_same_bytes_alone_and_in_any_batch(kind: str) -> None:
    layer, most = Layer(kind, torch.bfloat16), 3
    rows = rows_of(layer, 9, 16)
    run = Speculation(layer, most, slots=30, seats=20)
    run.step([Ask(row, most, i % 4, i) for i, row in enumerate(rows)])
    asks = [Ask(row, i % 4, 0, 10 + i, (row.base + 2, 20 + i)) for i, row in enumerate(rows)]
    inputs = [run.inputs(a) for a in asks]

    def result(order: Sequence[int]) -> dict[int, list[torch.Tensor]]:
        banks = {n: b.clone() for n, b in run.banks.items()}
        rings = {n: r.clone() for n, r in run.rings.items()}
        made = run.rows([asks[i] for i in order])
        o = layer.verify(joined([inputs[i] for i in order]), banks, rings, made)
        return {
            i: [
                part,
                *(b[[10 + i, 20 + i]] for b in banks.values()),
                *(r[rows[i].seat] for r in rings.values()),
            ]
            for i, part in zip(order, o.split(most + 1), strict=True)
        }

    whole = result(range(9))
    for order in (range(8, -1, -1), [3, 5], *([i] for i in range(9))):
        for i, found in result(list(order)).items():
            assert all(same(a, b) for a, b in zip(found, whole[i], strict=True)), (order, i)
