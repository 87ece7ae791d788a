"""Sampling: what each parameter does, and that a row's choice depends on nothing but itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from millpond.ops.reference import sampling as ops
from tests.ops.batches import ints

VOCAB = 50


@dataclass(frozen=True)
class Ask:
    """What a row asks for; `counts` are (token, times generated), `prompt` the prompt's tokens."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0
    sample_index: int = 0
    position: int = 4
    counts: tuple[tuple[int, int], ...] = ((2, 1), (9, 1))
    prompt: tuple[int, ...] = (1, 2)
    bias: tuple[tuple[int, float], ...] = ()
    forbidden: tuple[int, ...] = ()

    @property
    def penalises(self) -> bool:
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)


def rows_of(*asks: Ask, vocab: int = VOCAB) -> ops.SamplingRows:
    def floats(name: str) -> torch.Tensor:
        return torch.tensor([getattr(a, name) for a in asks], dtype=torch.float32)

    def integers(name: str) -> torch.Tensor:
        return ints([getattr(a, name) for a in asks])

    any_penalty = any(a.penalises for a in asks)
    generated = torch.zeros(len(asks), vocab, dtype=torch.int32)
    in_prompt = torch.zeros(len(asks), vocab, dtype=torch.bool)
    for row, ask in enumerate(asks):
        for token, times in ask.counts:
            generated[row, token] = times
        in_prompt[row, list(ask.prompt)] = True
    bias = [(row, token, value) for row, a in enumerate(asks) for token, value in a.bias]
    forbidden = [(row, token) for row, a in enumerate(asks) for token in a.forbidden]
    return ops.SamplingRows(
        **{n: floats(n) for n in ("temperature", "top_p", "min_p")},
        **{n: floats(n) for n in ("repetition", "presence", "frequency")},
        **{n: integers(n) for n in ("top_k", "seed", "sample_index", "position")},
        generated=generated if any_penalty else None,
        in_prompt=in_prompt if any_penalty else None,
        bias_row=ints([b[0] for b in bias]),
        bias_token=ints([b[1] for b in bias]),
        bias_value=torch.tensor([b[2] for b in bias], dtype=torch.float32),
        forbidden_row=ints([f[0] for f in forbidden]),
        forbidden_token=ints([f[1] for f in forbidden]),
        any_filter=any(a.top_k > 0 or a.top_p < 1 or a.min_p > 0 for a in asks),
        any_penalty=any_penalty,
        any_noise=any(a.temperature > 0 for a in asks),
    )


def draw(logits: torch.Tensor, ask: Ask) -> int:
    return int(ops.sample(logits[None], rows_of(ask)).token[0])


def adjusted(logits: torch.Tensor, ask: Ask) -> torch.Tensor:
    return ops.adjusted_logits(logits[None], rows_of(ask))[0]


def random_logits(rows: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5)) * 3


def reference_hash(seed: int, sample_index: int, position: int, token: int) -> int:
    """The documented hash in Python's integers."""
    m = 0xFFFFFFFF

    def mix(h: int) -> int:
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) & m
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) & m
        return h ^ (h >> 16)

    keys = []
    for start in (0x243F6A88, 0x13198A2E):
        key = start
        for word in (seed & m, (seed >> 32) & m, sample_index & m, position & m):
            key = mix(((key ^ word) * 0x9E3779B1 + start) & m)
        keys.append(key)
    return mix(mix((token * 0x9E3779B1 + keys[0]) & m) ^ keys[1])


def test_noise_is_the_documented_hash_of_seed_sample_position_and_token() -> None:
    draws = [(0, 0, 0), (1, 0, 5), (-(2**63) + 12345, 2, 70_000), (2**40, 1, 1)]
    rows = rows_of(*(Ask(seed=s, sample_index=i, position=p) for s, i, p in draws))
    noise = ops.gumbel(rows.seed, rows.sample_index, rows.position, VOCAB)
    for row, (seed, index, position) in enumerate(draws):
        for token in (0, 1, 17, 49):
            w = min((reference_hash(seed, index, position, token) + 0.5) / 2**32, 1 - 2.0**-24)
            assert noise[row, token].item() == pytest.approx(-math.log(-math.log1p(-w)), rel=1e-4)


