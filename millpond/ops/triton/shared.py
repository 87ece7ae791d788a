"""What the kernels have in common: element functions, products, finding rows, reports.

Rules of every kernel here. What a model's shape or the start-up configuration fixes is a
`tl.constexpr`; what varies with the live batch is a runtime value that Triton must not specialise
on (`live` names it, also pointers: a view's alignment is a property of the batch). Slots are 64-bit
before they meet a stride. What must not be read is masked away, never multiplied. No atomics: each
value has one writer and a fixed order of sums.

A slot that one row of a call writes may be read by that row only: programs of different rows run at
the same time. Who leases slots guarantees it (writing needs the only lease there is).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from millpond.ops.triton.launch import quick

EMULATED = tl.constexpr(bool(knobs.runtime.interpret))
"""Under the interpreter, which cannot multiply bf16 matrices, and cuts where it should round."""

LAUNCH = {"enable_fp_fusion": True}
"""Said at every launch, since Triton's default changes between versions."""

UNFUSED = {"enable_fp_fusion": False}
"""For kernels that must give the same bytes as others: what a compiler fuses depends on the code
around it, so these say themselves where a product and a sum are one (`tl.fma`)."""

META = (
    "cu_seqlens",
    "state_in",
    "state_out",
    "export_row",
    "export_offset",
    "export_end",
    "export_slot",
    "base",
    "pending",
    "num_drafts",
    "parity",
    "seats",
    "report",
    "num_rows",
    "num_exports",
    "beta_stride",  # of one token, whatever a view of it says
)
"""Arguments that describe the live batch, wherever a kernel has them."""

TOKENS = ("x", "y", "q", "k", "v", "o", "decay", "beta", "gate")
"""Arguments that begin at a token of the live batch: their alignment may differ between steps."""


def kernel(fn: Callable[..., Any]) -> Any:
    """`triton.jit` that never compiles anew because of the live batch."""
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    return quick(
        triton.jit(
            fn,
            do_not_specialize=[n for n in names if n in META],
            do_not_specialize_on_alignment=[n for n in names if n in META or n in TOKENS],
        )
    )


def report_for(targets: int, device: torch.device) -> torch.Tensor:
    """[2, targets] int64, slots and tokens folded: a kernel must tell every entry (`told`)."""
    return torch.empty((2, targets), dtype=torch.int64, device=device)


def aligned(*tokens: torch.Tensor) -> bool:
    """Whether every token of these tensors begins at a multiple of 16 bytes.

    Follows from the model's sizes, not from the live batch: who cuts tokens out of such a tensor
    gets such a tensor.
    """
    return not any((x.data_ptr() | x.stride(0) * x.itemsize) % 16 and x.numel() for x in tokens)


def cdiv(n: int, size: int) -> int:
    """How many of `size` hold n. Triton's own may be called in kernels, too, and takes its time."""
    return -(-n // size)


def power_of_two(n: int) -> int:
    """The next power of two, as tiles need it."""
    return 1 << (n - 1).bit_length()


def token_stride(x: torch.Tensor) -> int:
    """Elements from one token of x [T, ...] to the next; what belongs to a token is contiguous."""
    shape, strides = x.shape, x.stride()
    expected = 1
    for place in range(len(shape) - 1, 0, -1):
        size = shape[place]
        if size > 1:
            if strides[place] != expected:
                raise ValueError(f"{tuple(shape)} with strides {strides}: a token has gaps")
            expected *= size
    return strides[0]


def head_stride(x: torch.Tensor) -> int:
    """Elements from one head of x [T, H, D] to the next; a head's own are contiguous."""
    if x.shape[2] > 1 and x.stride(2) != 1:
        raise ValueError(f"{tuple(x.shape)} with strides {x.stride()}: a head has gaps")
    return x.stride(1)


def slot_stride(bank: torch.Tensor) -> int:
    """Elements from one slot of a bank to the next; a slot's own elements are contiguous."""
    return token_stride(bank)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in the precision of x."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), linear above 20; what a plain log(1 + e) loses of a small e is restored."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, log1p)


@triton.jit
def log_decay(raw, rate, bias, bound, BOUNDED: tl.constexpr):
    """As `millpond.ops.reference.delta.log_decay`; rate = exp(a_log)."""
    shifted = raw + bias
    if BOUNDED:
        g = bound * sigmoid(rate * shifted)
    else:
        g = -rate * softplus(shifted)
    return g


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """x, fp32, to the nearest of DTYPE, ties to even."""
    if EMULATED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def product(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """a @ b in fp32, both rounded to OPERAND first; PRECISION says what fp32 operands become."""
    if a.dtype != OPERAND:
        a = rounded(a, OPERAND)
    if b.dtype != OPERAND:
        b = rounded(b, OPERAND)
    if EMULATED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def row_of_block(cu_seqlens, num_rows, block, SIZE: tl.constexpr):
    """The row that block number `block` belongs to, when row r begins at cu[r] // SIZE + r.

    Rows then never share a block, and cu[N] // SIZE + N blocks are enough for all of them: the host
    needs no table. Blocks beyond a row's tokens belong to it and are empty.
    """
    low = 0
    high = num_rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        begin = tl.load(cu_seqlens + middle).to(tl.int32) // SIZE + middle
        low = tl.where(begin <= block, middle, low)
        high = tl.where(begin <= block, high, middle - 1)
    return low


@triton.jit
def tell(report, target, of, slot, folded, written):
    """Report entry `target` of `of`: what the calling program has written."""
    tl.store(report + target, slot, mask=written & (slot >= 0))
    tl.store(report + of + target, folded, mask=written & (slot >= 0))


@triton.jit
def told(report, target, of, slot, folded, wrote, mine):
    """Report entry `target` of `of`, if it is the calling program's: what was written, or -1."""
    slot = slot.to(tl.int64)
    wrote = wrote & (slot >= 0)
    tl.store(report + target, tl.where(wrote, slot, -1), mask=mine)
    tl.store(report + of + target, tl.where(wrote, folded, -1), mask=mine)
