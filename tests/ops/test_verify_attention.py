"""Verify rows among others: what their queries attend to, the pools they leave, what they draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from millpond.ops.batch import ForwardBatch, VerifyRows
from millpond.ops.reference import sampling
from millpond.ops.reference.attention import paged_gqa, paged_mla
from millpond.ops.reference.indexer import pool_keys, select
from tests.ops.batches import PAGE, ints, make_batch, make_rows, strided_bank
from tests.ops.verifying import DTYPES, NAN, same

pytestmark = pytest.mark.usefixtures("one_thread")

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
