"""Verify rows against plain decode: slots, pages and logits are the same, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from random import Random

import pytest
import torch

from millpond.ops.batch import WriteLog
from tests.support.batches import Bench
from tests.support.oracle import Tiny, random_ids

PROMPT = 100  # the runs cross the page at 128
WRONG = 251  # no random text holds it


@dataclass(frozen=True)
class Plain:
    """One-by-one decode of a text after its prompt."""

    ids: list[int]
    logits: dict[int, torch.Tensor]  # by position
    slots: dict[int, torch.Tensor]  # bytes, by end
    bench: Bench


@pytest.fixture(scope="module")
def plain(make_tiny: Callable[[str], Tiny]) -> Callable[[Tiny], Plain]:
    """Of every tiny model, decoded once."""
    made: dict[str, Plain] = {}

    def of(tiny: Tiny) -> Plain:
        if tiny.kind not in made:
            made[tiny.kind] = decoded(tiny, random_ids(PROMPT + 90, 21))
        return made[tiny.kind]

    return of


class Speculating:
    """One seat that verifies drafts, most of them right, beside a plain run of the same text."""

    def __init__(self, tiny: Tiny, plain: Plain, num_drafts: int) -> None:
        self.tiny = tiny
        self.plain = plain
        self.bench = tiny.bench(num_drafts=num_drafts)
        self.bench.hidden([self.bench.row(0, 0, plain.ids[:PROMPT], None, 0)])
        self.base, self.pending, self.parity, self.slot = PROMPT, 0, 0, 0

    def step(
        self, drafts: int, right: int, *, fresh: bool = False, look_at_pages: bool = False
    ) -> None:
        """Verify `drafts` drafts, of which the first `right` are the text's own."""
        at = self.base + self.pending
        tokens = self.plain.ids[at : at + 1 + drafts]
        tokens[1 + right :] = [WRONG] * (drafts - right)
        out = 1 - self.slot if fresh else self.slot
        row = self.bench.verify_row(
            0, self.base, self.pending, tokens, self.slot, out, parity=self.parity
        )
        (logits,) = self.bench.logits(verify=[row])
        assert len(logits) == 1 + drafts
        for place in range(1 + right):
            assert torch.equal(logits[place], self.plain.logits[at + place]), (at, place)
        self.base, self.pending, self.parity, self.slot = at + 1, right, 1 - self.parity, out
        kept = self.bench.arenas.slots.storage[self.slot]
        assert torch.equal(kept, self.plain.slots[self.base]), self.base
        if look_at_pages:
            self.same_pages()

    def same_pages(self) -> None:
        """What both runs keep of all tokens known to be the text's own, draft layer included."""
        end = self.base + self.pending
        for tensor in self.bench.arenas.pages.spec.tensors:
            ours, theirs = (
                bench.entries(tensor.layer, tensor.name, 0, end)
                for bench in (self.bench, self.plain.bench)
            )
            assert torch.equal(ours, theirs), (tensor.layer, tensor.name)


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_every_acceptance_after_every_other_equals_plain_decode(
    num_drafts: int, tiny: Tiny, plain: Callable[[Tiny], Plain]
) -> None:
    pairs = product(range(num_drafts + 1), repeat=2)
    run = Speculating(tiny, plain(tiny), num_drafts)
    for step, right in enumerate(right for pair in pairs for right in pair):
        run.step(num_drafts, right, fresh=step % 3 == 1)
    run.same_pages()


@pytest.mark.parametrize("num_drafts", [2, 5, 7])
def test_any_number_of_drafts_equals_plain_decode(
    num_drafts: int, tiny: Tiny, plain: Callable[[Tiny], Plain]
) -> None:
    """Steps with all drafts, with fewer, and with none."""
    run, dice = Speculating(tiny, plain(tiny), num_drafts), Random(num_drafts)
    while run.base + run.pending + 2 * num_drafts < len(run.plain.ids):
        drafts = dice.choice((0, num_drafts, dice.randint(0, num_drafts)))
        run.step(drafts, dice.choice((drafts, dice.randint(0, drafts))), fresh=dice.random() < 0.3)
    assert run.base > 128
    run.same_pages()


def test_an_export_is_written_where_the_folded_tokens_pass_it(
    tiny: Tiny, plain: Callable[[Tiny], Plain]
) -> None:
    """Three drafts are pending: the ends before, at the row's own end, and beyond are not alike."""
    text, most = plain(tiny), 3
    ends = range(PROMPT, PROMPT + most + 3)
    bench = tiny.bench(num_drafts=most, num_seats=len(ends), num_slots=2 * len(ends))
    seats = range(len(ends))
    bench.hidden([bench.row(seat, 0, text.ids[:PROMPT], None, seat) for seat in seats])
    first = text.ids[PROMPT : PROMPT + 1 + most]
    bench.hidden(verify=[bench.verify_row(seat, PROMPT, 0, first, seat, seat) for seat in seats])
    rest = text.ids[PROMPT + 1 + most : PROMPT + 3 + most]
    bench.hidden(
        verify=[
            bench.verify_row(
                seat,
                PROMPT + 1,
                most,
                rest,
                seat,
                seat,
                parity=1,
                export=(PROMPT + 1 + offset, len(ends) + seat),
            )
            for seat, offset in enumerate(range(len(ends)))
        ]
    )
    agreed = last_written(bench).agreed()
    own = {(seat, most + 1) for seat in seats}
    assert agreed == own | {(len(ends) + offset, offset) for offset in range(1, most + 2)}
    storage = bench.arenas.slots.storage
    for offset in range(len(ends)):
        exported = storage[len(ends) + offset]
        if 1 <= offset <= most + 1:
            assert torch.equal(exported, text.slots[PROMPT + 1 + offset]), offset
        else:
            assert (exported == 0xFF).all(), "nothing was to be written"
        assert torch.equal(storage[offset], text.slots[PROMPT + 2 + most])


