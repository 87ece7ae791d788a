"""Feed-forward layers: one SwiGLU, or a mixture of experts with a shared one, for both families.

Each has the norm before it, takes the residual stream as x + y and gives back the sum and what it
adds to it. Knows the names of its tensors; how tokens are grouped by expert is the ops' concern.
"""

from __future__ import annotations

import torch

from millpond.nn.linear import Linear, TensorSource
from millpond.nn.residual import RMSNorm
from millpond.ops.bind import Bound


class SwiGlu:
    """down(swiglu(gate x, up x)); with `limit` both factors are clamped first."""

    def __init__(
        self,
        weights: TensorSource,
        *,
        hidden: int,
        inner: int,
        ops: Bound,
        limit: float | None = None,
    ) -> None:
        parts = (("gate_proj.weight", inner), ("up_proj.weight", inner))
        self.inputs = Linear(weights, parts, hidden, ops)
        self.output = Linear(weights, (("down_proj.weight", hidden),), inner, ops)
        self.limit = limit
        self.ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self.output(self.ops.linear_swiglu(x, self.inputs.weight, limit=self.limit))

    def after(
        self, norm: RMSNorm, x: torch.Tensor, y: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, y [T, hidden] -> x + y (or x), and this of its norm."""
        active, total = self.ops.norm_swiglu(
            x,
            y,
            norm.weight,
            self.inputs.weight,
            eps=norm.eps,
            zero_centred=norm.zero_centred,
            limit=self.limit,
        )
        return total, self.output(active)


class Mlp:
    """One SwiGLU behind its norm."""

    def __init__(
        self,
        weights: TensorSource,
        norm: RMSNorm,
        *,
        hidden: int,
        inner: int,
        ops: Bound,
        limit: float | None = None,
    ) -> None:
        self.norm = norm
        self.inner = SwiGlu(weights, hidden=hidden, inner=inner, ops=ops, limit=limit)

    def __call__(
        self, x: torch.Tensor, y: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] and y, what is added to it -> x + y (or x), and the next y."""
        return self.inner.after(self.norm, x, y)


class SigmoidMoe:
    """Experts scored by a sigmoid and chosen with a bias, plus an ungated shared expert (GLM)."""

    def __init__(
        self,
        weights: TensorSource,
        norm: RMSNorm,
        *,
        hidden: int,
        inner: int,
        shared_inner: int,
        experts: int,
        top_k: int,
        scale: float,
        renormalise: bool,
        limit: float | None,
        ops: Bound,
    ) -> None:
        self.norm = norm
        self.gate = weights.take("gate.weight", (experts, hidden), dtype=torch.float32)
        self.bias = weights.take("gate.e_score_correction_bias", (experts,), dtype=torch.float32)
        self.gate_up, self.down = weights.take_experts(
            "experts", experts=experts, hidden=hidden, inner=inner
        )
        self.shared = SwiGlu(
            weights.under("shared_experts."),
            hidden=hidden,
            inner=shared_inner,
            ops=ops,
            limit=limit,
        )
        self.top_k = top_k
        self.scale = scale
        self.renormalise = renormalise
        self.limit = limit
        self.ops = ops

    def __call__(
        self, x: torch.Tensor, y: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] and y, what is added to it -> x + y (or x), and the next y."""
        inner, total = self.norm.of_sum(x, y)
        weights, experts = self.ops.moe_route_sigmoid(
            inner,
            self.gate,
            self.bias,
            top_k=self.top_k,
            scale=self.scale,
            renormalise=self.renormalise,
        )
        return total, self.ops.grouped_experts(
            inner,
            weights,
            experts,
            self.gate_up,
            self.down,
            limit=self.limit,
            shared=self.shared(inner),
        )


class SoftmaxMoe:
    """Experts chosen by a softmax over all of them, plus a gated shared expert (Qwen)."""

    def __init__(
        self,
        weights: TensorSource,
        norm: RMSNorm,
        *,
        hidden: int,
        inner: int,
        shared_inner: int,
        experts: int,
        top_k: int,
        ops: Bound,
    ) -> None:
        self.norm = norm
        self.gate = weights.take("gate.weight", (experts, hidden))
        self.gate_up, self.down = weights.take_experts(
            "experts", experts=experts, hidden=hidden, inner=inner
        )
        self.shared = SwiGlu(
            weights.under("shared_expert."), hidden=hidden, inner=shared_inner, ops=ops
        )
        self.shared_gate = Linear(weights, (("shared_expert_gate.weight", 1),), hidden, ops)
        self.top_k = top_k
        self.ops = ops

    def __call__(
        self, x: torch.Tensor, y: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] and y, what is added to it -> x + y (or x), and the next y."""
        inner, total = self.norm.of_sum(x, y)
        weights, experts = self.ops.moe_route_softmax(inner, self.gate, top_k=self.top_k)
        return total, self.ops.grouped_experts(
            inner,
            weights,
            experts,
            self.gate_up,
            self.down,
            shared=self.shared(inner),
            shared_gate=self.shared_gate(inner),
        )
