"""What chunks of the delta rule need that takes no state: every chunk and head by itself.

Per chunk of 64 tokens: the inverse of the triangular system with beta in its columns (`solve`), the
query-key products with their decay (`qk`), and how queries and keys decay: by channel as tiles that
are ready for the products with a state, by head as one number a token. Knows no state.

Decay. An exponent is a sum of log decays of consecutive tokens, never a difference of two such
sums, which would lose a small decay after a steep one, with two exceptions. By head, the sums are
fp64. By channel in a bf16 model, where a bound keeps the sums of 64 tokens small, sub-blocks of 32
tokens are taken around their middles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from millpond.ops.triton.shared import (
    EMULATED,
    kernel,
    log_decay,
    product,
    rounded,
    row_of_block,
    sigmoid,
)

LOWEST_AROUND_MIDDLE = -5.0
"""Log decays of at least this: e^(16 * 5) is the most that a sub-block's middle can meet."""

LOG2_E = tl.constexpr(1.4426950408889634)

PAIRS = 64 * 64
"""Elements of `solve` and of `qk`, which open a chunk's record; tiles [64, K] follow, by channel:
minus keys and queries with the decay since the chunk's start, keys with that until its end."""

SCALES = 4 * 64
"""fp32 numbers of a chunk when decay is by head: that since the start, for minus keys and for
queries, that until the end for keys, each [64] and with what makes a unit vector of a row; what the
chunk leaves of a state."""


@triton.jit
def _exp2(x):
    """2^x to 2^-22, and 0 where that is not a normal number: for what is rounded to bf16 after."""
    if EMULATED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
        )
    return y


@triton.jit
def _sigmoid(x):
    """1 / (1 + e^-x) as exactly as `_exp2`."""
    return _reciprocal(1.0 + _exp2(x * -LOG2_E))


@triton.jit
def _reciprocal(x):
    """1 / x as exactly as `_exp2`; 0 for infinity."""
    if EMULATED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
        )
    return y


@triton.jit
def _sums(which, g):
    """which [64, 64] of 0 and 1 picks, for every row, consecutive log decays of g [64, KP]."""
    return tl.dot(which.to(tl.float32), g, input_precision="tf32x3")


