"""Choosing tokens from logits: bias, penalties, filters, and noise that depends on no other row.

The choice is argmax(filtered logits / T + Gumbel noise), with the noise a function of (seed, sample
index, position, token id) alone: the same request draws the same tokens in any batch, with or
without speculation. Order: tokens that may not be drawn at all, logit bias, repetition, frequency
and presence penalties, tokens forbidden for now, temperature, min-p, top-k, top-p (over what top-k
left). Ties go to the lower token id.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millpond.ops.batch import Sampled
from millpond.ops.reference.elementwise import row_sum

MASK32 = 0xFFFFFFFF

MIX_FIRST = 0x85EBCA6B
MIX_SECOND = 0xC2B2AE35
"""The multipliers of MurmurHash3's 32-bit finaliser (public domain, Austin Appleby)."""

TOKEN_STRIDE = 0x9E3779B1
"""Odd, near 2^32 over the golden ratio: spreads consecutive token ids before they are mixed."""

KEY_STARTS = (0x243F6A88, 0x13198A2E)
"""Where the two key words of a draw start from: digits of pi, two different streams."""

LARGEST_UNIFORM = 1.0 - 2.0**-24


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """How to choose a token for each of M rows of logits; what is None is used by no row.

    Filters are off at top_k 0, top_p 1, min_p 0; penalties at repetition 1, presence and frequency
    0; temperature 0 is greedy. `position` is that of the token to be drawn.
    """

    temperature: torch.Tensor  # [M] fp32
    top_k: torch.Tensor  # [M] int64
    top_p: torch.Tensor  # [M] fp32
    min_p: torch.Tensor  # [M] fp32
    seed: torch.Tensor  # [M] int64, all 64 bits count
    sample_index: torch.Tensor  # [M] int64
    position: torch.Tensor  # [M] int64
    repetition: torch.Tensor  # [M] fp32
    presence: torch.Tensor  # [M] fp32
    frequency: torch.Tensor  # [M] fp32
    generated: torch.Tensor | None  # [M, V] int32, how often each token was generated
    in_prompt: torch.Tensor | None  # [M, V] bool
    bias_row: torch.Tensor  # [Q] int64; the three give logit biases as (row, token, value)
    bias_token: torch.Tensor  # [Q] int64
    bias_value: torch.Tensor  # [Q] fp32
    forbidden_row: torch.Tensor  # [F] int64; with the next: tokens that may not be drawn yet
    forbidden_token: torch.Tensor  # [F] int64
    any_filter: bool  # whether any row has top_k, top_p or min_p on
    any_penalty: bool
    any_noise: bool  # whether any row is not greedy
    # [F] int64: the position from which on the token may be drawn; None: at no position of the row.
    forbidden_until: torch.Tensor | None = None
    # Rows that may draw some tokens only: [A] int64, and [A, ceil(V / 32)] int32, token t being bit
    # t % 32 of word t // 32. A row that may draw none draws token 0.
    allowed_row: torch.Tensor | None = None
    allowed: torch.Tensor | None = None


def sample(logits: torch.Tensor, rows: SamplingRows) -> Sampled:
    """Draw a token for each row of logits [M, V] fp32; the logits are left as they are."""
    scores = adjusted_logits(logits, rows)
    if rows.any_noise:
        warm = (rows.temperature > 0)[:, None]
        scaled = scores / torch.where(warm, rows.temperature[:, None], 1.0)
        if rows.any_filter:
            scaled = filtered(scaled, top_k=rows.top_k, top_p=rows.top_p, min_p=rows.min_p)
        noise = gumbel(rows.seed, rows.sample_index, rows.position, logits.shape[1])
        scores = torch.where(warm, scaled + noise, scores)
    return Sampled(lowest_argmax(scores), torch.isfinite(logits).all(-1))


