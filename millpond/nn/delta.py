"""The two gated delta rule mixers, from slot to slot: KDA (GLM) and GDN (Qwen).

Each has the norm before it, takes the residual stream as x + y and gives back the sum and what it
adds to it. Knows the projections around convolution and delta rule; what a slot holds, and who may
write it, is not known here. Prompt rows go through the chunk form, decode rows through the
per-token form, rows with drafts through the one that folds what was accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millpond.memory.arena import Arenas
from millpond.memory.layout import TensorSpec
from millpond.nn.linear import Linear, TensorSource
from millpond.nn.residual import RMSNorm
from millpond.ops.batch import ForwardBatch
from millpond.ops.bind import Bound
from millpond.ops.reference.delta import Gate


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads of a layer and their sizes; the value heads of one key head are consecutive."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Channels of all queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """What the convolution sees of a token: queries, keys, then values."""
        return sum(self.sizes)


def slot_tensors(
    layer: int, heads: DeltaHeads, *, conv_width: int, dtype: torch.dtype
) -> tuple[TensorSpec, TensorSpec]:
    """What one such layer keeps in a slot."""
    state = (heads.value_heads, heads.value_dim, heads.key_dim)
    return (
        TensorSpec(layer, "recurrent", state, torch.float32),
        TensorSpec(layer, "conv", (conv_width - 1, heads.channels), dtype),
    )


def ring_tensors(
    layer: int,
    heads: DeltaHeads,
    *,
    decay: tuple[int, ...],
    num_drafts: int,
    dtype: torch.dtype,
) -> tuple[TensorSpec, ...]:
    """What one such layer keeps in a seat of the drafts it verifies: their raw inputs, two banks.

    `decay` is the shape of a token's decay input: (heads,), or (heads, key_dim) if by key channel.
    """
    of_token = {
        "ring_conv": (heads.channels,),
        "ring_decay": decay,
        "ring_beta": (heads.value_heads,),
    }
    return tuple(
        TensorSpec(layer, name, (2, num_drafts, *shape), dtype) for name, shape in of_token.items()
    )


class _DeltaCore:
    """Convolution and delta rule of one layer over both forms of a batch."""

    def __init__(
        self,
        layer: int,
        conv: torch.Tensor,
        gate: Gate,
        heads: DeltaHeads,
        ops: Bound,
    ) -> None:
        self.layer = layer
        self.conv = conv.t().contiguous().t()  # channels lie together, as in a slot's window
        self.gate = gate
        self.heads = heads
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
        memory = {
            "gate": self.gate,
            "bank": arenas.slots.view(self.layer, "recurrent"),
        }
        window = arenas.slots.view(self.layer, "conv").mT
        middle, end = batch.num_prefill_tokens, batch.first_verify_token
        found = []
        if batch.prefill.num_rows:
            rows = batch.prefill
            of_prompts = (qkv, decay, beta)
            if middle < qkv.shape[0]:
                of_prompts = (qkv[:middle], decay[:middle], beta[:middle])
            mixed = self.ops.conv_prefill(of_prompts[0], self.conv, bank=window, rows=rows)
            found.append(
                self.ops.delta_prefill(*self._by_head(mixed), *of_prompts[1:], rows=rows, **memory)
            )
        if batch.decode.num_rows:
            at = slice(middle, end)
            found.append(
                self.ops.mix_decode(
                    qkv[at],
                    self.conv,
                    decay[at],
                    beta[at],
                    window=window,
                    rows=batch.decode,
                    **memory,
                )
            )
        if batch.verify is not None and batch.verify.num_rows:
            seats = arenas.seats
            found.append(
                self.ops.mix_verify(
                    qkv[end:],
                    self.conv,
                    decay[end:],
                    beta[end:],
                    window=window,
                    ring=seats.view(self.layer, "ring_conv"),
                    ring_decay=seats.view(self.layer, "ring_decay"),
                    ring_beta=seats.view(self.layer, "ring_beta"),
                    rows=batch.verify,
                    **memory,
                )
            )
        return found[0] if len(found) == 1 else torch.cat(found)

    def _by_head(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the convolution gives, [T, channels], as q, k [T, Hk, K] and v [T, H, V].

        Views of its rows.
        """
        h, tokens = self.heads, mixed.shape[0]
        q, k, v = mixed.split_with_sizes(h.sizes, -1)
        return (
            q.view(tokens, h.key_heads, h.key_dim),
            k.view(tokens, h.key_heads, h.key_dim),
            v.view(tokens, h.value_heads, h.value_dim),
        )


