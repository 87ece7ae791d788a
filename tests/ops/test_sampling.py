"""Sampling: what each parameter does, and that a row's choice depends on nothing but itself."""

from __future__ import annotations

import math

import pytest
import torch

from millpond.ops.reference import sampling as ops
from millpond.ops.sampler import SamplerState
from millpond.plan.sampling import SamplingParams

VOCAB = 50
EOS = (3, 7)


def params(**changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=100, **changes)  # type: ignore[arg-type]


def state_of(
    *requests: SamplingParams,
    tokens: tuple[int, ...] = (1, 2, 2, 9),
    prompt_len: int = 2,
    vocab: int = VOCAB,
) -> SamplerState:
    state = SamplerState(len(requests), vocab, eos_token_ids=EOS, device=torch.device("cpu"))
    for seat, request in enumerate(requests):
        state.load(seat, request, sample_index=seat % 3, tokens=tokens, prompt_len=prompt_len)
    return state


def draw(logits: torch.Tensor, request: SamplingParams, position: int = 4) -> int:
    rows = state_of(request).rows([0], [position])
    return int(ops.sample(logits[None], rows).token[0])


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
    draws = [(0, 0, 0), (1, 0, 5), (2**63 + 12345, 2, 70_000), (2**40, 1, 1)]
    state = SamplerState(len(draws), VOCAB, eos_token_ids=(), device=torch.device("cpu"))
    for seat, (seed, index, _) in enumerate(draws):
        state.load(seat, params(seed=seed), sample_index=index, tokens=(), prompt_len=0)
    rows = state.rows(range(len(draws)), [d[2] for d in draws])
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
    requests = [
        params(seed=11),
        params(seed=12, temperature=0.0),
        params(seed=13, top_k=5, top_p=0.8),
        params(seed=14, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.3),
        params(seed=15, min_p=0.2, temperature=1.7),
        params(seed=16, logit_bias=((4, 3.0),), min_tokens=50),
    ] * 4
    logits = random_logits(len(requests), vocab=40_000)
    state = state_of(*requests, vocab=40_000)
    seats, positions = list(range(len(requests))), [4 + s for s in range(len(requests))]
    together = ops.sample(logits, state.rows(seats, positions)).token
    backwards = ops.sample(logits.flip(0), state.rows(seats[::-1], positions[::-1])).token.flip(0)
    assert torch.equal(together, backwards)
    scores = ops.adjusted_logits(logits, state.rows(seats, positions))
    chosen, ids, values = ops.token_logprobs(logits, together, 3)
    for seat in seats:
        rows = state.rows([seat], [positions[seat]])
        assert ops.sample(logits[seat : seat + 1], rows).token[0] == together[seat]
        assert torch.equal(ops.adjusted_logits(logits[seat : seat + 1], rows)[0], scores[seat])
        alone = ops.token_logprobs(logits[seat : seat + 1], together[seat : seat + 1], 3)
        for mine, theirs in zip(alone, (chosen, ids, values), strict=True):
            assert torch.equal(mine[0], theirs[seat])


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    logits = torch.zeros(VOCAB)
    logits[[9, 30, 31]] = 2.0
    assert draw(logits, params(temperature=0.0)) == 9


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens() -> (
    None
):
    logits = torch.zeros(1, VOCAB)
    logits[0, [1, 2, 9, 4]] = torch.tensor([3.0, -3.0, 3.0, 3.0])
    rows = state_of(params(repetition_penalty=1.5)).rows([0], [4])
    scores = ops.adjusted_logits(logits, rows)[0]
    assert scores[[1, 2, 9, 4]].tolist() == [2.0, -4.5, 2.0, 3.0]
    assert logits[0, 1] == 3.0


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    state = state_of(params(presence_penalty=0.5, frequency_penalty=0.25), tokens=(1, 2, 2, 2, 9))
    state.observe([0], [9])
    scores = ops.adjusted_logits(torch.zeros(1, VOCAB), state.rows([0], [6]))[0]
    assert scores[1] == 0.0
    assert scores[2] == -0.5 - 2 * 0.25
    assert scores[9] == -0.5 - 2 * 0.25


