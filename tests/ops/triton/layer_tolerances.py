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
}


def within(op: str, dtype: object) -> dict[str, float]:
    """Keyword arguments for `torch.testing.assert_close`."""
    line = TABLE[op, str(dtype).removeprefix("torch.")]
    return {"atol": line.absolute, "rtol": line.relative}
