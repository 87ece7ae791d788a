"""The two attention mixers over paged memory: gated grouped-query (Qwen) and sparse latent (GLM).

Each has the norm before it, takes the residual stream as x + y and gives back the sum and what it
adds to it. It writes what its page keeps of a token, then attends; `remember` does the writing
alone, which is all the draft layer needs during the target's own forward. A draft layer attends in
forms of its own: never to entry 0, and in a chain of drafts to what the first of them selected.
"""

from __future__ import annotations

import torch

from millpond.memory.arena import Arenas
from millpond.memory.layout import TensorSpec
from millpond.nn.linear import Linear, TensorSource
from millpond.nn.residual import RMSNorm, ZeroCentredRMSNorm
from millpond.ops.batch import ForwardBatch
from millpond.ops.bind import Bound
from millpond.plan.step import PAGE_SIZE

FIRST_ENTRY = 1
"""The first entry that a draft layer attends to: entry 0 has no hidden vector to be made from, and
training knew none like it."""

INDEX_NORM_EPS = 1e-6
"""Of the indexer's key norm; the families' configurations do not name it."""


def latent_tensors(
    layer: int, *, rank: int, index_dim: int, pool: int, num_drafts: int, dtype: torch.dtype
) -> tuple[tuple[TensorSpec, TensorSpec], TensorSpec]:
    """What a latent layer keeps in a page, and in a seat.

    The seat's tail is a ring of whole pools: a draft that is rejected must not have taken the place
    of a token of the unfinished pool before it.
    """
    tail = -(-(pool + num_drafts) // pool) * pool
    return (
        TensorSpec(layer, "latent", (PAGE_SIZE, rank), dtype),
        TensorSpec(layer, "pooled", (PAGE_SIZE // pool, index_dim), dtype),
    ), TensorSpec(layer, "tail", (tail, 2, index_dim), dtype)


def key_value_tensors(
    layer: int, *, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[TensorSpec, TensorSpec]:
    """What a grouped-query layer keeps in a page."""
    return (
        TensorSpec(layer, "key", (kv_heads, PAGE_SIZE, dim), dtype),
        TensorSpec(layer, "value", (kv_heads, PAGE_SIZE, dim), dtype),
    )


class LatentAttention:
    """MLA without positions, in the absorbed form, made sparse by an indexer over pooled keys.

    Tensors under `weights`: q_a_proj -> q_a_layernorm -> q_b_proj, kv_a_proj_with_mqa ->
    kv_a_layernorm (the latent), kv_b_proj (per head: key rows, then value rows), o_proj, and
    `indexer.`: wq_b, wk, k_norm, weights_proj, index_kpool_compress_gate, index_kpool_compress_ape.
    """

    def __init__(
        self,
        weights: TensorSource,
        layer: int,
        before: RMSNorm,
        *,
        hidden: int,
        heads: int,
        q_rank: int,
        kv_rank: int,
        key_dim: int,
        value_dim: int,
        index_heads: int,
        index_dim: int,
        top_k: int,
        pool: int,
        eps: float,
        ops: Bound,
    ) -> None:
        self.layer = layer
        self.before = before
        self.inputs = Linear(
            weights,
            (
                ("kv_a_proj_with_mqa.weight", kv_rank),  # the first three are what `remember` needs
                ("indexer.wk.weight", index_dim),
                ("indexer.index_kpool_compress_gate", index_dim),
                ("q_a_proj.weight", q_rank),
                ("indexer.weights_proj.weight", index_heads),
            ),
            hidden,
            ops,
        )
        self.kv_norm = RMSNorm(weights, "kv_a_layernorm.weight", kv_rank, eps, ops)
        self.q_norm = RMSNorm(weights, "q_a_layernorm.weight", q_rank, eps, ops)
        self.queries = Linear(
            weights,
            (
                ("q_b_proj.weight", heads * key_dim),
                ("indexer.wq_b.weight", index_heads * index_dim),
            ),
            q_rank,
            ops,
        )
        absorbed = weights.take("kv_b_proj.weight", (heads * (key_dim + value_dim), kv_rank))
        keys, values = absorbed.view(heads, -1, kv_rank).split((key_dim, value_dim), 1)
        self.to_latent = keys.contiguous()  # [H, key_dim, C]
        self.from_latent = values.transpose(1, 2).contiguous()  # [H, C, value_dim]
        self.output = Linear(weights, (("o_proj.weight", hidden),), heads * value_dim, ops)
        self.index_norm = (
            weights.take("indexer.k_norm.weight", (index_dim,)),
            weights.take("indexer.k_norm.bias", (index_dim,)),
        )
        self.position_bias = weights.take("indexer.index_kpool_compress_ape", (pool, index_dim))
        self.heads, self.key_dim = heads, key_dim
        self.index_heads, self.index_dim = index_heads, index_dim
        self.top_k, self.pool = top_k, pool
        self.ops = ops

    def remember(self, x: torch.Tensor, batch: ForwardBatch, arenas: Arenas) -> None:
        """Write latent, pooled key and tail of every token: x [T, hidden], before the norm."""
        (latent, index_key, index_gate), _ = self.inputs.split(self.before, x, None, 3)
        self._write(latent, index_key, index_gate, batch, arenas)

    def __call__(
        self, x: torch.Tensor, y: torch.Tensor | None, batch: ForwardBatch, arenas: Arenas
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] and y, what is added to it -> x + y (or x), and the next y."""
        (latent, index_key, index_gate, q, head_weights), x = self.inputs.split(self.before, x, y)
        self._write(latent, index_key, index_gate, batch, arenas)
        (q, index_query), _ = self.queries.split(self.q_norm, q, None)
        selected = self._select(index_query, head_weights, batch, arenas, first=0)
        return x, self._attend(q, selected, batch, arenas)

    def draft(
        self, x: torch.Tensor, selected: torch.Tensor | None, batch: ForwardBatch, arenas: Arenas
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [B, hidden], before the norm -> what this adds to it, and the positions attended to,
        [B, P * 64] bool.

        Without `selected` as a decoder layer, but for the entries before `FIRST_ENTRY`. A later
        step of a chain is given what the first one selected: it writes its latent alone.
        """
        (latent, index_key, index_gate, q, head_weights), _ = self.inputs.split(
            self.before, x, None
        )
        (q, index_query), _ = self.queries.split(self.q_norm, q, None)
        if selected is None:
            self._write(latent, index_key, index_gate, batch, arenas)
            selected = self._select(index_query, head_weights, batch, arenas, first=FIRST_ENTRY)
        else:
            self._write_latent(latent, batch, arenas)
        return self._attend(q, selected, batch, arenas), selected

    def _select(
        self,
        index_query: torch.Tensor,
        head_weights: torch.Tensor,
        batch: ForwardBatch,
        arenas: Arenas,
        *,
        first: int,
    ) -> torch.Tensor | None:
        return self.ops.select(
            index_query.view(-1, self.index_heads, self.index_dim),
            head_weights,
            pooled_pages=arenas.pages.view(self.layer, "pooled"),
            batch=batch,
            pool=self.pool,
            top_k=self.top_k,
            scale=self.index_dim**-0.5,
            weight_scale=self.index_heads**-0.5,
            first=first,
        )

    def _attend(
        self,
        q: torch.Tensor,
        selected: torch.Tensor | None,
        batch: ForwardBatch,
        arenas: Arenas,
    ) -> torch.Tensor:
        out = self.ops.paged_mla(
            self.ops.linear_by_head(q.unflatten(-1, (self.heads, self.key_dim)), self.to_latent),
            arenas.pages.view(self.layer, "latent"),
            batch=batch,
            scale=self.key_dim**-0.5,
            selected=selected,
        )
        return self.output(self.ops.linear_by_head(out, self.from_latent).flatten(1))

    def _write(
        self,
        latent: torch.Tensor,
        index_key: torch.Tensor,
        index_gate: torch.Tensor,
        batch: ForwardBatch,
        arenas: Arenas,
    ) -> None:
        self._write_latent(latent, batch, arenas)
        self.ops.pool_keys(
            self.ops.layer_norm(index_key, *self.index_norm, INDEX_NORM_EPS),
            index_gate,
            self.position_bias,
            pooled_pages=arenas.pages.view(self.layer, "pooled"),
            tails=arenas.seats.view(self.layer, "tail"),
            batch=batch,
        )

    def _write_latent(self, latent: torch.Tensor, batch: ForwardBatch, arenas: Arenas) -> None:
        self.ops.write_kv(
            arenas.pages.view(self.layer, "latent"),
            self.kv_norm(latent),
            batch.token_page,
            batch.token_offset,
        )


class GatedAttention:
    """Grouped-query attention with q/k norms, partial rotation and a sigmoid output gate.

    Tensors under `weights`: q_proj (per head: query rows, then gate rows), k_proj, v_proj, q_norm,
    k_norm, o_proj.
    """

    def __init__(
        self,
        weights: TensorSource,
        layer: int,
        before: RMSNorm,
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        dim: int,
        eps: float,
        ops: Bound,
    ) -> None:
        self.layer = layer
        self.before = before
        self.inputs = Linear(
            weights,
            (
                ("k_proj.weight", kv_heads * dim),  # the first two are what `remember` needs
                ("v_proj.weight", kv_heads * dim),
                ("q_proj.weight", heads * 2 * dim),
            ),
            hidden,
            ops,
        )
        self.q_norm = ZeroCentredRMSNorm(weights, "q_norm.weight", dim, eps, ops)
        self.k_norm = ZeroCentredRMSNorm(weights, "k_norm.weight", dim, eps, ops)
        self.output = Linear(weights, (("o_proj.weight", hidden),), heads * dim, ops)
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.ops = ops

    def remember(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        arenas: Arenas,
    ) -> None:
        """Write key and value of every token: x [T, hidden], before the norm; rope as below."""
        (key, value), _ = self.inputs.split(self.before, x, None, 2)
        self._turn_and_write(None, key, value, rope, batch, arenas)

    def __call__(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None,
        rope: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        arenas: Arenas,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] and y, what is added to it -> x + y (or x), and the next y.

        rope: cos and sin [T, rotary / 2].
        """
        return self._attend(x, y, rope, batch, arenas, first=0)

    def draft(
        self,
        x: torch.Tensor,
        selected: None,
        rope: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        arenas: Arenas,
    ) -> tuple[torch.Tensor, None]:
        """x [B, hidden], before the norm -> what this adds to it, attending from `FIRST_ENTRY` on;
        nothing is selected.
        """
        return self._attend(x, None, rope, batch, arenas, first=FIRST_ENTRY)[1], None

    def _attend(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None,
        rope: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        arenas: Arenas,
        *,
        first: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (key, value, both), x = self.inputs.split(self.before, x, y)
        query, gate = both.view(-1, self.heads, 2, self.dim).unbind(2)
        turned = self._turn_and_write(query, key, value, rope, batch, arenas)
        out = self.ops.paged_gqa(
            turned,
            arenas.pages.view(self.layer, "key"),
            arenas.pages.view(self.layer, "value"),
            batch=batch,
            scale=self.dim**-0.5,
            gate=gate,
            first=first,
        )
        return x, self.output(out.flatten(1))

    def _turn_and_write(
        self,
        query: torch.Tensor | None,
        key: torch.Tensor,
        value: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        arenas: Arenas,
    ) -> torch.Tensor | None:
        return self.ops.turn_and_write(
            query,
            key.view(-1, self.kv_heads, self.dim),
            value.view(-1, self.kv_heads, self.dim),
            self.q_norm.weight,
            self.k_norm.weight,
            *rope,
            eps=self.q_norm.eps,
            key_pages=arenas.pages.view(self.layer, "key"),
            value_pages=arenas.pages.view(self.layer, "value"),
            token_page=batch.token_page,
            token_offset=batch.token_offset,
        )
