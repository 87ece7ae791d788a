"""What a token does to a tile of a state, and how such a tile comes from a slot and goes to one.

Arithmetic: `millpond.ops.reference.delta.delta_decode`. A tile is some value channels of one head,
all key channels of them, in fp32 registers. Plain decode and verify advance a state with the same
functions on the same tile, so that both fold the same tokens to the same bytes and read the same
outputs. Knows no launch, and not where tokens come from.

What bounds verify is not its bytes but the sums over keys, two a token. So a row of the tile lies
in few threads: the tile is four of [BV, K / 4], for which Triton gives a row to K / 16 threads, and
the same ones in each; most of a sum is then made within a thread, by multiply-adds across the four,
the rest in log2(K / 16) shuffles. And a token's two sums are of the state before it, S D k and
S D q (D its decay), so neither waits for the other: its output is S D q + (q k) e with e its error,
and the state itself is touched once more only, S D + e k^T. A form with all sums of a run of tokens
at once (small matrices) would read the state less often, but round otherwise than plain decode
does; it was slower, too.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def over_keys(x):
    """x [4, SPAN] summed."""
    return tl.sum(tl.sum(x, 0), 0)


@triton.jit
def in_four(x):
    """x [4, SPAN] as four of [SPAN], as the tiles of a state have their keys."""
    pairs = tl.reshape(tl.trans(x), (x.shape[1], 2, 2))
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def read_by(s, x):
    """s, four of [BV, SPAN], times x, four of [SPAN]: [BV]."""
    total = s[0] * x[0][None, :]
    total = tl.fma(s[1], x[1][None, :], total)
    total = tl.fma(s[2], x[2][None, :], total)
    total = tl.fma(s[3], x[3][None, :], total)
    return tl.sum(total, 1)


@triton.jit
def unit(x, EPS: tl.constexpr):
    """x [4, SPAN] to unit length."""
    return x * tl.rsqrt(over_keys(x * x) + EPS)


@triton.jit
def read_decayed(s, x, keep, BY_CHANNEL: tl.constexpr):
    """What x [4, SPAN] reads of s, four of [BV, SPAN], after the decay: [BV]."""
    if BY_CHANNEL:
        read = read_by(s, in_four(keep * x))
    else:
        read = keep * read_by(s, in_four(x))
    return read


@triton.jit
def advance(s, error, kn, keep, BY_CHANNEL: tl.constexpr):
    """s, four of [BV, SPAN], after a token of this error [BV]."""
    e = error[:, None]
    k = in_four(kn)
    if BY_CHANNEL:
        d = in_four(keep)
        s0 = tl.fma(e, k[0][None, :], s[0] * d[0][None, :])
        s1 = tl.fma(e, k[1][None, :], s[1] * d[1][None, :])
        s2 = tl.fma(e, k[2][None, :], s[2] * d[2][None, :])
        s3 = tl.fma(e, k[3][None, :], s[3] * d[3][None, :])
    else:
        s0 = tl.fma(e, k[0][None, :], s[0] * keep)
        s1 = tl.fma(e, k[1][None, :], s[1] * keep)
        s2 = tl.fma(e, k[2][None, :], s[2] * keep)
        s3 = tl.fma(e, k[3][None, :], s[3] * keep)
    return s0, s1, s2, s3


@triton.jit
def tile_places(head, values, K: tl.constexpr, V: tl.constexpr, SPAN: tl.constexpr):
    """Where the first of a tile's four lies in a slot, [BV, SPAN]; the others follow each other."""
    return head * (V * K) + values[:, None] * K + tl.arange(0, SPAN)[None, :]


@triton.jit
def _inside(slot, values, four, K: tl.constexpr, V: tl.constexpr, SPAN: tl.constexpr):
    """Which elements of one of a tile's four there are: none without a slot."""
    there = values < tl.where(slot >= 0, V, 0)
    return there[:, None] & (four * SPAN + tl.arange(0, SPAN) < K)[None, :]


@triton.jit
def load_state(
    bank, slot, head, values, stride,
    K: tl.constexpr, V: tl.constexpr, SPAN: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One head's rows `values` of a slot, four of [BV, SPAN] fp32; zero where there is no slot."""
    at = bank + tl.maximum(slot, 0) * stride + tile_places(head, values, K, V, SPAN)
    if FULL:
        if slot >= 0:
            s0 = tl.load(at, eviction_policy="evict_first")
            s1 = tl.load(at + SPAN, eviction_policy="evict_first")
            s2 = tl.load(at + 2 * SPAN, eviction_policy="evict_first")
            s3 = tl.load(at + 3 * SPAN, eviction_policy="evict_first")
        else:
            s0 = tl.zeros([values.shape[0], SPAN], tl.float32)
            s1 = tl.zeros([values.shape[0], SPAN], tl.float32)
            s2 = tl.zeros([values.shape[0], SPAN], tl.float32)
            s3 = tl.zeros([values.shape[0], SPAN], tl.float32)
    else:
        s0 = tl.load(at, mask=_inside(slot, values, 0, K, V, SPAN), other=0.0)
        s1 = tl.load(at + SPAN, mask=_inside(slot, values, 1, K, V, SPAN), other=0.0)
        s2 = tl.load(at + 2 * SPAN, mask=_inside(slot, values, 2, K, V, SPAN), other=0.0)
        s3 = tl.load(at + 3 * SPAN, mask=_inside(slot, values, 3, K, V, SPAN), other=0.0)
    return s0, s1, s2, s3


@triton.jit
def store_state(
    bank, slot, s, head, values, stride,
    K: tl.constexpr, V: tl.constexpr, SPAN: tl.constexpr, FULL: tl.constexpr,
    DOUBLED: tl.constexpr,
):  # fmt: skip
    """s, four of [BV, SPAN], into one head's rows of a slot, unless there is none.

    Where elements are held by several threads each, all have read the slot before one overwrites
    it.
    """
    if DOUBLED:
        tl.debug_barrier()
    at = bank + tl.maximum(slot, 0) * stride + tile_places(head, values, K, V, SPAN)
    if FULL:
        if slot >= 0:
            tl.store(at, s[0], eviction_policy="evict_first")
            tl.store(at + SPAN, s[1], eviction_policy="evict_first")
            tl.store(at + 2 * SPAN, s[2], eviction_policy="evict_first")
            tl.store(at + 3 * SPAN, s[3], eviction_policy="evict_first")
    else:
        tl.store(at, s[0], mask=_inside(slot, values, 0, K, V, SPAN))
        tl.store(at + SPAN, s[1], mask=_inside(slot, values, 1, K, V, SPAN))
        tl.store(at + 2 * SPAN, s[2], mask=_inside(slot, values, 2, K, V, SPAN))
        tl.store(at + 3 * SPAN, s[3], mask=_inside(slot, values, 3, K, V, SPAN))