def adjusted_logits(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """logits [M, V] after masks, bias, penalties and forbidden tokens; a copy."""
    scores = logits.float().clone()
    if rows.allowed_row is not None and rows.allowed is not None:
        may = unpacked(rows.allowed, logits.shape[1])
        masked = scores.index_select(0, rows.allowed_row).masked_fill(~may, float("-inf"))
        scores.index_copy_(0, rows.allowed_row, masked)
    if rows.bias_row.numel():
        scores.index_put_((rows.bias_row, rows.bias_token), rows.bias_value, accumulate=True)
    if rows.any_penalty and rows.generated is not None and rows.in_prompt is not None:
        repeated = (rows.generated > 0) | rows.in_prompt
        factor = rows.repetition[:, None]
        punished = torch.where(scores > 0, scores / factor, scores * factor)
        scores = torch.where(repeated, punished, scores)
        scores = scores - rows.frequency[:, None] * rows.generated.float()
        scores = scores - rows.presence[:, None] * (rows.generated > 0).float()
    if rows.forbidden_row.numel():
        at = rows.forbidden_row, rows.forbidden_token
        barred = torch.full_like(scores[at], float("-inf"))
        if rows.forbidden_until is not None:
            early = rows.position[rows.forbidden_row] < rows.forbidden_until
            barred = torch.where(early, barred, scores[at])
        scores[at] = barred
    return scores


def unpacked(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Sets of tokens as bits [A, ceil(V / 32)] int32 -> [A, V] bool."""
    token = torch.arange(vocab_size, device=words.device)
    return (words[:, token // 32] >> (token % 32).int() & 1).bool()


def counts_before(generated: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """What penalties count at each place of a verify row: [B, K + 1, V] int32.

    generated [B, V] int32, `first` included; drafts [B, K] int64, negative where there is none.
    Place j follows drafts 0 .. j - 1; places after the last draft are unspecified.
    """
    count, vocab_size = generated.shape
    seen = generated.new_zeros((count, drafts.shape[1] + 1, vocab_size))
    seen[:, 0] = generated
    seen[:, 1:].scatter_(2, drafts[..., None].clamp(min=0), 1)
    return seen.cumsum(1, dtype=generated.dtype)


def count_accepted(
    tokens: torch.Tensor, drafts: torch.Tensor, num_drafts: torch.Tensor
) -> torch.Tensor:
    """How many leading drafts equal the token drawn in their place: [B] int64.

    tokens [B, K + 1], drafts [B, K], num_drafts [B], all int64; draft j stands where token j was
    drawn. With `a` accepted, tokens 0 .. a are emitted.
    """
    place = torch.arange(drafts.shape[1], device=drafts.device)
    equal = (tokens[:, :-1] == drafts) & (place < num_drafts[:, None])
    return equal.long().cumprod(1).sum(1)


def filtered(
    scaled: torch.Tensor, *, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """scaled [M, V] (logits over temperature) with what the filters leave out at -inf.

    min-p keeps what is at least min_p times as likely as the likeliest. top-p keeps the likeliest
    tokens up to and with the one that reaches the mass, after top-k and min-p. One always stays.
    """
    count = scaled.shape[1]
    top = scaled.amax(-1, keepdim=True)
    likely_enough = torch.exp(scaled - top) >= min_p[:, None]
    scaled = scaled.masked_fill(~likely_enough, float("-inf"))

    ranked, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(count, device=scaled.device)
    limit = torch.where(top_k > 0, top_k, count)[:, None]
    ranked = ranked.masked_fill(rank >= limit, float("-inf"))
    weights = torch.exp(ranked - top)
    likely = weights / row_sum(weights)
    mass_before = likely.cumsum(-1) - likely
    # A mass of 1 keeps everything: sums of rounded terms may pass 1 early.
    within = (mass_before < top_p[:, None]) | (top_p >= 1.0)[:, None]
    keep = (rank < limit) & (within | (rank == 0))
    kept = torch.zeros_like(keep).scatter_(1, order, keep)
    return scaled.masked_fill(~kept, float("-inf"))


def lowest_argmax(scores: torch.Tensor) -> torch.Tensor:
    """The lowest index of each row's maximum [M]; 0 where there is none (a NaN)."""
    count = scores.shape[1]
    ids = torch.arange(count, device=scores.device)
    best = torch.where(scores == scores.amax(-1, keepdim=True), ids, count).amin(-1)
    return torch.where(best < count, best, 0)


def gumbel(
    seed: torch.Tensor,
    sample_index: torch.Tensor,
    position: torch.Tensor,
    vocab_size: int,
    *,
    first_token: int = 0,
) -> torch.Tensor:
    """Standard Gumbel noise [M, vocab_size] fp32 for tokens `first_token ..`; keys [M] int64."""
    token = torch.arange(first_token, first_token + vocab_size, device=seed.device)
    first, second = noise_keys(seed, sample_index, position)
    h = mix32((multiply32(token, TOKEN_STRIDE) + first[:, None]) & MASK32)
    h = mix32(h ^ second[:, None])
    # With w uniform, -log(1 - w) is exponential and precise where it is small: the Gumbel's upper
    # tail, which decides the argmax.
    uniform = ((h.float() + 0.5) * 2.0**-32).clamp(max=LARGEST_UNIFORM)
    return -torch.log(-torch.log1p(-uniform))


def noise_keys(
    seed: torch.Tensor, sample_index: torch.Tensor, position: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two 32-bit words a draw, int64 [M]: each absorbs seed (low, high), sample and position."""
    words = (seed & MASK32, (seed >> 32) & MASK32, sample_index & MASK32, position & MASK32)
    keys = []
    for start in KEY_STARTS:
        key = torch.full_like(seed, start)
        for word in words:
            key = mix32((multiply32(key ^ word, TOKEN_STRIDE) + start) & MASK32)
        keys.append(key)
    return keys[0], keys[1]


def mix32(h: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finaliser, a bijection of 0 .. 2^32 - 1; int64 in and out."""
    h = multiply32(h ^ (h >> 16), MIX_FIRST)
    h = multiply32(h ^ (h >> 13), MIX_SECOND)
    return h ^ (h >> 16)


def multiply32(a: torch.Tensor, factor: int) -> torch.Tensor:
    """The low 32 bits of a * factor, both below 2^32; stays within int64 on the way."""
    high = ((a * (factor >> 16)) & 0xFFFF) << 16
    return (a * (factor & 0xFFFF) + high) & MASK32


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """The log-softmax [M, V] of the model's own logits: before bias, penalties and temperature."""
    shifted = logits.float() - logits.float().amax(-1, keepdim=True)
    return shifted - torch.log(row_sum(torch.exp(shifted)))


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities of given tokens [M], and the `num_top` likeliest of each row.

    Of the *unmodified* logits [M, V], as the OpenAI API and vLLM report them. -> chosen [M] fp32,
    top ids [M, n] int64, top values [M, n] fp32, likeliest first, ties to the lower id.
    """
    logprobs = log_probabilities(logits)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    if num_top == 0:
        return chosen, tokens.new_empty((len(tokens), 0)), chosen.new_empty((len(tokens), 0))
    values, ids = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    return chosen, ids[:, :num_top], values[:, :num_top]
