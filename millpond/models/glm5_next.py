"""GLM-5.3-Flash (`glm5_next`): KDA, sparse latent attention, hyper-connections, one draft layer.

Knows the family's published names and its wiring; the arithmetic is in `nn` and `ops`. Text only:
the vision tower of a checkpoint is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from millpond.errors import Broken, Refused
from millpond.memory.arena import Arenas
from millpond.memory.layout import EntrySpec, ModelLayout, TensorSpec
from millpond.models.fields import Fields
from millpond.models.weights import Weights, half_kept_decay
from millpond.nn.attention import LatentAttention, latent_tensors
from millpond.nn.delta import DeltaHeads, KimiDelta, ring_tensors, slot_tensors
from millpond.nn.draft import PairLayer
from millpond.nn.linear import Embedding, Linear
from millpond.nn.moe import Mlp, SigmoidMoe
from millpond.nn.residual import (
    HyperConnection,
    RMSNorm,
    boundary_tensors,
    hidden_before,
    store_boundary,
)
from millpond.ops.batch import ForwardBatch
from millpond.ops.bind import Bound
from millpond.plan.step import PAGE_SIZE

MODEL_TYPES = ("glm5_next", "glm5_next_text")
IGNORED = ("model.visual.",)
TEXT_PREFIXES = ("model.language_model.", "model.", "")

LINEAR, SPARSE_ATTENTION = "linear_attention", "indexed_attention"
DENSE, MIXTURE = "dense", "sparse"
_MIXERS = {LINEAR: LINEAR, SPARSE_ATTENTION: SPARSE_ATTENTION}
_MIXERS |= dict.fromkeys(("deepseek_sparse_attention", "full_attention"), SPARSE_ATTENTION)
DEFAULT_LOWER_BOUND = -5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The text model's shape. Field names follow the published configuration where it has them."""

    vocab_size: int
    hidden_size: int
    max_position: int
    tied: bool
    num_draft_layers: int
    layer_types: tuple[str, ...]  # `LINEAR` or `SPARSE_ATTENTION`
    mlp_types: tuple[str, ...]  # `DENSE` or `MIXTURE`
    rms_norm_eps: float
    # KDA
    linear: DeltaHeads
    conv_width: int
    lower_bound: float | None
    # latent attention and its indexer
    heads: int
    q_rank: int
    kv_rank: int
    key_dim: int
    value_dim: int
    index_heads: int
    index_dim: int
    index_top_k: int  # in tokens
    index_pool: int
    # feed-forward
    intermediate_size: int
    moe_intermediate_size: int
    experts: int
    shared_experts: int
    experts_per_token: int
    routed_scale: float
    renormalise: bool
    swiglu_limit: float
    # hyper-connections
    streams: int
    sinkhorn_iterations: int
    hyper_eps: float

    @property
    def num_layers(self) -> int:
        """Without the draft layer, whose index it is."""
        return len(self.layer_types)

    @property
    def delta_rule(self) -> str:
        """KDA: every key channel decays by itself."""
        return "kda"

    @property
    def draft_tensor(self) -> str:
        """How the name of one of the draft layer's tensors ends."""
        return f"layers.{self.num_layers}.eh_proj.weight"

    def without_draft(self) -> Config:
        """The same model, its draft layer left out."""
        return replace(self, num_draft_layers=0)

    def layout(self, dtype: torch.dtype, num_drafts: int = 0) -> ModelLayout:
        """What a slot, a page and a seat hold for a model computing in `dtype`."""
        slot: list[TensorSpec] = []
        page: list[TensorSpec] = []
        seat: list[TensorSpec] = []
        drafts = (SPARSE_ATTENTION,) * self.num_draft_layers
        for layer, kind in enumerate((*self.layer_types, *drafts)):
            if kind == LINEAR:
                slot += slot_tensors(layer, self.linear, conv_width=self.conv_width, dtype=dtype)
                seat += ring_tensors(
                    layer,
                    self.linear,
                    decay=(self.linear.value_heads, self.linear.key_dim),
                    num_drafts=num_drafts,
                    dtype=dtype,
                )
            else:
                of_page, of_seat = latent_tensors(
                    layer,
                    rank=self.kv_rank,
                    index_dim=self.index_dim,
                    pool=self.index_pool,
                    num_drafts=num_drafts,
                    dtype=dtype,
                )
                page += of_page
                seat.append(of_seat)
        boundary, ring = boundary_tensors(self.hidden_size, num_drafts=num_drafts, dtype=dtype)
        slot.append(boundary)
        seat += ring
        return ModelLayout(EntrySpec(tuple(slot)), EntrySpec(tuple(page)), EntrySpec(tuple(seat)))


