"""Speculation on one slot against plain decode, byte by byte: states, windows, vectors, outputs.

Sequences of true tokens are folded one by one by the per-token ops; verify rows fold the same
tokens with drafts that are right up to a chosen place and wrong after it. Everything that no one
may read holds NaN: free slots, rings, padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from millpond.ops.batch import ForwardBatch, VerifyRows
from millpond.ops.reference import sampling, verify
from millpond.ops.reference.attention import paged_gqa, paged_mla
from millpond.ops.reference.conv import conv_decode
from millpond.ops.reference.delta import Gate, delta_decode
from millpond.ops.reference.indexer import pool_keys, select
from millpond.ops.reference.slots import boundary_store
from tests.ops.batches import PAGE, ints, make_batch, make_rows, strided_bank

KINDS = ["gdn", "kda"]
DTYPES = [torch.float32, torch.bfloat16]
WIDTH, HIDDEN = 4, 12  # of the convolution, of the final hidden vector
NAN = float("nan")

Tokens = dict[str, torch.Tensor]
"""Raw inputs by name, [tokens, ...] each: `x` (channels), `decay`, `beta`, `hidden`."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bytes: a zero has a sign, and a NaN equals itself."""
    return a.dtype == b.dtype and torch.equal(raw(a), raw(b))


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