def test_a_new_request_on_a_seat_does_not_inherit_counts() -> None:
    state = state_of(params(presence_penalty=1.0), params(presence_penalty=1.0))
    state.load(0, params(), sample_index=0, tokens=(5, 6), prompt_len=1)
    scores = ops.adjusted_logits(torch.zeros(2, VOCAB), state.rows([0, 1], [2, 4]))
    assert not scores[0].any()
    assert scores[1].any()
    state.load(0, params(presence_penalty=1.0), sample_index=0, tokens=(5, 6), prompt_len=1)
    scores = ops.adjusted_logits(torch.zeros(1, VOCAB), state.rows([0], [2]))[0]
    assert scores.nonzero().flatten().tolist() == [6]


def test_logit_bias_is_added_and_forbidden_ends_wait_for_min_tokens() -> None:
    request = params(temperature=0.0, min_tokens=3, stop_token_ids=(8,), logit_bias=((20, 6.0),))
    logits = torch.zeros(VOCAB)
    logits[[3, 7, 8]] = 9.0
    logits[21] = 5.0
    assert draw(logits, request, position=4) == 20  # two generated so far: ends are forbidden
    assert draw(logits, request, position=5) == 3
    assert draw(logits, params(temperature=0.0), position=4) == 3


def kept(request: SamplingParams, logits: torch.Tensor) -> list[int]:
    rows = state_of(request).rows([0], [4])
    out = ops.filtered(logits[None], top_k=rows.top_k, top_p=rows.top_p, min_p=rows.min_p)[0]
    assert torch.equal(out[out.isfinite()], logits[out.isfinite()])
    return out.isfinite().nonzero().flatten().tolist()


def test_filters_keep_the_likeliest_with_ties_to_the_lower_id() -> None:
    logits = torch.log(torch.tensor([0.05, 0.3, 0.3, 0.2, 0.1, 0.05]))
    assert kept(params(), logits) == [0, 1, 2, 3, 4, 5]
    assert kept(params(top_k=1), logits) == [1]
    assert kept(params(top_k=3), logits) == [1, 2, 3]
    assert kept(params(top_p=0.01), logits) == [1]
    assert kept(params(top_p=0.55), logits) == [1, 2]
    assert kept(params(top_p=0.75), logits) == [1, 2, 3]
    assert kept(params(min_p=0.5), logits) == [1, 2, 3]
    assert kept(params(min_p=1.0), logits) == [1, 2]
    assert kept(params(top_k=2, top_p=0.45), logits) == [1]  # mass counts after top-k
    assert kept(params(top_k=5), torch.zeros(VOCAB)) == [0, 1, 2, 3, 4]
    assert kept(params(top_p=0.09), torch.zeros(VOCAB)) == [0, 1, 2, 3, 4]


def test_filters_bound_what_is_drawn() -> None:
    logits = random_logits(1)[0]
    best = set(torch.topk(logits, 4).indices.tolist())
    rows = [draw(logits, params(seed=s, top_k=4, temperature=5.0)) for s in range(60)]
    assert set(rows) == best


def test_nonfinite_logits_are_reported_for_their_row_alone() -> None:
    logits = random_logits(4)
    logits[1, 5] = float("nan")
    logits[2, 6] = float("inf")
    state = state_of(*[params(seed=s, top_k=9, min_tokens=5) for s in range(4)])
    sampled = ops.sample(logits, state.rows(range(4), [4] * 4))
    assert sampled.finite.tolist() == [True, False, False, True]
    assert ((sampled.token >= 0) & (sampled.token < VOCAB)).all()
    clean = ops.sample(random_logits(4), state.rows(range(4), [4] * 4))
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
