"""Sinkhorn normalisation of small matrices, differentiable; one kernel each way on CUDA.

Always `2 * iterations - 1` steps, columns first: the count is part of the model.
"""

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU-only install
    triton = None


def sinkhorn(matrix: Tensor, iterations: int, eps: float) -> Tensor:
    """matrix: [N, n, n] positive float32. Returns it normalised, ending on columns."""
    if matrix.is_cuda:
        return torch.ops.millpond_training.sinkhorn(matrix, iterations, eps)
    for step in range(2 * iterations - 1):
        matrix = matrix / (matrix.sum(-2 if step % 2 == 0 else -1, keepdim=True) + eps)
    return matrix


if triton is not None:

    @triton.jit
    def _tile(N, n: tl.constexpr, BLOCK: tl.constexpr):
        rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, n)
        at = rows[:, None, None] * n * n + i[None, :, None] * n + i[None, None, :]
        return at, (at >= 0) & (rows[:, None, None] < N)

    @triton.jit
    def _forward(source, out, N, eps, STEPS: tl.constexpr, n: tl.constexpr, BLOCK: tl.constexpr):
        at, inside = _tile(N, n, BLOCK)
        x = tl.load(source + at, mask=inside, other=1.0)
        for step in tl.static_range(STEPS):
            if step % 2 == 0:
                x = x / (tl.sum(x, 1)[:, None, :] + eps)
            else:
                x = x / (tl.sum(x, 2)[:, :, None] + eps)
        tl.store(out + at, x, mask=inside)

    @triton.jit
    def _backward(
        source, d_out, scratch, d_source, N, eps,
        STEPS: tl.constexpr, n: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        at, inside = _tile(N, n, BLOCK)
        x = tl.load(source + at, mask=inside, other=1.0)
        for step in tl.static_range(STEPS):
            tl.store(scratch + step * N * n * n + at, x, mask=inside)
            if step % 2 == 0:
                x = x / (tl.sum(x, 1)[:, None, :] + eps)
            else:
                x = x / (tl.sum(x, 2)[:, :, None] + eps)
        tl.debug_barrier()
        d = tl.load(d_out + at, mask=inside, other=0.0)
        for back in tl.static_range(STEPS):
            x = tl.load(scratch + (STEPS - 1 - back) * N * n * n + at, mask=inside, other=1.0)
            if (STEPS - 1 - back) % 2 == 0:
                total = tl.sum(x, 1)[:, None, :] + eps
                d = (d - tl.sum(d * x / total, 1)[:, None, :]) / total
            else:
                total = tl.sum(x, 2)[:, :, None] + eps
                d = (d - tl.sum(d * x / total, 2)[:, :, None]) / total
        tl.store(d_source + at, d, mask=inside)

    _BLOCK = 64

    @torch.library.custom_op("millpond_training::sinkhorn", mutates_args=())
    def _op(matrix: Tensor, iterations: int, eps: float) -> Tensor:
        matrix = matrix.contiguous()
        out = torch.empty_like(matrix)
        count, n = matrix.shape[:2]
        grid = (triton.cdiv(count, _BLOCK),)
        _forward[grid](matrix, out, count, eps, 2 * iterations - 1, n, _BLOCK, num_warps=2)
        return out

    @torch.library.custom_op("millpond_training::sinkhorn_grad", mutates_args=())
    def _grad_op(matrix: Tensor, grad: Tensor, iterations: int, eps: float) -> Tensor:
        matrix, grad = matrix.contiguous(), grad.contiguous()
        out = torch.empty_like(matrix)
        count, n = matrix.shape[:2]
        steps = 2 * iterations - 1
        scratch = matrix.new_empty(steps, *matrix.shape)
        grid = (triton.cdiv(count, _BLOCK),)
        _backward[grid](matrix, grad, scratch, out, count, eps, steps, n, _BLOCK, num_warps=2)
        return out

    @_op.register_fake
    def _(matrix: Tensor, iterations: int, eps: float) -> Tensor:
        return torch.empty_like(matrix, memory_format=torch.contiguous_format)

    @_grad_op.register_fake
    def _(matrix: Tensor, grad: Tensor, iterations: int, eps: float) -> Tensor:
        return torch.empty_like(matrix, memory_format=torch.contiguous_format)

    def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.settings = inputs[1:]

    def _pull(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (matrix,) = ctx.saved_tensors
        return torch.ops.millpond_training.sinkhorn_grad(matrix, grad, *ctx.settings), None, None

    _op.register_autograd(_pull, setup_context=_save)
