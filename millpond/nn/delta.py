"""The two gated delta rule mixers, from slot to slot: KDA (GLM) and GDN (Qwen).

Knows the projections around convolution and delta rule; what a slot holds, and who may write it, is
not known here. Prompt rows go through the chunk form, the others through the per-token form.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from millpond.memory.arena import Arenas
from millpond.memory.layout import TensorSpec
from millpond.nn.linear import Linear, TensorSource
from millpond.ops.batch import ForwardBatch, RowSlots
from millpond.ops.bind import Bound, Op
from millpond.ops.reference.delta import Gate


def slot_tensors(
    layer: int,
    *,
    key_heads: int,
    key_dim: int,
    value_heads: int,
    value_dim: int,
    conv_width: int,
    dtype: torch.dtype,
) -> tuple[TensorSpec, TensorSpec]:
    """What one such layer keeps in a slot."""
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return (
        TensorSpec(layer, "recurrent", (value_heads, value_dim, key_dim), torch.float32),
        TensorSpec(layer, "conv", (channels, conv_width - 1), dtype),
    )


class _DeltaCore:
    """Convolution and delta rule of one layer over both forms of a batch."""

    def __init__(
        self,
        layer: int,
        conv: torch.Tensor,
        gate: Gate,
        *,
        key_heads: int,
        key_dim: int,
        value_heads: int,
        value_dim: int,
        ops: Bound,
    ) -> None:
        self.layer = layer
        self.conv = conv
        self.gate = gate
        self.key_shape = (key_heads, key_dim)
        self.value_shape = (value_heads, value_dim)
        self.sizes = (key_heads * key_dim, key_heads * key_dim, value_heads * value_dim)
        self.ops = ops

    def __call__(
        self,
        qkv: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        batch: ForwardBatch,
        arenas: Arenas,
    ) -> torch.Tensor:
        """qkv [T, channels]; decay, raw, [T, H] or [T, H, K]; beta, raw, [T, H] -> [T, H, V]."""
        window = arenas.slots.view(self.layer, "conv")
        bank = arenas.slots.view(self.layer, "recurrent")
        out = qkv.new_empty((qkv.shape[0], *self.value_shape))
        for at, rows, conv, delta in self._forms(batch):
            mixed = conv(qkv[at], self.conv, bank=window, rows=rows)
            q, k, v = (part.contiguous() for part in mixed.split(self.sizes, -1))
            out[at] = delta(
                q.view(-1, *self.key_shape),
                k.view(-1, *self.key_shape),
                v.view(-1, *self.value_shape),
                decay[at],
                beta[at],
                gate=self.gate,
                bank=bank,
                rows=rows,
            )
        return out

    def _forms(self, batch: ForwardBatch) -> Iterator[tuple[slice, RowSlots, Op, Op]]:
        ops, middle = self.ops, batch.num_prefill_tokens
        if batch.prefill.num_rows:
            yield slice(0, middle), batch.prefill, ops.conv_prefill, ops.delta_prefill
        if batch.decode.num_rows:
            yield slice(middle, None), batch.decode, ops.conv_decode, ops.delta_decode


class KimiDelta:
    """KDA: every key channel decays by itself, the output is gated by a sigmoid.

    Tensors under `weights`, with D = heads * dim: {q,k,v}_proj, f_a_proj -> f_b_proj (decay),
    g_a_proj -> g_b_proj (output gate), b_proj (beta), {q,k,v}_conv1d, A_log, dt_bias, o_norm,
    o_proj.
    """

    def __init__(
        self,
        weights: TensorSource,
        layer: int,
        *,
        hidden: int,
        heads: int,
        dim: int,
        conv_width: int,
        lower_bound: float | None,
        eps: float,
        ops: Bound,
    ) -> None:
        width = heads * dim
        self.shape = (heads, dim)
        self.inputs = Linear(
            weights,
            (
                ("q_proj.weight", width),
                ("k_proj.weight", width),
                ("v_proj.weight", width),
                ("f_a_proj.weight", dim),
                ("g_a_proj.weight", dim),
                ("b_proj.weight", heads),
            ),
            hidden,
            ops,
        )
        self.decay = Linear(weights, (("f_b_proj.weight", width),), dim, ops)
        self.output_gate = Linear(weights, (("g_b_proj.weight", width),), dim, ops)
        self.output = Linear(weights, (("o_proj.weight", hidden),), width, ops)
        self.norm = weights.take("o_norm.weight", (dim,), dtype=torch.float32)
        self.eps = eps
        conv = weights.take_rows(
            [(f"{x}_conv1d.weight", width) for x in "qkv"], (1, conv_width), dtype=torch.float32
        )
        gate = Gate(
            weights.take("A_log", (heads,), dtype=torch.float32),
            weights.take("dt_bias", (width,), dtype=torch.float32),
            lower_bound,
        )
        self.core = _DeltaCore(
            layer,
            conv.squeeze(1),
            gate,
            key_heads=heads,
            key_dim=dim,
            value_heads=heads,
            value_dim=dim,
            ops=ops,
        )
        self.width = width
        self.ops = ops

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, arenas: Arenas) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        mixed = self.inputs(x)
        qkv = mixed[:, : 3 * self.width]
        f, g, beta = (
            part.contiguous()
            for part in mixed[:, 3 * self.width :].split(self.inputs.sizes[3:], -1)
        )
        decay = self.decay(f).view(-1, *self.shape)
        gate = self.output_gate(g).view(-1, *self.shape)
        out = self.core(qkv, decay, beta, batch, arenas)
        out = self.ops.gated_rms_norm_sigmoid(out, gate, self.norm, self.eps)
        return self.output(out.flatten(1))


class GatedDelta:
    """GDN: one decay per value head, the output is gated by a SiLU.

    Tensors under `weights`: in_proj_qkv (q, k, then v), in_proj_z (output gate), in_proj_b (beta),
    in_proj_a (decay), conv1d, A_log, dt_bias, norm, out_proj.
    """

    def __init__(
        self,
        weights: TensorSource,
        layer: int,
        *,
        hidden: int,
        key_heads: int,
        key_dim: int,
        value_heads: int,
        value_dim: int,
        conv_width: int,
        eps: float,
        ops: Bound,
    ) -> None:
        values = value_heads * value_dim
        self.channels = 2 * key_heads * key_dim + values
        self.shape = (value_heads, value_dim)
        self.inputs = Linear(
            weights,
            (
                ("in_proj_qkv.weight", self.channels),
                ("in_proj_z.weight", values),
                ("in_proj_b.weight", value_heads),
                ("in_proj_a.weight", value_heads),
            ),
            hidden,
            ops,
        )
        self.output = Linear(weights, (("out_proj.weight", hidden),), values, ops)
        # Stored in fp32 by most releases: kept so, since it decides in which dtype the norm works.
        self.norm = weights.take(
            "norm.weight", (value_dim,), dtype=weights.stored_dtype("norm.weight")
        )
        self.eps = eps
        conv = weights.take("conv1d.weight", (self.channels, 1, conv_width), dtype=torch.float32)
        gate = Gate(
            weights.take("A_log", (value_heads,), dtype=torch.float32),
            weights.take("dt_bias", (value_heads,), dtype=torch.float32),
        )
        self.core = _DeltaCore(
            layer,
            conv.squeeze(1),
            gate,
            key_heads=key_heads,
            key_dim=key_dim,
            value_heads=value_heads,
            value_dim=value_dim,
            ops=ops,
        )
        self.ops = ops

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, arenas: Arenas) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        qkv, z, beta, decay = self.inputs(x).split(self.inputs.sizes, -1)
        out = self.core(qkv, decay.contiguous(), beta.contiguous(), batch, arenas)
        z = z.contiguous().view(-1, *self.shape)
        out = self.ops.gated_rms_norm_silu(out, z, self.norm, self.eps)
        return self.output(out.flatten(1))