class Layer:
    """Weights and shapes of one layer. GDN has a scalar decay and fewer key heads, KDA neither."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.made = torch.Generator().manual_seed(7)
        self.key_heads, self.heads, self.k_dim, self.v_dim = (
            (2, 4, 8, 12) if kind == "gdn" else (3, 3, 16, 8)
        )
        self.sizes = (*[self.key_heads * self.k_dim] * 2, self.heads * self.v_dim)
        self.channels = sum(self.sizes)
        self.decay_shape = (self.heads,) if kind == "gdn" else (self.heads, self.k_dim)
        bias = self.heads if kind == "gdn" else self.heads * self.k_dim
        bound = None if kind == "gdn" else -5.0
        self.gate = Gate(self.random(self.heads) - 1.0, self.random(bias), bound)
        self.weight = self.random(self.channels, WIDTH)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.made)

    def tokens(self, count: int) -> Tokens:
        shapes = {
            "x": (self.channels,), "decay": self.decay_shape, "beta": (self.heads,),
            "hidden": (HIDDEN,),
        }  # fmt: skip
        return {n: self.random(count, *s).to(self.dtype) for n, s in shapes.items()}

    def split(self, mixed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads = (self.key_heads, self.key_heads, self.heads)
        parts = mixed.split(self.sizes, -1)
        return tuple(p.unflatten(-1, (h, -1)) for p, h in zip(parts, heads, strict=True))

    def banks(self, slots: int) -> Tokens:
        """What a slot holds, all NaN."""
        shapes = {
            "state": (self.heads, self.v_dim, self.k_dim), "window": (self.channels, WIDTH - 1),
            "boundary": (HIDDEN,),
        }  # fmt: skip
        return {
            name: strided_bank(slots, s, torch.float32 if name == "state" else self.dtype).fill_(
                NAN
            )
            for name, s in shapes.items()
        }

    def rings(self, seats: int, most: int) -> Tokens:
        """What a seat holds, all NaN."""
        return {
            name: strided_bank(seats, (2, most, *x.shape[1:]), self.dtype).fill_(NAN)
            for name, x in self.tokens(0).items()
        }

    def decode(self, t: Tokens, banks: Tokens, rows) -> torch.Tensor:
        y = conv_decode(t["x"], self.weight, bank=banks["window"], rows=rows)
        args = (*self.split(y), t["decay"], t["beta"])
        o = delta_decode(*args, gate=self.gate, bank=banks["state"], rows=rows)
        boundary_store(t["hidden"], bank=banks["boundary"], rows=rows)
        return o

    def verify(self, t: Tokens, banks: Tokens, rings: Tokens, rows: VerifyRows) -> torch.Tensor:
        old, new = verify.conv_verify(
            t["x"], self.weight, bank=banks["window"], ring=rings["x"], rows=rows
        )
        o = verify.delta_verify(
            *self.split(new), t["decay"], t["beta"], pending=self.split(old), gate=self.gate,
            bank=banks["state"], ring_decay=rings["decay"], ring_beta=rings["beta"], rows=rows,
        )  # fmt: skip
        verify.boundary_verify(t["hidden"], bank=banks["boundary"], ring=rings["hidden"], rows=rows)
        return o


def pick(t: Tokens, index) -> Tokens:
    return {name: x[index] for name, x in t.items()}


def joined(parts: Sequence[Tokens]) -> Tokens:
    return {name: torch.cat([p[name] for p in parts]) for name in parts[0]}


class Plain:
    """One sequence by plain decode, from zero or a given slot: everything after every token."""

    def __init__(self, layer: Layer, tokens: Tokens, start: Tokens | None = None) -> None:
        count = len(tokens["x"])
        self.tokens = tokens
        self.banks = layer.banks(count + 1)  # slot n: after n tokens
        for name, bank in self.banks.items():
            bank[0] = 0.0 if start is None else start[name]
        outputs = []
        for n in range(count):
            rows = make_rows([1], [n], [n + 1])
            outputs.append(layer.decode(pick(tokens, slice(n, n + 1)), self.banks, rows))
        self.outputs = torch.cat(outputs)

    def after(self, layer: Layer, end: int, tokens: Tokens) -> torch.Tensor:
        """Outputs of other tokens from the state with `end` on; nothing is kept."""
        rows = make_rows([len(tokens["x"])], [end], [-1])
        return layer.decode(tokens, self.banks, rows)


@dataclass
class Row:
    """A live sequence: its counters as a seat keeps them, and the slot it stands in."""

    plain: Plain
    seat: int
    slot: int
    base: int = 0
    pending: int = 0
    parity: int = 0


@dataclass(frozen=True)
class Ask:
    """One row of one step: how many drafts, how many are right, where it writes and exports."""

    row: Row | None  # None: a padding row
    num_drafts: int = 0
    right: int = 0
    out: int = -1
    export: tuple[int, int] = (-1, -1)  # end, slot


class Speculation:
    """Verify steps over some rows, checked against each row's plain decode after every step."""

    def __init__(self, layer: Layer, most: int, slots: int, seats: int) -> None:
        self.layer, self.most = layer, most
        self.banks = layer.banks(slots)
        self.rings = layer.rings(seats, most)

    def rows(self, asks: Sequence[Ask]) -> VerifyRows:
        live = [a.row or Row(None, -1, -1) for a in asks]  # type: ignore[arg-type]
        return VerifyRows(
            width=self.most + 1,
            state_in=ints([r.slot for r in live]),
            state_out=ints([a.out for a in asks]),
            base=ints([r.base for r in live]),
            pending=ints([r.pending for r in live]),
            num_drafts=ints([a.num_drafts for a in asks]),
            parity=ints([r.parity for r in live]),
            seats=ints([r.seat for r in live]),
            export_end=ints([a.export[0] for a in asks]),
            export_slot=ints([a.export[1] for a in asks]),
        )

    def inputs(self, ask: Ask) -> Tokens:
        """`first`, right drafts, wrong drafts; padding is NaN."""
        count = self.most + 1
        t = {name: torch.full_like(x, NAN) for name, x in self.layer.tokens(count).items()}
        if ask.row is not None:
            first = ask.row.base + ask.row.pending
            wrong = self.layer.tokens(count)
            for name, x in t.items():
                known = ask.row.plain.tokens[name][first : first + ask.right + 1]
                x[: ask.right + 1] = known
                guessed = slice(ask.right + 1, ask.num_drafts + 1)
                x[guessed] = wrong[name][guessed]
        return t

    def step(self, asks: Sequence[Ask]) -> VerifyRows:
        rows = self.rows(asks)
        parts = [self.inputs(a) for a in asks]
        before = {name: bank.clone() for name, bank in self.banks.items()}
        hidden = verify.hidden_before_verify(
            joined(parts)["hidden"], bank=self.banks["boundary"], ring=self.rings["hidden"],
            rows=rows,
        )  # fmt: skip
        o = self.layer.verify(joined(parts), self.banks, self.rings, rows)
        self.check(asks, parts, before, o, hidden, rows)
        for ask in asks:
            if ask.row is not None:
                row = ask.row
                row.base, row.pending = row.base + row.pending + 1, ask.right
                row.parity, row.slot = 1 - row.parity, ask.out
        return rows

    def check(self, asks, parts, before, o, hidden, rows) -> None:
        expected = {name: bank.clone() for name, bank in before.items()}
        written = set()
        width = self.most + 1
        for i, ask in enumerate(asks):
            own = slice(i * width, (i + 1) * width)
            if ask.row is None:
                assert not o[own].any()
                continue
            row, plain = ask.row, ask.row.plain
            first, used = row.base + row.pending, ask.num_drafts + 1
            for end, slot in ((first + 1, ask.out), ask.export):
                if slot >= 0 and row.base < end <= first + 1:
                    written.add((slot, end - row.base))
                    for name, bank in expected.items():
                        bank[slot] = plain.banks[name][end]
            known = pick(parts[i], slice(0, used))
            assert same(o[own][:used], plain.after(self.layer, first, known))
            assert same(o[own][: ask.right + 1], plain.outputs[first : first + ask.right + 1])
            assert not o[own][used:].any()
            assert same(hidden[own][0], plain.banks["boundary"][first])
            assert same(hidden[own][1:used], known["hidden"][:-1])
        for name, bank in self.banks.items():
            assert same(bank, expected[name]), name
        assert rows.written.agreed() == written


