"""How far a layer's kernel may be from the CPU reference: one line each, with the reason.

absolute, relative; the relative part is of the reference's element. Copies have no line: they are
equal byte for byte.
"""

from __future__ import annotations

from tests.ops.triton.tolerances import BF16, Within

TABLE = {
    # Sums over keys and positions in another order, exp2 for exp; outputs are means of values of
    # order one.
    ("attention", "float32"): Within(2e-6, 4e-6),
    # Weights rounded to bf16 before they meet the values (2^-9 each, of a mean of order one), then
    # one rounding of the result that may fall to either side.
    ("attention", "bfloat16"): Within(2**-8, BF16),
    # Sums of squares in another order, rsqrt and exp of another library.
    ("norms", "float32"): Within(1e-6, 4e-6),
    # The same before a rounding to bf16, and up to three roundings (norm, weight, gate) that may
    # each fall to either side.
    ("norms", "bfloat16"): Within(1e-6, 3 * BF16),
    # exp of another library, products contracted to FMA.
    ("elements", "float32"): Within(2e-6, 2e-6),
    # The same, then one rounding to bf16 that may fall to either side, of a factor and the result.
    ("elements", "bfloat16"): Within(1e-6, 2 * BF16),
    # Sums over the hidden size in another order and in three TF32 parts; probabilities below one.
    ("routes", "float32"): Within(1e-6, 1e-5),
    # The same, then one rounding to bf16 that may fall to either side.
    ("routes", "bfloat16"): Within(1e-6, BF16),
    # Two products in a row, of terms of order one, with an activation between.
    ("experts", "float32"): Within(1e-5, 1e-5),
    # Roundings to bf16 (gate, up, their product, each output) that may fall to either side.
    ("experts", "bfloat16"): Within(2**-6, 2 * BF16),
    # Sums over all streams in another order and in three TF32 parts; 39 divisions of a small matrix
    # carry their errors along without growing them.
    ("hyper", "float32"): Within(2e-6, 1e-5),
    # The same, then up to three roundings to bf16 (weight, product, sum) that may fall to either
    # side, of terms of order one that may cancel.
    ("hyper", "bfloat16"): Within(2**-7, 2 * BF16),
}


def within(op: str, dtype: object) -> dict[str, float]:
    """Keyword arguments for `torch.testing.assert_close`."""
    line = TABLE[op, str(dtype).removeprefix("torch.")]
    return {"atol": line.absolute, "rtol": line.relative}
