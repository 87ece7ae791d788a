"""Sampling's kernels against the reference: the hash bit for bit, filters, ties, broken rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millpond.ops.reference import sampling as reference
from millpond.ops.reference.sampling import SamplingRows
from tests.ops.test_sampling import Ask, rows_of
from tests.ops.triton.layers import poisoned
from tests.ops.triton.side_by_side import moved

kernels = pytest.importorskip("millpond.ops.triton.sampling")
triton = pytest.importorskip("triton")
tl = triton.language
pytestmark = pytest.mark.usefixtures(poisoned.__name__)

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF, -987654321]


@triton.jit
def noise_of_rows(
    seed, sample_index, position, bits, noise, first_token, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    h = kernels.noise_hash(
        tl.load(seed + row), tl.load(sample_index + row), tl.load(position + row),
        first_token + lane,
    )  # fmt: skip
    tl.store(bits + row * BLOCK + lane, h.to(tl.int64))
    tl.store(noise + row * BLOCK + lane, kernels.gumbel(h))


@pytest.mark.parametrize("first", [0, 248_000])
def test_the_hash_is_the_references_bit_for_bit(first: int, device: torch.device) -> None:
    keys = [
        torch.tensor(SEEDS),
        torch.tensor([0, 1, 2, 3, 2**31, 7, 0]),
        torch.tensor([0, 131_071, 5, 2**32 + 5, 9, 1_048_575, 64]),
    ]
    count, block = len(SEEDS), 256
    bits = torch.zeros(count, block, dtype=torch.int64, device=device)
    noise = torch.zeros(count, block, device=device)
    noise_of_rows[(count,)](*[k.to(device) for k in keys], bits, noise, first, BLOCK=block)
    a, b = reference.noise_keys(*keys)
    token = torch.arange(first, first + block)
    h = (reference.multiply32(token, reference.TOKEN_STRIDE) + a[:, None]) & reference.MASK32
    h = reference.mix32(reference.mix32(h) ^ b[:, None])
    assert torch.equal(bits.cpu(), h)
    expected = reference.gumbel(*keys, block, first_token=first)
    torch.testing.assert_close(noise.cpu(), expected, atol=4e-6, rtol=4e-6)


def drawn(
    logits: torch.Tensor, rows: SamplingRows, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    found = kernels.sample(logits.to(device), moved(rows, device))
    return found.token.cpu(), found.finite.cpu()


ASKS = [
    Ask(temperature=0.0),
    Ask(temperature=0.7),
    Ask(top_k=5),
    Ask(top_k=1, temperature=2.0),
    Ask(top_p=0.6),
    Ask(top_p=0.05),
    Ask(top_p=0.0),
    Ask(min_p=0.2),
    Ask(top_k=20, top_p=0.8, min_p=0.05, temperature=1.3),
    Ask(top_k=1000, top_p=0.95),
    Ask(top_k=7, repetition=1.5, presence=0.5, frequency=0.25, bias=((3, 4.0),), forbidden=(4,)),
]


def test_draws_equal_the_references(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FILTERED", 256)  # two looks, the second with a tail
    monkeypatch.setattr(kernels, "DRAWN", 128)
    made = torch.Generator().manual_seed(5)
    asks = [replace(a, seed=97 * i, position=i) for i, a in enumerate(ASKS)]
    logits = torch.randn(len(asks), 301, generator=made) * 2
    rows = rows_of(*asks, vocab=301)
    token, finite = drawn(logits, rows, device)
    assert torch.equal(token, reference.sample(logits, rows).token)
    assert finite.all()
    row = 8  # the same alone
    alone, _ = drawn(logits[row : row + 1], rows_of(asks[row], vocab=301), device)
    assert alone[0] == token[row]


def test_the_noise_decides_as_in_the_reference(device: torch.device) -> None:
    asks = [Ask(temperature=3.0, seed=seed, position=9, counts=(), prompt=()) for seed in SEEDS * 3]
    logits = torch.randn(len(asks), 60, generator=torch.Generator().manual_seed(2))
    rows = rows_of(*asks, vocab=60)
    token, _ = drawn(logits, rows, device)
    assert torch.equal(token, reference.sample(logits, rows).token)


def left(scores: torch.Tensor, asks: list[Ask], device: torch.device) -> list[set[int]]:
    """The tokens that each row's filters leave, by the cuts and by the reference's own filter."""
    plain = [replace(ask, counts=(), prompt=()) for ask in asks]
    rows = rows_of(*plain, vocab=scores.shape[1])
    tops, cuts = (x.cpu() for x in kernels.filter_cuts(scores.to(device), moved(rows, device)))
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int32).long() & 0xFFFFFFFF
    rank = torch.where(bits >= 2**31, 0xFFFFFFFF - bits, bits + 2**31)
    at, last = cuts[:, :1], cuts[:, 1:]
    enough = torch.exp(scores - tops[:, None]) >= rows.min_p[:, None]
    kept = enough & ((rank > at) | ((rank == at) & (torch.arange(scores.shape[1]) <= last)))
    expected = reference.filtered(scores, top_k=rows.top_k, top_p=rows.top_p, min_p=rows.min_p)
    assert torch.equal(kept, expected.isfinite())
    return [set(row.nonzero().flatten().tolist()) for row in kept]


def test_of_equals_a_filter_keeps_the_lower_ids(device: torch.device) -> None:
    even, uneven = [1.0] * 8, [0.0, 1.0, 0.0, 1.0, -0.0, 1.0, 0.0, -5.0]
    wanted = [
        (even, Ask(top_k=3), {0, 1, 2}),
        (even, Ask(top_p=0.5), {0, 1, 2, 3}),
        (even, Ask(top_k=4, top_p=0.5), {0, 1}),
        (uneven, Ask(top_k=5), {0, 1, 2, 3, 5}),
        (uneven, Ask(min_p=0.3), {0, 1, 2, 3, 4, 5, 6}),
        (uneven, Ask(top_k=2, min_p=0.9), {1, 3}),
        (uneven, Ask(top_k=6, min_p=0.9), {1, 3, 5}),
        (uneven, Ask(top_p=0.0), {1}),
    ]
    scores = torch.tensor([scores for scores, _, _ in wanted])
    assert left(scores, [ask for _, ask, _ in wanted], device) == [kept for _, _, kept in wanted]


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")  # numpy's
def test_rows_that_are_not_finite_are_told_and_leave_others_alone(device: torch.device) -> None:
    logits = torch.randn(5, 70, generator=torch.Generator().manual_seed(1))
    asks = [Ask(top_k=9, top_p=0.9, seed=i, counts=(), prompt=()) for i in range(5)]
    rows = rows_of(*asks, vocab=70)
    clean, _ = drawn(logits, rows, device)
    logits[1, 69] = float("nan")
    logits[3, 0] = float("inf")
    logits[4] = float("-inf")
    token, finite = drawn(logits, rows, device)
    assert finite.tolist() == [True, False, True, False, False]
    assert token[[0, 2]].tolist() == clean[[0, 2]].tolist()
    assert token[1] == 0
    assert ((token >= 0) & (token < 70)).all()
    assert drawn(logits[:0], rows_of(vocab=70), device)[0].shape == (0,)


def test_a_row_that_may_draw_some_tokens_only_draws_one_of_them(device: torch.device) -> None:
    logits = torch.zeros(2, 40)
    rows = rows_of(Ask(counts=(), prompt=()), Ask(seed=3, counts=(), prompt=()), vocab=40)
    words = torch.tensor([[0, 1 << 5]], dtype=torch.int32)  # token 37 alone
    rows = replace(rows, allowed_row=torch.tensor([1]), allowed=words)
    token, finite = drawn(logits, rows, device)
    assert token.tolist() == reference.sample(logits, rows).token.tolist()
    assert token[1] == 37
    assert finite.all()