def rows_of(layer: Layer, count: int, tokens: int) -> list[Row]:
    """Rows from nothing; seats are not in the order of rows, and slot ids not those of seats."""
    return [
        Row(Plain(layer, layer.tokens(tokens)), seat=2 * (count - i) - 1, slot=-1)
        for i in range(count)
    ]


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


# Attention, pooled keys and selection: a verify row is (first position, drafts of `most`).


def with_verify(
    rows: Sequence[tuple[int, int]],
    most: int,
    *,
    tables: Sequence[Sequence[int]],
    seats: Sequence[int],
    prefill: Sequence[tuple[int, int]] = (),
    decode: Sequence[tuple[int, int]] = (),
) -> ForwardBatch:
    """As the runtime makes it: `ends` are bounds, padding has page -1 and a senseless position."""
    width, others = most + 1, len(prefill) + len(decode)
    plain = make_batch(
        prefill, [*decode, *((first, width) for first, _ in rows)], tables=tables, seats=seats
    )
    verified = VerifyRows(
        width=width,
        state_in=ints([-1] * len(rows)),
        state_out=ints([-1] * len(rows)),
        base=ints([first for first, _ in rows]),
        pending=ints([0] * len(rows)),
        num_drafts=ints([n for _, n in rows]),
        parity=ints([0] * len(rows)),
        seats=ints(seats[others:]),
        export_end=ints([-1] * len(rows)),
        export_slot=ints([-1] * len(rows)),
    )
    filled = torch.cat(
        (
            torch.ones(len(plain.positions) - width * len(rows), dtype=torch.bool),
            verified.filled.flatten(),
        )
    )
    ends = [first + n + 1 for first, n in rows]
    return replace(
        plain,
        decode=make_rows([n for _, n in decode]),
        verify=verified,
        positions=torch.where(filled, plain.positions, 1 << 40),
        token_page=torch.where(filled, plain.token_page, -1),
        row_end=torch.cat((plain.row_end[:others], ints(ends))),
    )


