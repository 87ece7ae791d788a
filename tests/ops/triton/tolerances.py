"""How far a kernel may be from the CPU reference: one line each, with the reason.

absolute, relative; the relative part is of the reference's element. Loosening a line needs a second
reader. Windows, rings and other copies have no line: they are equal byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Within:
    absolute: float
    relative: float


FP32, BF16 = 2.0**-24, 2.0**-8

TABLE = {
    # Four products summed in the reference's order; exp and contraction to FMA differ in last bits.
    ("conv", "float32"): Within(1e-6, 1e-5),
    # The same, then one rounding to bf16 that may fall to either side: one unit in the last place.
    ("conv", "bfloat16"): Within(1e-6, BF16),
    # Per token: sums over at most 128 keys in another order, exp and rsqrt of another library; a
    # handful of tokens, no cancellation beyond the delta rule's own.
    ("tokens", "state"): Within(4e-6, 4e-6),
    ("tokens", "float32"): Within(4e-6, 4e-6),
    # The same, then one rounding to bf16 that may fall to either side.
    ("tokens", "bfloat16"): Within(4e-6, BF16),
    # 64 tokens at once: sums over 64 tokens and 128 keys in another order, a triangular solve.
    ("chunks", "state"): Within(1e-5, 1e-5),
    ("chunks", "float32"): Within(1e-5, 1e-5),
    # Operands of products rounded to bf16 (state, queries and keys with their decay, u, w): a few
    # units of 2^-9 of the largest terms, which are of order one.
    ("chunks of bf16", "state"): Within(2e-2, 2e-2),
    ("chunks", "bfloat16"): Within(2e-2, 2e-2),
}


def within(op: str, dtype: object) -> dict[str, float]:
    """Keyword arguments for `torch.testing.assert_close`."""
    line = TABLE[op, str(dtype).removeprefix("torch.")]
    return {"atol": line.absolute, "rtol": line.relative}