def test_every_part_of_the_key_changes_the_noise() -> None:
    def one(seed: int, index: int, position: int) -> torch.Tensor:
        return ops.gumbel(*(torch.tensor([v]) for v in (seed, index, position)), 64)

    base = one(1, 1, 1)
    for other in (one(2, 1, 1), one(1, 2, 1), one(1, 1, 2), one(1 + 2**32, 1, 1)):
        assert (base != other).float().mean() > 0.99
    assert torch.equal(one(1, 1, 1), base)
    sharded = ops.gumbel(*(torch.tensor([1]) for _ in range(3)), 16, first_token=48)
    assert torch.equal(sharded, base[:, 48:])


def test_drawn_tokens_follow_the_softmax_of_the_logits() -> None:
    """Chi-square over 20 000 positions; the bound is far in the tail of 11 degrees of freedom."""
    count, vocab = 20_000, 12
    logits = torch.linspace(-2, 1.5, vocab)
    ones = torch.ones(count, dtype=torch.int64)
    for temperature in (1.0, 0.5):
        noise = ops.gumbel(ones * 77, ones, torch.arange(count), vocab)
        token = ops.lowest_argmax(logits / temperature + noise)
        seen = torch.bincount(token, minlength=vocab).double()
        expected = torch.softmax(logits.double() / temperature, -1) * count
        assert ((seen - expected) ** 2 / expected).sum() < 45.0


def test_neighbouring_positions_and_seeds_are_uncorrelated() -> None:
    ones = torch.ones(4096, dtype=torch.int64)
    steps = torch.arange(4096)
    by_position = ops.gumbel(ones, ones, steps, 8)
    by_seed = ops.gumbel(steps, ones, ones, 8)
    for noise in (by_position, by_seed):
        for pair in ((noise[1:, 0], noise[:-1, 0]), (noise[:, 0], noise[:, 1])):
            assert abs(torch.corrcoef(torch.stack(pair))[0, 1].item()) < 0.08
        assert noise.mean().item() == pytest.approx(0.5772, abs=0.03)


def test_a_rows_token_does_not_depend_on_the_batch() -> None:
    kinds = (
        Ask(),
        Ask(temperature=0.0),
        Ask(top_k=5, top_p=0.8),
        Ask(repetition=1.4, presence=0.7, frequency=0.3),
        Ask(min_p=0.2, temperature=1.7),
        Ask(bias=((4, 3.0),), forbidden=(3, 7)),
    )
    asks = [
        replace(kinds[i % 6], seed=11 + i, sample_index=i % 3, position=4 + i) for i in range(24)
    ]
    vocab = 40_000
    logits = random_logits(len(asks), vocab)
    rows = rows_of(*asks, vocab=vocab)
    together = ops.sample(logits, rows).token
    backwards = ops.sample(logits.flip(0), rows_of(*asks[::-1], vocab=vocab)).token.flip(0)
    assert torch.equal(together, backwards)
    scores = ops.adjusted_logits(logits, rows)
    table = ops.token_logprobs(logits, together, 3)
    for i, ask in enumerate(asks):
        one, mine = logits[i : i + 1], rows_of(ask, vocab=vocab)
        assert ops.sample(one, mine).token[0] == together[i]
        assert torch.equal(ops.adjusted_logits(one, mine)[0], scores[i])
        for alone, theirs in zip(
            ops.token_logprobs(one, together[i : i + 1], 3), table, strict=True
        ):
            assert torch.equal(alone[0], theirs[i])


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    logits = torch.zeros(VOCAB)
    logits[[9, 30, 31]] = 2.0
    assert draw(logits, Ask(temperature=0.0)) == 9


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens() -> (
    None
):
    logits = torch.zeros(VOCAB)
    logits[[1, 2, 9, 4]] = torch.tensor([3.0, -3.0, 3.0, 3.0])
    before = logits.clone()
    assert adjusted(logits, Ask(repetition=1.5))[[1, 2, 9, 4]].tolist() == [2.0, -4.5, 2.0, 3.0]
    assert torch.equal(logits, before)


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    ask = Ask(presence=0.5, frequency=0.25, counts=((2, 2), (9, 1)))
    scores = adjusted(torch.zeros(VOCAB), ask)
    assert scores[[1, 2, 9]].tolist() == [0.0, -0.5 - 2 * 0.25, -0.5 - 0.25]
    assert scores.count_nonzero() == 2