@pytest.mark.parametrize("kind", ["gqa", "mla", "indexed"])
def test_verify_queries_attend_like_single_ones_among_rows_of_every_form(kind: str) -> None:
    most = 3
    prefill, decode = [(64, 70)], [(100, 1)]
    rows = [(61, 3), (0, 3), (130, 0), (126, 2), (5, 3)]
    tables = [[0, 1, 2], [3, 4], [5, 6], [7], [8, 9, 10], [11, 12, 13], [-1, -1]]
    seats = [0, 1, 2, 3, 4, 5, -1]
    batch = with_verify(rows, most, tables=tables, seats=seats, prefill=prefill, decode=decode)
    tokens = len(batch.positions)
    torch.manual_seed(5)
    q, head_weights = torch.randn(tokens, 4, 16), torch.randn(tokens, 4)
    pages = torch.randn(14, 2, PAGE, 16)
    for table, first, drafts in zip(tables[2:], *zip(*rows, strict=True), strict=True):
        for page, start in zip(table, range(0, 999, PAGE), strict=False):
            pages[page, :, max(first + drafts + 1 - start, 0) :] = NAN  # nothing was written there
    padding = batch.token_page < 0
    assert padding.sum() == 3 + 1 + 4
    q[padding] = NAN

    def attend(batch: ForwardBatch, at: torch.Tensor) -> torch.Tensor:
        if kind == "gqa":
            return paged_gqa(q[at], pages, pages * 2, batch=batch, scale=0.25)
        latents, selected = pages[:, 0], None
        if kind == "indexed":
            selected = select(
                q[at], head_weights[at], pooled_pages=latents[:, 3::4], batch=batch, pool=4,
                top_k=16, scale=0.25,
            )  # fmt: skip
        return paged_mla(q[at], latents, batch=batch, scale=0.25, selected=selected)

    found = attend(batch, torch.arange(tokens))
    assert not found[padding].any()
    alone = attend(
        make_batch(prefill, decode, tables=tables[:2], seats=seats[:2]), torch.arange(71)
    )
    assert same(found[:71], alone)
    for index in range(71, tokens):
        if not padding[index]:
            row, position = int(batch.token_row[index]), int(batch.positions[index])
            single = make_batch((), [(position, 1)], tables=[tables[row]])
            assert same(found[index], attend(single, ints([index]))[0])


POOL, TOP_K, DIM, INDEX_HEADS = 4, 16, 8, 16


