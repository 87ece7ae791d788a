"""Choosing tokens: thresholds of the filters, noise and argmax, without sorting a vocabulary.

Contract: `millpond.ops.reference.sampling`. The noise's 32-bit hash is the reference's bit for bit.
Masks, biases and penalties are the reference's own, where a row has any. A filter leaves the tokens
above a threshold of rank and, of those that equal it, the lowest ids; ranks are the bits of the
scaled logits, so top-k is exact, and top-p adds masses in a fixed order of this vocabulary. A row's
choice depends on no other row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from millpond.ops.batch import Sampled
from millpond.ops.reference import sampling as reference
from millpond.ops.reference.sampling import SamplingRows
from millpond.ops.triton.live import live
from millpond.ops.triton.shared import EMULATED, LAUNCH, power_of_two, token_stride

MIX_FIRST = tl.constexpr(reference.MIX_FIRST)
MIX_SECOND = tl.constexpr(reference.MIX_SECOND)
TOKEN_STRIDE = tl.constexpr(reference.TOKEN_STRIDE)
KEY_FIRST = tl.constexpr(reference.KEY_STARTS[0])
KEY_SECOND = tl.constexpr(reference.KEY_STARTS[1])
LARGEST_UNIFORM = tl.constexpr(reference.LARGEST_UNIFORM)

FILTERED = 2048
"""Tokens that a filtering program looks at together."""

DRAWN = 8192
"""Tokens of a drawing program. Neither is measured yet."""


def sample(logits: torch.Tensor, rows: SamplingRows) -> Sampled:
    """As the reference, in two or three launches."""
    count, vocabulary = logits.shape
    scores = logits.float()
    if _adjusts(rows):
        scores = reference.adjusted_logits(logits, rows)
    token = torch.empty((count,), dtype=torch.int64, device=logits.device)
    finite = torch.empty((count,), dtype=torch.bool, device=logits.device)
    if not count:
        return Sampled(token, finite)
    filtering = rows.any_noise and rows.any_filter
    tops, cuts = filter_cuts(scores, rows, launch=filtering)
    parts = triton.cdiv(vocabulary, DRAWN)
    best = torch.empty((count, parts), dtype=torch.float32, device=logits.device)
    place = torch.empty((count, parts), dtype=torch.int32, device=logits.device)
    _draw[(count, parts)](
        logits, scores, tops, cuts, best, place, rows.temperature, rows.min_p, rows.seed,
        rows.sample_index, rows.position, int(filtering), token_stride(logits),
        token_stride(scores),
        V=vocabulary, PARTS=parts, BLOCK=min(DRAWN, max(16, power_of_two(vocabulary))),
        num_warps=8, **LAUNCH,
    )  # fmt: skip
    _best[(count,)](
        best, place, token, finite.view(torch.uint8),
        V=vocabulary, PARTS=parts, PADDED=power_of_two(parts), num_warps=1, **LAUNCH,
    )  # fmt: skip
    return Sampled(token, finite)


def filter_cuts(
    scores: torch.Tensor, rows: SamplingRows, *, launch: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the filters leave of scores [M, V]: the largest scaled one [M] fp32, and [M, 2] int64.

    The two: a threshold of rank (larger scores have larger ranks), and the last id that may equal
    it. Rows that are greedy or filter nothing have threshold 0. Unwritten if not launched.
    """
    count, vocabulary = scores.shape
    tops = torch.empty((count,), dtype=torch.float32, device=scores.device)
    cuts = torch.empty((count, 2), dtype=torch.int64, device=scores.device)
    if launch:
        _cuts[(count,)](
            scores, tops, cuts, rows.temperature, rows.top_k, rows.top_p, rows.min_p,
            token_stride(scores),
            V=vocabulary, BLOCK=min(FILTERED, max(16, power_of_two(vocabulary))),
            num_warps=16, **LAUNCH,
        )  # fmt: skip
    return tops, cuts


def _adjusts(rows: SamplingRows) -> bool:
    """Whether any row's logits are changed before they are scaled."""
    return (
        rows.allowed_row is not None
        or rows.any_penalty
        or rows.bias_row.numel() > 0
        or rows.forbidden_row.numel() > 0
    )


@triton.jit
def mix32(h):
    """MurmurHash3's 32-bit finaliser, of uint32."""
    h = (h ^ (h >> 16)) * MIX_FIRST
    h = (h ^ (h >> 13)) * MIX_SECOND
    return h ^ (h >> 16)


@triton.jit
def _key(low, high, sample_index, position, START: tl.constexpr):
    """One of a draw's two key words, of four uint32."""
    key = mix32((START ^ low) * TOKEN_STRIDE + START)
    key = mix32((key ^ high) * TOKEN_STRIDE + START)
    key = mix32((key ^ sample_index) * TOKEN_STRIDE + START)
    return mix32((key ^ position) * TOKEN_STRIDE + START)