def parse(top: Fields) -> Config:
    """The published configuration, wrapped or flat. `Refused` names what is amiss."""
    text = top.section("text_config") if "text_config" in top else top
    for name, wanted in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("qk_rope_head_dim", 0),
        ("n_group", 1),
        ("topk_group", 1),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("mhc", True),
        ("index_kpool_compress", True),
        ("index_kpool_always_select_tail", True),
    ):
        text.expect(name, wanted)
    layers = text.integer("num_hidden_layers")
    if "indexer_types" in text:
        text.choices("indexer_types", layers, {"full": "full"})
    drafts = text.integer("num_nextn_predict_layers", 0, least=0)
    if drafts > 1:
        raise Refused(f"{text.where}: num_nextn_predict_layers is {drafts}; supported: 0 or 1")
    pool = text.integer("index_kpool")
    if PAGE_SIZE % pool:
        raise Refused(f"{text.where}: index_kpool is {pool}; supported: divisors of {PAGE_SIZE}")
    linear_heads, linear_dim, conv_width, lower_bound = _linear(text)
    return Config(
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        max_position=text.integer("max_position_embeddings"),
        tied=top.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False)),
        num_draft_layers=drafts,
        layer_types=text.choices("layer_types", layers, _MIXERS),
        mlp_types=text.choices("mlp_layer_types", layers, {DENSE: DENSE, MIXTURE: MIXTURE}),
        rms_norm_eps=text.number("rms_norm_eps"),
        linear=DeltaHeads(linear_heads, linear_dim, linear_heads, linear_dim),
        conv_width=conv_width,
        lower_bound=lower_bound,
        heads=text.integer("num_attention_heads"),
        q_rank=text.integer("q_lora_rank"),
        kv_rank=text.integer("kv_lora_rank"),
        key_dim=text.integer("qk_nope_head_dim"),
        value_dim=text.integer("v_head_dim"),
        index_heads=text.integer("index_n_heads"),
        index_dim=text.integer("index_head_dim"),
        index_top_k=text.integer("index_topk", least=pool),
        index_pool=pool,
        intermediate_size=text.integer("intermediate_size"),
        moe_intermediate_size=text.integer("moe_intermediate_size"),
        experts=text.integer("n_routed_experts"),
        shared_experts=text.integer("n_shared_experts"),
        experts_per_token=text.integer("num_experts_per_tok"),
        routed_scale=text.number("routed_scaling_factor"),
        renormalise=text.flag("norm_topk_prob", True),
        swiglu_limit=text.number("swiglu_limit"),
        streams=text.integer("hc_mult"),
        sinkhorn_iterations=text.integer("hc_sinkhorn_iters"),
        hyper_eps=text.number("hc_eps"),
    )


def _linear(text: Fields) -> tuple[int, int, int, float | None]:
    """Heads, head size, convolution width and gate bound: published nested, re-saved flat."""
    if "linear_attn_config" in text:
        part = text.section("linear_attn_config")
        bounded = part.flag("safe_gate", True) or "gate_lower_bound" in part
        bound = part.number("gate_lower_bound", DEFAULT_LOWER_BOUND) if bounded else None
        names = ("num_heads", "head_dim", "short_conv_kernel_size")
    else:
        part = text
        stated_none = text.values.get("linear_lower_bound", DEFAULT_LOWER_BOUND) is None
        bound = None if stated_none else text.number("linear_lower_bound", DEFAULT_LOWER_BOUND)
        names = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    if bound is not None and not -5.0 <= bound < 0.0:
        raise Refused(f"{part.where}: the gate's lower bound is {bound}; supported: -5 to 0")
    heads, dim, width = (part.integer(name) for name in names)
    return heads, dim, width, bound


