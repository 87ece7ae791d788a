"""How far what runs on a GPU may be from the CPU reference: one line each, with the reason.

absolute, relative; the relative part is of the reference's element. Loosening a line needs a second
reader. Windows, rings and other copies have no line: they are equal byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Within:
    absolute: float
    relative: float


UNIT = 2.0**-7
"""Neighbours in bf16 are at most so far apart, as a share of the smaller. Two results that differ
in the last bits of fp32 may lie on the two sides of the middle, and are then neighbours."""

TABLE = {
    # Four products summed in the reference's order; exp and contraction to FMA differ in last bits.
    ("conv", "float32"): Within(1e-6, 1e-5),
    # The same, then one rounding to bf16 that may fall to either side.
    ("conv", "bfloat16"): Within(1e-6, UNIT),
    # Per token: sums over at most 128 keys in another order, exp and rsqrt of another library; a
    # handful of tokens, no cancellation beyond the delta rule's own.
    ("tokens", "state"): Within(4e-6, 4e-6),
    ("tokens", "float32"): Within(4e-6, 4e-6),
    # The same, then one rounding to bf16 that may fall to either side.
    ("tokens", "bfloat16"): Within(4e-6, UNIT),
    # Convolution, then the delta rule, in fp32: the errors of both.
    ("steps", "state"): Within(8e-6, 8e-6),
    ("steps", "float32"): Within(8e-6, 8e-6),
    # Between them queries, keys and values are rounded to bf16, which may fall to either side:
    # terms of order one, a handful of tokens.
    ("steps of bf16", "state"): Within(2**-6, 2**-6),
    ("steps", "bfloat16"): Within(2**-6, 2**-6),
    # 64 tokens at once: sums over 64 tokens and 128 keys in another order, a triangular solve.
    ("chunks", "state"): Within(1e-5, 1e-5),
    ("chunks", "float32"): Within(1e-5, 1e-5),
    # Operands of products rounded to bf16 (state, queries and keys with their decay, u, w): a few
    # units of 2^-9 of the largest terms, which are of order one.
    ("chunks of bf16", "state"): Within(2e-2, 2e-2),
    ("chunks", "bfloat16"): Within(2e-2, 2e-2),
    # Sums over keys and positions in another order, exp2 for exp; outputs are means of values of
    # order one.
    ("attention", "float32"): Within(2e-6, 4e-6),
    # Weights rounded to bf16 before they meet the values (2^-9 each, of a mean of order one), then
    # one rounding of the result that may fall to either side.
    ("attention", "bfloat16"): Within(2**-8, UNIT / 2),
    # The same, then a sigmoid.
    ("gated attention", "float32"): Within(2e-6, 4e-6),
    # What is attended to, the sigmoid and their product, each rounded to bf16.
    ("gated attention", "bfloat16"): Within(2**-8, 3 * UNIT),
    # A norm, then a rotation of two of its outputs, of order three, that may cancel.
    ("turned", "float32"): Within(4e-6, 4e-6),
    # The same; the norm, both products and their sum are rounded to bf16.
    ("turned", "bfloat16"): Within(2**-5, UNIT),
    # Sums of squares in another order, rsqrt and exp of another library.
    ("norms", "float32"): Within(1e-6, 4e-6),
    # The same before up to three roundings to bf16 (norm, weight, gate), one of which falls to the
    # other side and takes the last one along.
    ("norms", "bfloat16"): Within(1e-6, 2 * UNIT),
    # exp of another library, products contracted to FMA.
    ("elements", "float32"): Within(2e-6, 2e-6),
    # The same, then a rounding to bf16 of a factor that falls to the other side and takes the
    # rounding of the result along.
    ("elements", "bfloat16"): Within(1e-6, 2 * UNIT),
    # Sums over the hidden size in another order and in three TF32 parts; probabilities below one.
    ("routes", "float32"): Within(1e-6, 1e-5),
    # The same, then one rounding to bf16 that may fall to either side.
    ("routes", "bfloat16"): Within(1e-6, UNIT),
    # Hundreds of terms of order one, summed in another order and in three TF32 parts.
    ("products", "float32"): Within(1e-5, 1e-5),
    # The same; an input that is rounded before it is scaled, not after; one rounding of the result.
    ("products", "bfloat16"): Within(2**-6, UNIT),
    # Two products in a row, of terms of order one, with an activation between.
    ("experts", "float32"): Within(1e-5, 1e-5),
    # Roundings to bf16 (gate, up, their product, each output) that may fall to either side.
    ("experts", "bfloat16"): Within(2**-6, UNIT),
    # Sums over all streams in another order and in three TF32 parts; 39 divisions of a small matrix
    # carry their errors along without growing them.
    ("hyper", "float32"): Within(2e-6, 1e-5),
    # The same, then up to three roundings to bf16 (weight, product, sum) that may fall to either
    # side, of terms of order one that may cancel.
    ("hyper", "bfloat16"): Within(2**-7, UNIT),
    # Log probabilities of a whole model of four layers: all of the above, and products that a
    # library sums in its own order (another order alone makes 3e-5).
    ("model", "float32"): Within(5e-4, 5e-4),
    # States, windows, keys and values of such a model, after up to 330 tokens (alone: 2e-5).
    ("model", "state"): Within(5e-4, 5e-4),
}

BF16_NOISE = 1.5
"""A whole model in bf16 may be so many times as far from fp32 as the reference in bf16 is, in the
median over all places. Both round in the same places; what they sum in another order, they round
independently."""

BF16_STATE_NOISE = 5.0
"""The same of a state, which is one place: a token that takes another expert by a hair is part of
it from then on (another order of summing alone makes 3)."""


def within(op: str, dtype: object) -> dict[str, float]:
    """Keyword arguments for `torch.testing.assert_close`."""
    line = TABLE[op, str(dtype).removeprefix("torch.")]
    return {"atol": line.absolute, "rtol": line.relative}