@triton.jit
def _spread(x, SIZE: tl.constexpr):
    """x [64 / SIZE, SIZE, SIZE] -> [64, 64] with x along the diagonal."""
    b = tl.arange(0, 64 // SIZE)
    same = b[:, None, None, None] == b[None, None, :, None]
    return tl.reshape(tl.where(same, x[:, :, None, :], 0.0), (64, 64))


@triton.jit
def _pairs_joined(a, inverse, SIZE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """From inverses of blocks of SIZE / 2 along the diagonal of I + a to those of SIZE."""
    i = tl.arange(0, 64)
    pair = (i // SIZE)[:, None] == (i // SIZE)[None, :]
    below = (i // (SIZE // 2))[:, None] != (i // (SIZE // 2))[None, :]
    moved = product(tl.where(pair & below, a, 0.0), inverse, OPERAND, PRECISION)
    return inverse - product(inverse, moved, OPERAND, PRECISION)


@triton.jit
def _unit_lower_inverse(a, SIZE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1, a [64, 64] strictly lower: sub-blocks of SIZE row after row, then pairs of them.

    Stable where powers of a are not. What the delta rule makes of one value is no larger than that
    value, so that no element exceeds 1: fp16 operands have the range, and TF32's precision.
    """
    COUNT: tl.constexpr = 64 // SIZE
    b = tl.arange(0, COUNT)
    r = tl.arange(0, SIZE)
    same = b[:, None, None, None] == b[None, None, :, None]
    own = tl.sum(tl.where(same, tl.reshape(a, (COUNT, SIZE, COUNT, SIZE)), 0.0), 2)
    own = tl.trans(own, (0, 2, 1))
    small = (r[:, None] == r[None, :]).to(tl.float32)[None, :, :]
    small += tl.zeros([COUNT, SIZE, SIZE], tl.float32)
    for row in range(1, SIZE):
        factors = tl.sum(tl.where((r == row)[None, None, :], own, 0.0), 2)
        known = tl.sum(factors[:, :, None] * small, 1)
        small = tl.where((r == row)[None, :, None], small - known[:, None, :], small)
    inverse = _spread(small, SIZE)
    if SIZE == 8:
        inverse = _pairs_joined(a, inverse, 16, OPERAND, PRECISION)
    inverse = _pairs_joined(a, inverse, 32, OPERAND, PRECISION)
    return _pairs_joined(a, inverse, 64, OPERAND, PRECISION)


@triton.jit
def _pairs_anyhow(q, k, g, KP: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """k_i . k_j and q_i . k_j with the decay by channel from j to i, [64, 64] each, for j <= i.

    Any decay: pairs within a sub-block of 16 one by one, others split at a boundary between them.
    """
    b = tl.arange(0, 4)
    t = tl.arange(0, 16)
    k3 = tl.reshape(k, (4, 16, KP))
    q3 = tl.reshape(q, (4, 16, KP))
    g3 = tl.reshape(g, (4, 16, KP))
    kk = (b[:, None, None] + t[None, :, None] + t[None, None, :]).to(tl.float32) * 0.0
    qk = kk
    between = k3 * 0.0  # of token i: log decays after token j up to i
    for back in range(16):
        j = 15 - back
        here = (t == j)[None, :, None]
        right = tl.sum(tl.where(here, k3, 0.0), 1)[:, None, :] * tl.exp(between)
        column = (t == j)[None, None, :]
        kk = tl.where(column, tl.sum(k3 * right, 2)[:, :, None], kk)
        qk = tl.where(column, tl.sum(q3 * right, 2)[:, :, None], qk)
        next_g = tl.sum(tl.where(here, g3, 0.0), 1)[:, None, :]
        between = tl.where((t >= j)[None, :, None], between + next_g, 0.0)
    kk = _spread(kk, 16)
    qk = _spread(qk, 16)
    i = tl.arange(0, 64)
    for boundary in range(16, 64, 16):
        later = (i // 16) * 16 == boundary
        earlier = i < boundary
        of = later[:, None] & (i >= boundary)[None, :] & (i[None, :] <= i[:, None])
        since = tl.exp(_sums(of, g))
        of = earlier[:, None] & earlier[None, :] & (i[None, :] > i[:, None])
        right = tl.trans(k * tl.exp(_sums(of, g)))
        meant = later[:, None] & earlier[None, :]
        kk = tl.where(meant, product(k * since, right, OPERAND, PRECISION), kk)
        qk = tl.where(meant, product(q * since, right, OPERAND, PRECISION), qk)
    return kk, qk


@triton.jit
def _unit_rows(x, EPS: tl.constexpr):
    """What makes the rows of x [64, KP] unit vectors: [64]."""
    return tl.rsqrt(tl.sum(x * x, 1) + EPS)


@triton.jit
def _store_tile(at, x, i, keys, K: tl.constexpr, C: tl.constexpr):
    """x, 64 tokens by C keys in the order of i and keys, into a tile [64, K]."""
    x = tl.reshape(x, (64, C))
    inside = (i >= 0)[:, None] & (keys < K)[None, :]
    tl.store(at + i[:, None] * K + keys[None, :], rounded(x, at.dtype.element_ty), mask=inside)


@triton.jit
def _by_channel(
    q, k, q_unit, k_unit, g, tiles, fall, i, keys,
    K: tl.constexpr, KP: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Raw q, k [64, KP], their rows' scales, log decays g [64, KP] -> products; stores tiles."""
    k = k.to(tl.float32) * k_unit[:, None]
    q = q.to(tl.float32) * q_unit[:, None]
    since = tl.exp(_sums(i[:, None] >= i[None, :], g))
    _store_tile(tiles, -k * since, i, keys, K, KP)
    _store_tile(tiles + 64 * K, q * since, i, keys, K, KP)
    until = tl.exp(_sums(i[:, None] < i[None, :], g))
    _store_tile(tiles + 2 * 64 * K, k * until, i, keys, K, KP)
    tl.store(fall + keys, tl.exp(tl.sum(g, 0)), mask=keys < K)
    return _pairs_anyhow(q, k, g, KP, OPERAND, PRECISION)


@triton.jit
def _in_order(x, C: tl.constexpr):
    """x [2, RUN, 32 / RUN, C], at [e, p, t] token 32 e + RUN t + p -> [64, C] in tokens' order."""
    return tl.reshape(tl.permute(x, (0, 2, 1, 3)), (64, C))


@triton.jit
def _around_middle(
    q, k, q_unit, k_unit, g, kk, qk, tiles, fall, token, keys,
    K: tl.constexpr, C: tl.constexpr, RUN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_by_channel` for some key channels, g in powers of two; adds to kk and qk.

    Two sub-blocks of tokens, [2, RUN, 32 / RUN, C], in the order of `_in_order`.
    """
    RUNS: tl.constexpr = 32 // RUN
    g = tl.reshape(g, (2, RUN, RUNS, C))
    whole = tl.sum(g, 1)
    ends = tl.cumsum(whole, 1)
    sums = tl.cumsum(g, 1) + (ends - whole)[:, None, :, :]
    run = tl.arange(0, RUNS)[None, :, None]
    block = tl.arange(0, 2)[:, None]
    middle = tl.sum(tl.where(run == 16 // RUN - 1, ends, 0.0), 1)
    own = tl.sum(whole, 1)
    first = tl.sum(tl.where(block == 0, own, 0.0), 0)[None, :]
    last = tl.sum(tl.where(block == 1, own, 0.0), 0)[None, :]
    later_middle = tl.sum(tl.where(block == 1, middle, 0.0), 0)[None, :]
    tl.store(fall + keys[None, :], _exp2(first + last), mask=(keys < K)[None, :])
    before = tl.where(block == 0, 0.0, first)[:, None, None, :]
    until = tl.where(block == 0, first + last, last)[:, None, None, :]
    later = tl.where(block == 0, first + later_middle, later_middle)[:, None, None, :]
    middle = middle[:, None, None, :]
    early = block[:, :, None, None] == 0
    k = tl.reshape(k.to(tl.float32) * k_unit[:, None], (2, RUN, RUNS, C))
    _store_tile(tiles + 2 * 64 * K, k * _exp2(until - sums), token, keys, K, C)
    # Keys as queries and keys of the first sub-block see them, and as those of the second do.
    near = tl.where(early, k * _exp2(middle - sums), 0.0)
    near = tl.trans(_in_order(rounded(near, OPERAND), C))
    far = tl.trans(_in_order(rounded(k * _exp2(later - sums), OPERAND), C))
    since = _exp2(sums + before)
    about = _exp2(sums - middle)
    _store_tile(tiles, -k * since, token, keys, K, C)
    k *= about
    kk += product(_in_order(tl.where(early, k, 0.0), C), near, OPERAND, PRECISION)
    kk += product(_in_order(tl.where(early, 0.0, k), C), far, OPERAND, PRECISION)
    q = tl.reshape(q.to(tl.float32) * q_unit[:, None], (2, RUN, RUNS, C))
    _store_tile(tiles + 64 * K, q * since, token, keys, K, C)
    q *= about
    qk += product(_in_order(tl.where(early, q, 0.0), C), near, OPERAND, PRECISION)
    qk += product(_in_order(tl.where(early, 0.0, q), C), far, OPERAND, PRECISION)
    return kk, qk


@triton.jit
def _by_head(q, k, q_unit, k_unit, g, scales, i, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Raw q, k [64, KP], their rows' scales and log decays g [64] -> as `_by_channel`."""
    sums = tl.cumsum(g.to(tl.float64), 0)
    total = tl.sum(g.to(tl.float64), 0)
    since = tl.exp(sums.to(tl.float32))
    tl.store(scales + i, -k_unit * since)
    tl.store(scales + 64 + i, q_unit * since)
    tl.store(scales + 2 * 64 + i, k_unit * tl.exp((total - sums).to(tl.float32)))
    tl.store(scales + 3 * 64 + i, tl.exp(total.to(tl.float32)) + i * 0.0)
    between = tl.minimum((sums[:, None] - sums[None, :]).to(tl.float32), 0.0)
    if tl.bfloat16 == OPERAND:
        factor = _exp2(between * LOG2_E) * k_unit[None, :]
    else:
        factor = tl.exp(between) * k_unit[None, :]
    right = tl.trans(k)
    kk = product(k, right, OPERAND, PRECISION) * factor * k_unit[:, None]
    qk = product(q, right, OPERAND, PRECISION) * factor * q_unit[:, None]
    return kk, qk


@triton.jit
def _channel_inputs(
    decay_at, dt_bias, i, stride, head, keys, inside, K: tl.constexpr,
):  # fmt: skip
    """Raw decays of some key channels of a chunk with their bias, fp32."""
    own = head * K + keys
    bias = tl.load(dt_bias + own, mask=keys < K, other=0.0).to(tl.float32)
    raw = tl.load(decay_at + i[:, None] * stride + own[None, :], mask=inside, other=0.0)
    return raw.to(tl.float32) + bias[None, :]


@triton.jit
def _bounded(
    q_at, k_at, q_stride, k_stride, decay_at, dt_bias, decay_stride, head, left, rate, bound,
    tiles, fall,
    K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, RUN: tl.constexpr, STAGES: tl.constexpr,
    EPS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_by_channel` where decay is bounded: some key channels after others.

    Rows of tiles are tokens in another order: RUN consecutive ones in one thread, as it loads them
    (speed alone depends on that).
    """
    r = tl.arange(0, 64)
    token = (r // 32) * 32 + (r % (32 // RUN)) * RUN + (r % 32) // (32 // RUN)
    live = (token < left)[:, None]
    keys = tl.arange(0, KP)
    inside = live & (keys < K)[None, :]
    q = tl.load(q_at + token[:, None] * q_stride + keys[None, :], mask=inside, other=0.0)
    k = tl.load(k_at + token[:, None] * k_stride + keys[None, :], mask=inside, other=0.0)
    q_unit = _unit_rows(q.to(tl.float32), EPS) * (K**-0.5)
    k_unit = _unit_rows(k.to(tl.float32), EPS)
    kk = tl.zeros([64, 64], tl.float32)
    qk = tl.zeros([64, 64], tl.float32)
    for first in tl.range(0, KP, C, num_stages=STAGES):
        some = first + tl.arange(0, C)
        within = live & (some < K)[None, :]
        raw = _channel_inputs(decay_at, dt_bias, token, decay_stride, head, some, within, K)
        g = tl.where(within, _sigmoid(raw * rate) * (bound * LOG2_E), 0.0)
        qs = tl.load(q_at + token[:, None] * q_stride + some[None, :], mask=within, other=0.0)
        ks = tl.load(k_at + token[:, None] * k_stride + some[None, :], mask=within, other=0.0)
        kk, qk = _around_middle(
            qs, ks, q_unit, k_unit, g, kk, qk, tiles, fall, token, some,
            K, C, RUN, OPERAND, PRECISION,
        )  # fmt: skip
    return kk, qk


@kernel
def _prepare(
    q_at, k_at, decay, beta, a_log, dt_bias, work, scales, cu_seqlens, num_rows, bound,
    q_stride, k_stride, decay_stride, beta_stride,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BY_CHANNEL: tl.constexpr,
    BOUNDED: tl.constexpr, EPS: tl.constexpr, RECORD: tl.constexpr, NUMBERS: tl.constexpr,
    AROUND_MIDDLE: tl.constexpr, PART: tl.constexpr, RUN: tl.constexpr,
    STAGES: tl.constexpr, SOLVED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one row, one head."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    row = row_of_block(cu_seqlens, num_rows, block, 64)
    begin = tl.load(cu_seqlens + row).to(tl.int64)
    length = tl.load(cu_seqlens + row + 1).to(tl.int64) - begin
    first = (block - (begin // 64 + row)) * 64
    if first < length:
        i = tl.arange(0, 64)
        keys = tl.arange(0, KP)
        left = tl.minimum(length - first, 64).to(tl.int32)
        live = i < left
        inside = live[:, None] & (keys < K)[None, :]
        token = begin + first
        place = block.to(tl.int64) * H + head
        record = work + place * RECORD
        numbers = scales + place * NUMBERS
        rate = tl.exp(tl.load(a_log + head).to(tl.float32))
        weight = tl.load(beta + token * beta_stride + head + i * beta_stride, mask=live, other=0.0)
        if tl.bfloat16 == OPERAND:
            weight = _sigmoid(weight.to(tl.float32))
        else:
            weight = sigmoid(weight.to(tl.float32))
        weight = tl.where(live, weight, 0.0)
        q_at += token * q_stride + (head // (H // HK)) * K
        k_at += token * k_stride + (head // (H // HK)) * K
        decay_at = decay + token * decay_stride
        if BY_CHANNEL:
            decay_at = tl.multiple_of(decay_at, 16)  # in bytes; the host sees to it
        if AROUND_MIDDLE:
            kk, qk = _bounded(
                q_at, k_at, q_stride, k_stride, decay_at, dt_bias, decay_stride, head, left, rate,
                bound, record + 2 * 4096, numbers,
                K, KP, PART, RUN, STAGES, EPS, OPERAND, PRECISION,
            )  # fmt: skip
        else:
            q = tl.load(q_at + i[:, None] * q_stride + keys[None, :], mask=inside, other=0.0)
            k = tl.load(k_at + i[:, None] * k_stride + keys[None, :], mask=inside, other=0.0)
            q_unit = _unit_rows(q.to(tl.float32), EPS) * (K**-0.5)
            k_unit = _unit_rows(k.to(tl.float32), EPS)
            if BY_CHANNEL:
                raw = _channel_inputs(decay_at, dt_bias, i, decay_stride, head, keys, inside, K)
                g = tl.where(inside, log_decay(raw, rate, 0.0, bound, BOUNDED), 0.0)
                kk, qk = _by_channel(
                    q, k, q_unit, k_unit, g, record + 2 * 4096, numbers, i, keys,
                    K, KP, OPERAND, PRECISION,
                )  # fmt: skip
            else:
                bias = tl.load(dt_bias + head).to(tl.float32)
                raw = tl.load(decay_at + i * decay_stride + head, mask=live, other=0.0)
                raw = raw.to(tl.float32)
                g = tl.where(live, log_decay(raw, rate, bias, bound, BOUNDED), 0.0)
                kk, qk = _by_head(q, k, q_unit, k_unit, g, numbers, i, OPERAND, PRECISION)
        kind = work.dtype.element_ty
        pair = record + i[:, None] * 64 + i[None, :]
        qk = tl.where(i[:, None] >= i[None, :], qk, 0.0)
        tl.store(pair + 4096, rounded(qk, kind))
        lower = tl.where(i[:, None] > i[None, :], weight[:, None] * kk, 0.0)
        if tl.bfloat16 == OPERAND:
            inverse = _unit_lower_inverse(lower, SOLVED, tl.float16, PRECISION)
        else:
            inverse = _unit_lower_inverse(lower, SOLVED, OPERAND, PRECISION)
        tl.store(pair, rounded(inverse * weight[None, :], kind))