def test_a_mixed_batch_gives_each_row_what_it_gets_alone(
    tiny: Tiny, plain: Callable[[Tiny], Plain]
) -> None:
    """A prompt, a decoding row, and verify rows of unlike progress, one of them of no seat."""
    text, most = plain(tiny), 3
    prompt = random_ids(150, 22)
    one = tiny.bench()
    (prompt_alone,) = one.logits([one.row(0, 0, prompt, None, 0)])
    bench = tiny.bench(num_drafts=most, num_seats=4)
    for seat in (1, 2, 3):
        bench.hidden([bench.row(seat, 0, text.ids[:PROMPT], None, seat)])
    drafts = text.ids[PROMPT : PROMPT + 1 + most]
    bench.hidden(verify=[bench.verify_row(3, PROMPT, 0, drafts, 3, 3)])
    at = PROMPT + 1 + 2  # of seat 3: two of its drafts were accepted
    got = bench.logits(
        [bench.row(0, 0, prompt, None, 0, [(64, 5)])],
        [bench.row(1, PROMPT, text.ids[PROMPT : PROMPT + 2], 1, 4)],
        [
            bench.verify_row(2, PROMPT, 0, [text.ids[PROMPT], WRONG], 2, 2),
            bench.verify_row(-1, 0, 0, [WRONG], -1, -1),
            bench.verify_row(3, PROMPT + 1, 2, text.ids[at : at + 4], 3, 6, parity=1),
        ],
    )
    assert torch.equal(got[0], prompt_alone)
    assert torch.equal(got[1], rows_of(text, range(PROMPT, PROMPT + 2)))
    assert torch.equal(got[2][0], text.logits[PROMPT])
    assert torch.equal(got[4], rows_of(text, range(at, at + 4)))
    storage = bench.arenas.slots.storage
    for slot, end in ((4, PROMPT + 2), (2, PROMPT + 1), (6, at + 1)):
        assert torch.equal(storage[slot], text.slots[end]), slot
    assert torch.equal(storage[3], text.slots[PROMPT + 1]), "a slot that is only read stays"


def test_every_layer_reports_what_a_verify_row_wrote(
    tiny: Tiny, plain: Callable[[Tiny], Plain]
) -> None:
    run = Speculating(tiny, plain(tiny), 3)
    run.step(3, 2)
    run.step(3, 0, fresh=True)
    written = last_written(run.bench)
    assert len(written.entries) == 2 * len(tiny.linear_layers) + 1
    assert written.agreed() == {(1, 3)}


def test_drafts_after_a_verify_row_are_those_after_plain_decode(
    tiny: Tiny, plain: Callable[[Tiny], Plain]
) -> None:
    """A chain's hidden, pages and tails are the same, whatever drafts were rejected before it."""
    text, most = plain(tiny), 5
    for right in range(most + 1):
        run = Speculating(tiny, text, most)
        run.step(most, right)
        at = run.base + run.pending
        other = tiny.bench(num_drafts=most)
        other.hidden([other.row(0, 0, text.ids[:PROMPT], None, 0)])
        (hidden,) = other.hidden(decode=[other.row(0, PROMPT, text.ids[PROMPT:at], 0, 0)])
        token = text.ids[at : at + 1]
        ours, _ = run.bench.draft([0], [at], token, hidden[-1:])
        theirs, _ = other.draft([0], [at], token, hidden[-1:])
        assert torch.equal(ours, theirs), right


def test_a_wrong_ring_shows(tiny: Tiny, plain: Callable[[Tiny], Plain]) -> None:
    """Each ring by itself: else no test here sees what it holds."""
    linear = tiny.linear_layers[0]
    rings = [(linear, name) for name in ("ring_conv", "ring_decay", "ring_beta")]
    for layer, name in (*rings, (-1, "ring_hidden")):
        run = Speculating(tiny, plain(tiny), 2)
        run.step(2, 2)
        run.bench.arenas.seats.view(layer, name)[0, run.parity, 1] += 0.5
        with pytest.raises(AssertionError):
            run.step(0, 0, look_at_pages=True)  # `ring_hidden` alone shows only there


def decoded(tiny: Tiny, ids: list[int]) -> Plain:
    """In place, from the end of the prompt to the end of the text."""
    bench = tiny.bench()
    bench.hidden([bench.row(0, 0, ids[:PROMPT], None, 0)])
    logits, slots = {}, {}
    for at in range(PROMPT, len(ids)):
        (row,) = bench.logits(decode=[bench.row(0, at, ids[at : at + 1], 0, 0)])
        logits[at] = row[0]
        slots[at + 1] = bench.arenas.slots.storage[0].clone()
    return Plain(ids, logits, slots, bench)


def last_written(bench: Bench) -> WriteLog:
    assert bench.last is not None
    assert bench.last.verify is not None
    return bench.last.verify.written


def rows_of(text: Plain, positions: Iterable[int]) -> torch.Tensor:
    return torch.stack([text.logits[at] for at in positions])