class KimiDelta:
    """KDA: every key channel decays by itself, the output is gated by a sigmoid.

    Tensors under `weights`, with D = heads * dim: {q,k,v}_proj, f_a_proj -> f_b_proj (decay),
    g_a_proj -> g_b_proj (output gate), b_proj (beta), {q,k,v}_conv1d, A_log, dt_bias, o_norm,
    o_proj. Keys and values have as many heads, of one size.
    """

    def __init__(
        self,
        weights: TensorSource,
        layer: int,
        before: RMSNorm,
        *,
        hidden: int,
        heads: DeltaHeads,
        conv_width: int,
        lower_bound: float | None,
        eps: float,
        ops: Bound,
    ) -> None:
        dim, width = heads.key_dim, heads.sizes[0]
        self.shape = (heads.key_heads, dim)
        self.before = before
        self.inputs = Linear(
            weights,
            (
                ("q_proj.weight", width),
                ("k_proj.weight", width),
                ("v_proj.weight", width),
                ("f_a_proj.weight", dim),
                ("g_a_proj.weight", dim),
                ("b_proj.weight", heads.key_heads),
            ),
            hidden,
            ops,
            cut=(3 * width, dim, dim, heads.key_heads),
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
            weights.take("A_log", (heads.key_heads,), dtype=torch.float32),
            weights.take("dt_bias", (width,), dtype=torch.float32),
            lower_bound,
        )
        self.core = _DeltaCore(layer, conv.squeeze(1), gate, heads, ops)
        self.width = width
        self.ops = ops

    def __call__(
        self, x: torch.Tensor, y: torch.Tensor | None, batch: ForwardBatch, arenas: Arenas
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] and y, what is added to it -> x + y (or x), and the next y."""
        (qkv, f, g, beta), x = self.inputs.split(self.before, x, y)
        decay = self.decay(f).view(-1, *self.shape)
        gate = self.output_gate(g).view(-1, *self.shape)
        out = self.core(qkv, decay, beta, batch, arenas)
        return x, self.ops.gated_norm_linear(
            out, gate, self.norm, self.output.weight, eps=self.eps, silu=False
        )


class GatedDelta:
    """GDN: one decay per value head, the output is gated by a SiLU.

    Tensors under `weights`: in_proj_qkv (q, k, then v), in_proj_z (output gate), in_proj_b (beta),
    in_proj_a (decay), conv1d, A_log, dt_bias, norm, out_proj.
    """

    def __init__(
        self,
        weights: TensorSource,
        layer: int,
        before: RMSNorm,
        *,
        hidden: int,
        heads: DeltaHeads,
        conv_width: int,
        eps: float,
        ops: Bound,
    ) -> None:
        values = heads.sizes[-1]
        self.shape = (heads.value_heads, heads.value_dim)
        self.before = before
        self.inputs = Linear(
            weights,
            (
                ("in_proj_qkv.weight", heads.channels),
                ("in_proj_z.weight", values),
                ("in_proj_b.weight", heads.value_heads),
                ("in_proj_a.weight", heads.value_heads),
            ),
            hidden,
            ops,
        )
        self.output = Linear(weights, (("out_proj.weight", hidden),), values, ops)
        # Stored in fp32 by most releases: kept so, since it decides in which dtype the norm works.
        self.norm = weights.take(
            "norm.weight", (heads.value_dim,), dtype=weights.stored_dtype("norm.weight")
        )
        self.eps = eps
        conv = weights.take("conv1d.weight", (heads.channels, 1, conv_width), dtype=torch.float32)
        gate = Gate(
            weights.take("A_log", (heads.value_heads,), dtype=torch.float32),
            weights.take("dt_bias", (heads.value_heads,), dtype=torch.float32),
        )
        self.core = _DeltaCore(layer, conv.squeeze(1), gate, heads, ops)
        self.ops = ops

    def __call__(
        self, x: torch.Tensor, y: torch.Tensor | None, batch: ForwardBatch, arenas: Arenas
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] and y, what is added to it -> x + y (or x), and the next y."""
        (qkv, z, beta, decay), x = self.inputs.split(self.before, x, y)
        out = self.core(qkv, decay, beta, batch, arenas)
        return x, self.ops.gated_norm_linear(
            out, z.view(out.shape), self.norm, self.output.weight, eps=self.eps, silu=True
        )