class Indexed:
    """Raw keys and gates of one sequence, its pages and its seat's tail of `size` entries."""

    def __init__(self, size: int, dtype: torch.dtype, length: int = 180) -> None:
        torch.manual_seed(11)
        self.dtype = dtype
        self.key, self.gate = torch.randn(2, length, DIM).to(dtype)
        self.query = torch.randn(length, INDEX_HEADS, DIM).to(dtype)
        self.weights = torch.randn(length, INDEX_HEADS)
        self.bias = torch.randn(POOL, DIM).to(dtype)
        self.pages = strided_bank(5, (PAGE // POOL, DIM), dtype).fill_(NAN)
        self.tails = strided_bank(3, (size, 2, DIM), dtype).fill_(NAN)
        self.made = torch.Generator().manual_seed(size)

    TABLE, SEAT = (3, 1, 4), 1

    def guess(self, count: int) -> torch.Tensor:
        return torch.randn(count, DIM, generator=self.made).to(self.dtype)

    def fold(
        self, batch: ForwardBatch, key: torch.Tensor, gate: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        """Pool, then select for queries `at`; what all see counts as selected."""
        pool_keys(key, gate, self.bias, pooled_pages=self.pages, tails=self.tails, batch=batch)
        chosen = select(
            self.query[at], self.weights[at], pooled_pages=self.pages, batch=batch, pool=POOL,
            top_k=TOP_K, scale=0.3,
        )  # fmt: skip
        if chosen is None:
            chosen = torch.arange(PAGE * 3) <= batch.positions[:, None]
        return torch.nn.functional.pad(chosen, (0, PAGE * 3 - chosen.shape[1]))

    def plain(self, **form: Sequence[tuple[int, int]]) -> torch.Tensor:
        batch = make_batch(**form, tables=[self.TABLE], seats=[self.SEAT])
        at = batch.positions
        return self.fold(batch, self.key[at], self.gate[at], at)

    def verified(self, first: int, drafts: int, right: int, most: int) -> torch.Tensor:
        """Selections of `first` and its right drafts; the drafts after those are wrong."""
        batch = with_verify([(first, drafts)], most, tables=[self.TABLE], seats=[self.SEAT])
        at = torch.arange(first, first + most + 1)
        key, gate = self.key[at], self.gate[at]
        for x in (key, gate):
            x[right + 1 :] = self.guess(most - right)
            x[drafts + 1 :] = NAN
        return self.fold(batch, key, gate, at)[: right + 1]

    def chain(self, first: int, count: int) -> None:
        """What a draft layer leaves while it proposes: guesses at the next positions, singly."""
        for position in range(first, first + count):
            batch = make_batch((), [(position, 1)], tables=[self.TABLE], seats=[self.SEAT])
            pool_keys(
                self.guess(1), self.guess(1), self.bias, pooled_pages=self.pages,
                tails=self.tails, batch=batch,
            )  # fmt: skip


@pytest.mark.parametrize("most", [1, 3, 5, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("proposes", [False, True], ids=["target", "draft layer"])
def test_pools_that_rejected_drafts_completed_are_written_anew(
    dtype: torch.dtype, most: int, proposes: bool
) -> None:
    size = -(-(POOL + most) // POOL) * POOL
    plain, run = Indexed(POOL, dtype), Indexed(size, dtype)
    prompt, at, step = 21, 21, 0
    plain.plain(prefill=[(0, prompt)])
    run.plain(prefill=[(0, prompt)])
    undone = 0
    while at + 2 * most + 2 < len(run.key):
        drafts = {3: 0, 5: most // 2}.get(step % 8, most)
        right = min((step * 3) % (most + 1), drafts)
        undone += (at + drafts + 1) // POOL > (at + right + 1) // POOL
        chosen = run.verified(at, drafts, right, most)
        expected = torch.cat([plain.plain(decode=[(at + n, 1)]) for n in range(right + 1)])
        assert torch.equal(chosen, expected)
        at, step = at + right + 1, step + 1
        if proposes:
            run.chain(at, most)
        count = at // POOL
        pooled = (x.pages[list(x.TABLE)].flatten(0, 1)[:count] for x in (plain, run))
        assert same(*pooled)
    assert undone > 3
    assert run.tails[[0, 2]].isnan().all()
    assert run.pages[[0, 2]].isnan().all()


def test_a_row_drawn_at_once_is_the_row_drawn_token_by_token() -> None:
    """Penalties count the drafts before a place; endings are barred by position."""
    vocab, prompt, most = 12, 5, 4
    torch.manual_seed(3)
    logits, drafts = torch.randn(2, most + 1, vocab), torch.randint(vocab, (2, most))
    generated = torch.randint(0, 3, (2, vocab), dtype=torch.int32)
    ending, until = 7, prompt + 3
    logits[1, :, ending] += 50.0

    def rows(count: int, generated: torch.Tensor, position: torch.Tensor) -> sampling.SamplingRows:
        def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((count,), value, dtype=dtype)

        return sampling.SamplingRows(
            temperature=full(1.0), top_k=full(0, torch.int64), top_p=full(1.0), min_p=full(0.0),
            seed=full(9, torch.int64), sample_index=full(0, torch.int64), position=position,
            repetition=full(1.3), presence=full(0.7), frequency=full(0.9),
            generated=generated, in_prompt=torch.zeros(count, vocab, dtype=torch.bool),
            bias_row=ints([]), bias_token=ints([]), bias_value=torch.empty(0),
            forbidden_row=torch.arange(count), forbidden_token=ints([ending] * count),
            forbidden_until=ints([until] * count),
            any_filter=False, any_penalty=True, any_noise=True,
        )  # fmt: skip

    position = torch.stack((torch.arange(most + 1) + prompt, torch.arange(most + 1) + prompt + 1))
    counts = sampling.counts_before(generated, drafts)
    made = rows(2 * (most + 1), counts.flatten(0, 1), position.flatten())
    drawn = sampling.sample(logits.flatten(0, 1), made).token.view(2, -1)
    for row in range(2):
        seen = generated[row].clone()
        for place in range(most + 1):
            assert torch.equal(counts[row, place], seen)
            at = position[row, place][None]
            token = sampling.sample(logits[row, place][None], rows(1, seen[None], at)).token
            assert token == drawn[row, place]
            assert token != ending or at >= until
            assert row == 0 or (token == ending) == (at >= until)
            if place < most:
                seen[drafts[row, place]] += 1


def test_accepted_are_the_leading_drafts_that_were_drawn() -> None:
    drafts = ints([1, 2, 3]).repeat(6, 1)
    tokens = torch.tensor(
        [[1, 2, 3, 9], [1, 2, 3, 9], [1, 9, 3, 9], [9, 2, 3, 9], [1, 2, 9, 9], [1, 2, 3, 9]]
    )
    counts = sampling.count_accepted(tokens, drafts, ints([3, 2, 3, 3, 3, 0]))
    assert counts.tolist() == [3, 2, 1, 0, 2, 0]
    assert sampling.count_accepted(tokens[:, :1], drafts[:, :0], ints([0] * 6)).tolist() == [0] * 6