def draw(
    config: Config, name: str, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor | None:
    """Dummy values: norms near one, small biases, half of the KDA heads slow to forget."""
    decay = half_kept_decay(
        name, shape, heads=config.linear.value_heads, lower_bound=config.lower_bound
    )
    if decay is not None:
        return decay
    if "norm" in name and name.endswith(".weight"):
        return 1.0 + 0.1 * torch.randn(shape, generator=generator, device=generator.device)
    if len(shape) == 1:
        return 0.3 * torch.randn(shape, generator=generator, device=generator.device)
    return None


def build(config: Config, weights: Weights, ops: Bound) -> Glm5Next:
    """Take every tensor of the text model and its draft layer."""
    return Glm5Next(config, weights, ops)


class Layer:
    """One decoder layer: a mixer and a feed-forward part, each within its hyper-connection."""

    def __init__(self, config: Config, index: int, weights: Weights, ops: Bound) -> None:
        c, key = config, weights.under(f"layers.{index}.")
        self.hyper = tuple(
            HyperConnection(
                key,
                name,
                streams=c.streams,
                hidden=c.hidden_size,
                iterations=c.sinkhorn_iterations,
                hyper_eps=c.hyper_eps,
                norm_eps=c.rms_norm_eps,
                ops=ops,
            )
            for name in ("hc_attn", "hc_ffn")
        )
        before, after = _layer_norms(c, key, ops)
        mixer = key.under("self_attn.")
        self.mixer: KimiDelta | LatentAttention
        if c.layer_types[index] == LINEAR:
            self.mixer = KimiDelta(
                mixer,
                index,
                before,
                hidden=c.hidden_size,
                heads=c.linear,
                conv_width=c.conv_width,
                lower_bound=c.lower_bound,
                eps=c.rms_norm_eps,
                ops=ops,
            )
        else:
            self.mixer = _attention(c, index, before, mixer, ops)
        self.mlp = _feed_forward(c, c.mlp_types[index], after, key.under("mlp."), ops)

    def __call__(self, streams: torch.Tensor, batch: ForwardBatch, arenas: Arenas) -> torch.Tensor:
        """streams [T, n, hidden] -> the same."""
        x, post, mix = self.hyper[0].collapse(streams)
        _, y = self.mixer(x, None, batch, arenas)
        streams = self.hyper[0].spread(y, streams, post, mix)
        x, post, mix = self.hyper[1].collapse(streams)
        _, y = self.mlp(x, None)
        return self.hyper[1].spread(y, streams, post, mix)


class DraftLayer(PairLayer):
    """The multi-token-prediction layer, stored after the last decoder layer."""

    def __init__(self, config: Config, weights: Weights, ops: Bound) -> None:
        c, index = config, config.num_layers
        key, hidden = weights.under(f"layers.{index}."), config.hidden_size
        before, after = _layer_norms(c, key, ops)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(key, f"{name}.weight", hidden, c.rms_norm_eps, ops)

        super().__init__(
            embedding_norm=norm("enorm"),
            hidden_norm=norm("hnorm"),
            fuse=Linear(key, (("eh_proj.weight", hidden),), 2 * hidden, ops),
            mixer=_attention(c, index, before, key.under("self_attn."), ops),
            mlp=_feed_forward(c, MIXTURE, after, key.under("mlp."), ops),
            norm=norm("shared_head.norm"),
        )


class Glm5Next:
    """The text model on one device."""

    def __init__(self, config: Config, weights: Weights, ops: Bound) -> None:
        c = config
        text = weights.root(TEXT_PREFIXES, "embed_tokens.weight")
        self.config = c
        self.ops = ops
        self.embedding = Embedding(
            text, weights, vocab=c.vocab_size, hidden=c.hidden_size, tied=c.tied, ops=ops
        )
        self.layers = tuple(Layer(c, index, text, ops) for index in range(c.num_layers))
        self.norm = RMSNorm(text, "norm.weight", c.hidden_size, c.rms_norm_eps, ops)
        self.draft_layer = DraftLayer(c, text, ops) if c.num_draft_layers else None

    def forward(self, batch: ForwardBatch, arenas: Arenas) -> torch.Tensor:
        """The final hidden vectors [T, hidden]; see `millpond.models.base.Model`."""
        embedded = self.embedding(batch.token_ids)
        streams = embedded[:, None].repeat(1, self.config.streams, 1)
        for layer in self.layers:
            streams = layer(streams, batch, arenas)
        hidden = self.norm(self.ops.hyper_mean(streams))
        if self.draft_layer is not None:
            previous = hidden_before(hidden, batch, arenas, self.ops)
            self.draft_layer.remember(embedded, previous, batch, arenas)
        store_boundary(hidden, batch, arenas, self.ops)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, hidden] -> [M, vocab] fp32."""
        return self.embedding.logits(hidden)

    def draft(
        self,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        arenas: Arenas,
        selected: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One step of a chain of drafts: hidden [B, hidden] -> n [B, hidden], and `selected`."""
        if self.draft_layer is None:
            raise Broken("a model without a draft layer was asked for drafts")
        return self.draft_layer(self.embedding(batch.token_ids), hidden, selected, batch, arenas)

    def draft_logits(self, n: torch.Tensor) -> torch.Tensor:
        """n [M, hidden] -> [M, vocab] fp32, by the target's own head."""
        return self.embedding.logits(n)


def _layer_norms(c: Config, key: Weights, ops: Bound) -> tuple[RMSNorm, RMSNorm]:
    before, after = (
        RMSNorm(key, f"{name}.weight", c.hidden_size, c.rms_norm_eps, ops)
        for name in ("input_layernorm", "post_attention_layernorm")
    )
    return before, after


def _attention(
    c: Config, index: int, before: RMSNorm, weights: Weights, ops: Bound
) -> LatentAttention:
    return LatentAttention(
        weights,
        index,
        before,
        hidden=c.hidden_size,
        heads=c.heads,
        q_rank=c.q_rank,
        kv_rank=c.kv_rank,
        key_dim=c.key_dim,
        value_dim=c.value_dim,
        index_heads=c.index_heads,
        index_dim=c.index_dim,
        top_k=c.index_top_k,
        pool=c.index_pool,
        eps=c.rms_norm_eps,
        ops=ops,
    )


def _feed_forward(
    c: Config, kind: str, norm: RMSNorm, weights: Weights, ops: Bound
) -> Mlp | SigmoidMoe:
    if kind == DENSE:
        return Mlp(
            weights,
            norm,
            hidden=c.hidden_size,
            inner=c.intermediate_size,
            ops=ops,
            limit=c.swiglu_limit,
        )
    return SigmoidMoe(
        weights,
        norm,
        hidden=c.hidden_size,
        inner=c.moe_intermediate_size,
        shared_inner=c.moe_intermediate_size * c.shared_experts,
        experts=c.experts,
        top_k=c.experts_per_token,
        scale=c.routed_scale,
        renormalise=c.renormalise,
        limit=c.swiglu_limit,
        ops=ops,
    )
