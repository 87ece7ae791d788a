"""The per-token delta rule's kernels against the reference, and verify against plain decode."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millpond.ops.batch import VerifyRows, WriteLog
from millpond.ops.reference.delta import Gate, delta_decode
from millpond.ops.reference.verify import delta_verify
from tests.ops.batches import ints, make_rows, strided_bank
from tests.ops.triton.side_by_side import NAN, bank_copy, equal_bytes, run
from tests.ops.triton.tolerances import within

pytestmark = pytest.mark.usefixtures("poisoned")

KINDS = ["gdn", "kda", "kda_softplus"]
PUBLISHED = ["gdn_published", "kda_published"]
"""Heads of the size of real models, whose tiles and code are not those of small ones."""

DTYPES = [torch.float32, torch.bfloat16]


class Layer:
    """Random inputs of one layer; q, k, v are views of wider rows.

    Sizes of the first two kinds are no powers of two; tiles of the others are full and unmasked.
    """

    def __init__(
        self, kind: str, tokens: int, dtype: torch.dtype, key_heads: int | None = None
    ) -> None:
        self.made = torch.Generator().manual_seed(tokens)
        self.dtype = dtype
        self.key_heads, self.heads, self.k_dim, self.v_dim = {
            "gdn": (1, 2, 16, 40),
            "kda": (2, 2, 24, 16),
            "kda_softplus": (2, 2, 32, 16),
            "gdn_published": (1, 1, 128, 128),
            "kda_published": (1, 1, 128, 128),
        }[kind]
        kind = kind.removesuffix("_published")
        if key_heads is not None:
            self.heads, self.key_heads = key_heads * self.heads // self.key_heads, key_heads
        self.decay_shape = (self.heads,) if kind == "gdn" else (self.heads, self.k_dim)
        bound = {"gdn": None, "kda": -5.0, "kda_softplus": None}[kind]
        bias = self.heads if kind == "gdn" else self.heads * self.k_dim
        self.gate = Gate(self.random(self.heads) * 0.5 - 1.0, self.random(bias), bound)
        self.qkv = self.split(self.random(tokens, self.channels).to(dtype))
        self.decay = (self.random(tokens, *self.decay_shape) * 3).to(dtype)
        self.beta = self.random(tokens, self.heads).to(dtype)

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.k_dim + self.heads * self.v_dim

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.made)

    def split(self, mixed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keys = self.key_heads * self.k_dim
        q, k, v = mixed.split((keys, keys, self.heads * self.v_dim), -1)
        size = (self.key_heads, self.k_dim)
        return (
            q.unflatten(-1, size),
            k.unflatten(-1, size),
            v.unflatten(-1, (self.heads, self.v_dim)),
        )

    def bank(self, slots: int) -> torch.Tensor:
        return strided_bank(slots, (self.heads, self.v_dim, self.k_dim))

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return (*self.qkv, self.decay, self.beta)


def compare_banks(found: torch.Tensor, expected: torch.Tensor, before: torch.Tensor, op: str):
    """Slots that were written are near the reference's, all others keep their bytes."""
    for slot in range(len(found)):
        if equal_bytes(expected[slot], before[slot]):
            assert equal_bytes(found[slot], before[slot]), slot
        else:
            torch.testing.assert_close(found[slot], expected[slot], **within(op, "state"))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_decode_rows_give_the_outputs_states_exports_and_report_of_the_reference(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    lengths = [3, 1, 0, 2, 1, 0, 1]
    sources = [3, 3, 3, -1, 5, -1, 6]
    targets = [7, 8, 9, 10, 5, 11, -1]
    exports = [(0, 1, 12), (0, 3, 13), (0, 3, 14), (3, 2, 15), (4, 1, -1), (6, 1, 4)]
    layer = Layer(kind, sum(lengths), dtype)
    bank = layer.bank(16)
    bank[[4, *range(7, 16)]] = NAN
    banks = [bank_copy(bank) for _ in "ab"]
    rows = make_rows(lengths, sources, targets, exports)
    other = replace(rows, written=WriteLog())
    expected = delta_decode(*layer.inputs, gate=layer.gate, bank=banks[0], rows=rows)
    found = run("delta_decode", device, *layer.inputs, gate=layer.gate, bank=banks[1], rows=other)
    torch.testing.assert_close(found, expected, **within("tokens", dtype))
    compare_banks(banks[1], banks[0], bank, "tokens")
    assert other.written.agreed() == rows.written.agreed()
    assert len(other.written.agreed()) == 6 + 5


EXPORTS = {0: [1], 1: [0, 2], 3: [2, 1, 2, 4]}
"""By K: tokens folded at each row's export. Its base, replayed drafts, its own end, and beyond."""


def verify_case(most: int) -> VerifyRows:
    """Every number of pending drafts up to `most`, fewer new ones; the last two have no seat."""
    live = most + 1
    exports = EXPORTS[most]
    return VerifyRows(
        width=most + 1,
        state_in=ints([*[2, -1, 2, 3, 4][:live], -1, -1]),
        state_out=ints([*range(10, 10 + live), -1, -1]),
        base=ints([7 * i for i in range(live + 2)]),
        pending=ints([min(i, most) for i in range(live + 2)]),
        num_drafts=ints([max(most - i, 0) for i in range(live + 2)]),
        parity=ints([i % 2 for i in range(live + 2)]),
        seats=ints([*reversed(range(live)), -1, -1]),
        export_end=ints([*(7 * i + n for i, n in enumerate(exports)), -1, -1]),
        export_slot=ints([*range(19, 19 + live), -1, -1]),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [0, 1, 3])
def test_verify_rows_fold_what_is_pending_once_and_run_their_drafts_for_outputs(
    most: int, kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    rows = verify_case(most)
    layer = Layer(kind, rows.num_tokens, dtype)
    for x in layer.inputs:
        x[~rows.filled.flatten()] = NAN
    bank = layer.bank(25)
    bank[10:] = NAN
    rings = [
        strided_bank(most + 2, (2, most, *shape), dtype)
        for shape in (layer.decay_shape, (layer.heads,))
    ]
    old = layer.random(rows.num_rows, most, layer.channels).to(dtype)
    stale = torch.arange(most) >= torch.where(rows.seats >= 0, rows.pending, 0)[:, None]
    old[stale] = NAN
    for ring in rings:
        for row in range(most + 1):
            ring[rows.seats[row], rows.parity[row]][stale[row]] = NAN
    pending = layer.split(old)
    made = []
    for op in (delta_verify, None):
        log = replace(rows, written=WriteLog())
        state, r_decay, r_beta = bank_copy(bank), *(bank_copy(r) for r in rings)
        named = dict(
            pending=pending, gate=layer.gate, bank=state, ring_decay=r_decay, ring_beta=r_beta,
            rows=log,
        )  # fmt: skip
        if op is None:
            o = run("delta_verify", device, *layer.inputs, **named)
        else:
            o = op(*layer.inputs, **named)
        made.append((o, state, (r_decay, r_beta), log.written.agreed()))
    (o, state, left, report), (o_found, state_found, left_found, report_found) = made
    torch.testing.assert_close(o_found, o, **within("tokens", dtype))
    assert not o_found[~rows.filled.flatten()].any()
    compare_banks(state_found, state, bank, "tokens")
    assert report_found == report
    for row in range(most + 1):
        at = int(rows.seats[row]), 1 - int(rows.parity[row]), slice(int(rows.num_drafts[row]))
        for a, b in zip(left_found, left, strict=True):
            assert equal_bytes(a[at], b[at])


@pytest.mark.parametrize(
    ("kind", "dtype", "export"),
    [
        *((kind, dtype, export) for kind in KINDS for dtype in DTYPES for export in (1, 2, 3)),
        *((kind, torch.bfloat16, 2) for kind in PUBLISHED),
    ],
)
def test_speculation_gives_the_bytes_of_plain_decode(
    kind: str, dtype: torch.dtype, export: int, device: torch.device
) -> None:
    """Two drafts pending, the certain token, two drafts: as five tokens one by one."""
    most, layer = 2, Layer(kind, 5, dtype)
    plain = layer.bank(7)
    plain[1:] = NAN
    outputs = []
    for n in range(5):
        one = [x[n : n + 1] for x in layer.inputs]
        rows = make_rows([1], [n], [n + 1])
        outputs.append(run("delta_decode", device, *one, gate=layer.gate, bank=plain, rows=rows))
    bank = layer.bank(7)
    bank[1:] = NAN
    ring_decay, ring_beta = (
        strided_bank(1, (2, most, *x.shape[1:]), dtype) for x in (layer.decay, layer.beta)
    )
    ring_decay[0, 0], ring_beta[0, 0] = layer.decay[:2], layer.beta[:2]
    rows = VerifyRows(
        width=most + 1, state_in=ints([0]), state_out=ints([0]), base=ints([0]), pending=ints([2]),
        num_drafts=ints([2]), parity=ints([0]), seats=ints([0]),
        export_end=ints([export]), export_slot=ints([1]),
    )  # fmt: skip
    o = run(
        "delta_verify", device, *(x[2:] for x in layer.inputs),
        pending=tuple(x[None, :2] for x in layer.qkv), gate=layer.gate, bank=bank,
        ring_decay=ring_decay, ring_beta=ring_beta, rows=rows,
    )  # fmt: skip
    assert equal_bytes(o, torch.cat(outputs[2:]))
    for slot, n in ((0, 3), (1, export)):
        assert equal_bytes(bank[slot], plain[n])
    assert equal_bytes(ring_decay[0, 1], layer.decay[3:])
    assert equal_bytes(ring_beta[0, 1], layer.beta[3:])
    assert rows.written.agreed() == {(0, 3), (1, export)}