@triton.jit
def noise_hash(seed, sample_index, position, token):
    """The 32 bits that a draw's token gets: int64 keys that broadcast with token, int32."""
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    index, at = sample_index.to(tl.uint32), position.to(tl.uint32)
    h = token.to(tl.uint32) * TOKEN_STRIDE + _key(low, high, index, at, KEY_FIRST)
    return mix32(mix32(h) ^ _key(low, high, index, at, KEY_SECOND))


@triton.jit
def gumbel(h):
    """Standard Gumbel noise of hashed bits, as the reference makes it of a uniform number."""
    uniform = tl.minimum((h.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), LARGEST_UNIFORM)
    if EMULATED:  # which has no log1p: log(y) with what y = 1 - uniform lost put back
        y = 1.0 - uniform
        exponential = tl.where(
            y == 1.0, uniform, tl.log(y) * (uniform / tl.where(y == 1.0, 1.0, y - 1.0))
        )
    else:
        exponential = -libdevice.log1p(-uniform)
    return -tl.log(exponential)


@triton.jit
def _scaled(scores, at, inside, temperature):
    """Scores over the temperature, -inf outside."""
    score = tl.load(scores + at, mask=inside, other=float("-inf"))
    return tl.div_rn(score, tl.zeros_like(score) + temperature)


@triton.jit
def _rank(score):
    """Integers in the order of the scores; both zeros are one."""
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)


@triton.jit
def _kept(scaled, token, top, min_p, threshold, last):
    """Whether a token passes: likely enough, and above the cut or at it with a low id."""
    rank = _rank(scaled)
    enough = tl.exp(scaled - top) >= min_p
    return enough & ((rank > threshold) | ((rank == threshold) & (token <= last)))


@triton.jit
def _last_id(
    own, top, temperature, min_p, threshold, last, wanted, V: tl.constexpr, BLOCK: tl.constexpr
):
    """The id of the `wanted`-th token that equals the threshold, among ids up to `last`."""
    lane = tl.arange(0, BLOCK)
    seen = tl.zeros([1], tl.int32)
    found = tl.full([1], -1, tl.int32)
    for begin in range(0, V, BLOCK):
        token = begin + lane
        scaled = _scaled(own, token, token < V, temperature)
        equal = _rank(scaled) == threshold
        equal = equal & (token < V) & (token <= last) & (tl.exp(scaled - top) >= min_p)
        count = seen + tl.cumsum(equal.to(tl.int32), 0)
        here = equal & (count <= wanted)
        found = tl.maximum(found, tl.max(tl.where(here, token, -1), 0))
        seen += tl.sum(equal.to(tl.int32), 0)
    return found


