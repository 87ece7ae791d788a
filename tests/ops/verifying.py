"""One slot under plain decode and under speculation: layers, rows, and what they leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from millpond.ops.batch import VerifyRows
from millpond.ops.reference import verify
from millpond.ops.reference.conv import conv_decode
from millpond.ops.reference.delta import Gate, delta_decode
from millpond.ops.reference.slots import boundary_store
from tests.ops.batches import ints, make_rows, strided_bank

DTYPES = [torch.float32, torch.bfloat16]
WIDTH, HIDDEN = 4, 12  # of the convolution, of the final hidden vector
NAN = float("nan")

Tokens = dict[str, torch.Tensor]
"""Raw inputs by name, [tokens, ...] each: `x` (channels), `decay`, `beta`, `hidden`."""


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