def test_a_row_without_penalties_ignores_the_counts_of_its_neighbours_table() -> None:
    scores = ops.adjusted_logits(torch.zeros(2, VOCAB), rows_of(Ask(presence=1.0), Ask()))
    assert scores[0].any()
    assert not scores[1].any()


def test_logit_bias_is_added_and_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.zeros(VOCAB)
    logits[[3, 7]] = 9.0
    logits[21] = 5.0
    ask = Ask(temperature=0.0, bias=((20, 4.0), (20, 2.0)), forbidden=(3, 7))
    assert adjusted(logits, ask)[20] == 6.0
    assert draw(logits, ask) == 20
    assert draw(logits, replace(ask, forbidden=(3,))) == 7
    assert draw(logits, replace(ask, forbidden=())) == 3


def kept(ask: Ask, logits: torch.Tensor) -> list[int]:
    rows = rows_of(ask)
    out = ops.filtered(logits[None], top_k=rows.top_k, top_p=rows.top_p, min_p=rows.min_p)[0]
    assert torch.equal(out[out.isfinite()], logits[out.isfinite()])
    return out.isfinite().nonzero().flatten().tolist()


def test_filters_keep_the_likeliest_with_ties_to_the_lower_id() -> None:
    logits = torch.log(torch.tensor([0.05, 0.3, 0.3, 0.2, 0.1, 0.05]))
    assert kept(Ask(), logits) == [0, 1, 2, 3, 4, 5]
    assert kept(Ask(top_k=1), logits) == [1]
    assert kept(Ask(top_k=3), logits) == [1, 2, 3]
    assert kept(Ask(top_p=0.01), logits) == [1]
    assert kept(Ask(top_p=0.55), logits) == [1, 2]
    assert kept(Ask(top_p=0.75), logits) == [1, 2, 3]
    assert kept(Ask(min_p=0.5), logits) == [1, 2, 3]
    assert kept(Ask(min_p=1.0), logits) == [1, 2]
    assert kept(Ask(top_k=2, top_p=0.45), logits) == [1]  # mass counts after top-k
    assert kept(Ask(top_k=5), torch.zeros(VOCAB)) == [0, 1, 2, 3, 4]
    assert kept(Ask(top_p=0.09), torch.zeros(VOCAB)) == [0, 1, 2, 3, 4]


def test_filters_bound_what_is_drawn() -> None:
    logits = random_logits(1)[0]
    best = set(torch.topk(logits, 4).indices.tolist())
    rows = [draw(logits, Ask(seed=s, top_k=4, temperature=5.0)) for s in range(60)]
    assert set(rows) == best


def test_nonfinite_logits_are_reported_for_their_row_alone() -> None:
    logits = random_logits(4)
    logits[1, 5] = float("nan")
    logits[2, 6] = float("inf")
    rows = rows_of(*(Ask(seed=s, top_k=9, forbidden=(3, 7)) for s in range(4)))
    sampled = ops.sample(logits, rows)
    assert sampled.finite.tolist() == [True, False, False, True]
    assert ((sampled.token >= 0) & (sampled.token < VOCAB)).all()
    clean = ops.sample(random_logits(4), rows)
    assert clean.finite.all()
    assert torch.equal(clean.token[[0, 3]], sampled.token[[0, 3]])


def test_log_probabilities_are_those_of_the_unmodified_logits() -> None:
    logits = random_logits(3)
    tokens = torch.tensor([4, 5, 6])
    chosen, ids, values = ops.token_logprobs(logits, tokens, 5)
    expected = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(chosen.double(), expected[range(3), tokens], atol=1e-6, rtol=1e-6)
    top = torch.topk(expected, 5)
    assert torch.equal(ids, top.indices)
    torch.testing.assert_close(values.double(), top.values, atol=1e-6, rtol=1e-6)
    assert ops.token_logprobs(logits, tokens, 0)[1].shape == (3, 0)