@live
def _cuts(
    scores, tops, cuts, temperature, top_k, top_p, min_p, stride,
    V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one row: its largest scaled logit, the threshold rank, and the last id at it."""
    row = tl.program_id(0).to(tl.int64)
    warmth = tl.load(temperature + row)
    limit = tl.load(top_k + row)
    mass = tl.load(top_p + row)
    floor = tl.load(min_p + row)
    own = scores + row * stride
    lane = tl.arange(0, BLOCK)
    top = tl.full([1], float("-inf"), tl.float32)
    threshold = tl.zeros([1], tl.uint32)
    last = tl.full([1], V, tl.int32)
    if (warmth > 0.0) & ((limit > 0) | (mass < 1.0) | (floor > 0.0)):
        for begin in range(0, V, BLOCK):
            token = begin + lane
            top = tl.maximum(top, tl.max(_scaled(own, token, token < V, warmth), 0))

        if (limit > 0) & (limit < V):
            # The `limit`-th rank of what min-p leaves, 8 bits at a time. Fewer are left: rank 0.
            wanted = tl.zeros([1], tl.int32) + limit.to(tl.int32)
            bins = tl.arange(0, 256)
            known = tl.zeros([1], tl.uint32)  # the bits of the threshold found so far
            shift = tl.full([1], 32, tl.uint32)
            for _ in range(4):
                shift -= 8
                counts = tl.zeros([256], tl.int32)
                for begin in range(0, V, BLOCK):
                    token = begin + lane
                    scaled = _scaled(own, token, token < V, warmth)
                    rank = _rank(scaled)
                    alike = (token < V) & (tl.exp(scaled - top) >= floor)
                    alike = alike & ((rank & known) == threshold)
                    digit = ((rank >> shift) & 255).to(tl.int32)
                    counts += tl.histogram(digit, 256, mask=alike)
                above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
                largest = tl.max(tl.where(above + counts >= wanted, bins, 0), 0)
                wanted -= tl.sum(tl.where(bins == largest, above, 0), 0)
                threshold = threshold | (largest.to(tl.uint32) << shift)
                known = known | (tl.full([1], 255, tl.uint32) << shift)
            last = _last_id(own, top, warmth, floor, threshold, last, wanted, V, BLOCK)

        if mass < 1.0:
            # The lowest rank with less than the wanted mass above it, 4 bits at a time.
            few = tl.arange(0, 16)
            sums = tl.zeros([BLOCK], tl.float32)
            for begin in range(0, V, BLOCK):
                token = begin + lane
                scaled = _scaled(own, token, token < V, warmth)
                kept = (token < V) & _kept(scaled, token, top, floor, threshold, last)
                sums += tl.where(kept, tl.exp(scaled - top), 0.0)
            target = tl.sum(sums, 0) * mass
            lowest = tl.zeros([1], tl.uint32)
            over = tl.zeros([1], tl.float32)
            known = tl.zeros([1], tl.uint32)
            shift = tl.full([1], 32, tl.uint32)
            for _ in range(8):
                shift -= 4
                spread = tl.zeros([16, BLOCK], tl.float32)
                for begin in range(0, V, BLOCK):
                    token = begin + lane
                    scaled = _scaled(own, token, token < V, warmth)
                    rank = _rank(scaled)
                    kept = (token < V) & _kept(scaled, token, top, floor, threshold, last)
                    kept = kept & ((rank & known) == lowest)
                    digit = ((rank >> shift) & 15).to(tl.int32)
                    share = tl.where(kept, tl.exp(scaled - top), 0.0)
                    spread += tl.where(few[:, None] == digit[None, :], share[None, :], 0.0)
                masses = tl.sum(spread, 1)
                # Sums from above by comparing all pairs: the order of adding is the bins'.
                higher = tl.where(few[None, :] > few[:, None], masses[None, :], 0.0)
                before = over + tl.sum(higher, 1)
                some = masses > 0.0
                smallest = tl.min(tl.where(some & (before < target), few, 16), 0)
                highest = tl.max(tl.where(some, few, 0), 0)  # one always stays
                smallest = tl.where(smallest < 16, smallest, highest)
                over = tl.zeros([1], tl.float32) + tl.sum(tl.where(few == smallest, before, 0.0), 0)
                lowest = lowest | (smallest.to(tl.uint32) << shift)
                known = known | (tl.full([1], 15, tl.uint32) << shift)
            weight = tl.exp(_score_of(lowest) - top)
            equals = tl.ceil((target - over) / weight)
            equals = tl.minimum(tl.maximum(equals, 1.0), 2147483000.0).to(tl.int32)
            at_most = tl.where(lowest == threshold, last, V)
            last = _last_id(own, top, warmth, floor, lowest, at_most, equals, V, BLOCK)
            threshold = lowest
    one = tl.arange(0, 1)
    tl.store(tops + row + one, top)
    tl.store(cuts + row * 2 + one, threshold.to(tl.int64))
    tl.store(cuts + row * 2 + 1 + one, last.to(tl.int64))


@triton.jit
def _score_of(rank):
    """The score of a rank."""
    bits = tl.where((rank >> 31) != 0, rank & 0x7FFFFFFF, ~rank)
    return bits.to(tl.float32, bitcast=True)


@live
def _draw(
    logits, scores, tops, cuts, best, place, temperature, min_p, seed, sample_index, positions,
    filtering, logit_stride, score_stride,
    V: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest of BLOCK tokens of one row, the lower id of equals.

    `place` is below V then, else says what was wrong: bit 30 logits not finite, bit 29 a NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < V
    raw = tl.load(logits + row * logit_stride + token, mask=inside, other=0.0).to(tl.float32)
    broken = tl.max((tl.abs(raw) < float("inf")).to(tl.int32) ^ 1, 0)
    warmth = tl.load(temperature + row)
    score = tl.load(scores + row * score_stride + token, mask=inside, other=float("-inf"))
    if warmth > 0.0:
        score = tl.div_rn(score, tl.zeros_like(score) + warmth)
        if filtering != 0:
            threshold = tl.load(cuts + row * 2)
            floor = tl.load(min_p + row)
            if (threshold > 0) | (floor > 0.0):
                kept = _kept(
                    score, token, tl.load(tops + row), floor, threshold.to(tl.uint32),
                    tl.load(cuts + row * 2 + 1),
                )  # fmt: skip
                score = tl.where(kept | (score != score), score, float("-inf"))
        bits = noise_hash(
            tl.load(seed + row), tl.load(sample_index + row), tl.load(positions + row), token
        )
        score += gumbel(bits)
    lost = tl.max((score != score).to(tl.int32), 0)
    largest = tl.max(score, 0)
    index = tl.min(tl.where(inside & (score == largest), token, V), 0)
    tl.store(best + row * PARTS + tl.program_id(1), largest)
    tl.store(place + row * PARTS + tl.program_id(1), index | (broken << 30) | (lost << 29))


@live
def _best(
    best, place, token, finite, V: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """The best of one row's parts; token 0 where a score is a NaN."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED)
    value = tl.load(best + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    found = tl.load(place + row * PARTS + part, mask=part < PARTS, other=V)
    broken = tl.max((found >> 30) & 1, 0)
    lost = tl.max((found >> 29) & 1, 0)
    index = tl.where(value == tl.max(value, 0), found & 0x1FFFFFFF, V)
    chosen = tl.min(index, 0)
    chosen = tl.where((lost != 0) | (chosen >= V), 0, chosen)
    tl.store(token + row, chosen.to(tl.int64))
    tl.store(finite + row, (broken ^ 1).to(tl.uint8))
