"""Qwen3.5, dense and mixture (`qwen3_5`, `qwen3_5_moe`): GDN, gated attention, one draft layer.

Knows the family's published names and its wiring; the arithmetic is in `nn` and `ops`. Text only:
the vision tower of a checkpoint is skipped, and a position is a token's index.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from millpond.errors import Broken, Refused
from millpond.memory.arena import Arenas
from millpond.memory.layout import EntrySpec, ModelLayout, TensorSpec
from millpond.models.fields import Fields
from millpond.models.weights import Weights, half_kept_decay
from millpond.nn.attention import GatedAttention, key_value_tensors
from millpond.nn.delta import DeltaHeads, GatedDelta, ring_tensors, slot_tensors
from millpond.nn.draft import PairLayer
from millpond.nn.linear import Embedding, Linear
from millpond.nn.moe import Mlp, SoftmaxMoe
from millpond.nn.residual import (
    ZeroCentredRMSNorm,
    boundary_tensors,
    hidden_before,
    store_boundary,
)
from millpond.ops.batch import ForwardBatch
from millpond.ops.bind import Bound

DENSE_TYPES = ("qwen3_5", "qwen3_5_text")
MOE_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
MODEL_TYPES = (*DENSE_TYPES, *MOE_TYPES)
IGNORED = ("model.visual.",)
TEXT_PREFIXES = ("model.language_model.", "model.")

LINEAR, ATTENTION = "linear_attention", "full_attention"

Rope = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Mixture:
    """The shape of a mixture of experts."""

    experts: int
    per_token: int
    inner: int
    shared_inner: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The text model's shape. Field names follow the published configuration where it has them."""

    vocab_size: int
    hidden_size: int
    max_position: int
    tied: bool
    num_draft_layers: int
    layer_types: tuple[str, ...]  # `LINEAR` or `ATTENTION`
    rms_norm_eps: float
    # GDN
    linear: DeltaHeads
    conv_width: int
    # attention
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    # feed-forward, the same in every layer
    mlp: int | Mixture

    @property
    def num_layers(self) -> int:
        """Without the draft layer, whose index it is."""
        return len(self.layer_types)

    @property
    def delta_rule(self) -> str:
        """GDN: every value head decays as one."""
        return "gdn"

    @property
    def draft_tensor(self) -> str:
        """How the name of one of the draft layer's tensors ends."""
        return "mtp.fc.weight"

    def without_draft(self) -> Config:
        """The same model, its draft layer left out."""
        return replace(self, num_draft_layers=0)

    def layout(self, dtype: torch.dtype, num_drafts: int = 0) -> ModelLayout:
        """What a slot, a page and a seat hold for a model computing in `dtype`."""
        slot: list[TensorSpec] = []
        page: list[TensorSpec] = []
        seat: list[TensorSpec] = []
        for layer, kind in enumerate((*self.layer_types, *((ATTENTION,) * self.num_draft_layers))):
            if kind == LINEAR:
                slot += slot_tensors(layer, self.linear, conv_width=self.conv_width, dtype=dtype)
                seat += ring_tensors(
                    layer,
                    self.linear,
                    decay=(self.linear.value_heads,),
                    num_drafts=num_drafts,
                    dtype=dtype,
                )
            else:
                page += key_value_tensors(
                    layer, kv_heads=self.kv_heads, dim=self.head_dim, dtype=dtype
                )
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
        ("attn_output_gate", True),
        ("mamba_ssm_dtype", "float32"),
        ("mtp_use_dedicated_embeddings", False),
    ):
        text.expect(name, wanted)
    layers = text.integer("num_hidden_layers")
    drafts = text.integer("mtp_num_hidden_layers", 0, least=0)
    if drafts > 1:
        raise Refused(f"{text.where}: mtp_num_hidden_layers is {drafts}; supported: 0 or 1")
    key_heads = text.integer("linear_num_key_heads")
    value_heads = text.integer("linear_num_value_heads")
    heads, kv_heads = text.integer("num_attention_heads"), text.integer("num_key_value_heads")
    for name, many, few in (
        ("linear_num_value_heads", value_heads, key_heads),
        ("num_attention_heads", heads, kv_heads),
    ):
        if many % few:
            raise Refused(f"{text.where}: {name} is {many}; supported: multiples of {few}")
    head_dim = text.integer("head_dim")
    theta, rotary_share = _rope(text)
    moe = top.values["model_type"] in MOE_TYPES
    return Config(
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        max_position=text.integer("max_position_embeddings"),
        tied=top.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False)),
        num_draft_layers=drafts,
        layer_types=_layer_types(text, layers),
        rms_norm_eps=text.number("rms_norm_eps"),
        linear=DeltaHeads(
            key_heads,
            text.integer("linear_key_head_dim"),
            value_heads,
            text.integer("linear_value_head_dim"),
        ),
        conv_width=text.integer("linear_conv_kernel_dim"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=int(head_dim * rotary_share),
        rope_theta=theta,
        mlp=_mixture(text) if moe else text.integer("intermediate_size"),
    )


def _layer_types(text: Fields, layers: int) -> tuple[str, ...]:
    """As listed, else every n-th layer attends."""
    if "layer_types" in text:
        return text.choices("layer_types", layers, {LINEAR: LINEAR, ATTENTION: ATTENTION})
    interval = text.integer("full_attention_interval")
    return tuple(LINEAR if (i + 1) % interval else ATTENTION for i in range(layers))


def _rope(text: Fields) -> tuple[float, float]:
    """Base and share of a head's dimensions that rotate."""
    text.expect("rope_scaling", None)
    rope = text.section("rope_parameters")
    rope.expect("rope_type", "default")
    share = rope.number("partial_rotary_factor", text.number("partial_rotary_factor", 0.25))
    return rope.number("rope_theta"), share


def _mixture(text: Fields) -> Mixture:
    return Mixture(
        experts=text.integer("num_experts"),
        per_token=text.integer("num_experts_per_tok"),
        inner=text.integer("moe_intermediate_size"),
        shared_inner=text.integer("shared_expert_intermediate_size"),
    )


def draw(
    config: Config, name: str, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor | None:
    """Dummy values: zero-centred norms near zero, half of the GDN heads slow to forget."""
    decay = half_kept_decay(name, shape, heads=config.linear.value_heads)
    if decay is not None:
        return decay
    if "norm" in name:
        centre = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0
        return centre + 0.1 * torch.randn(shape, generator=generator, device=generator.device)
    return None


def build(config: Config, weights: Weights, ops: Bound) -> Qwen3_5:
    """Take every tensor of the text model and its draft layer."""
    return Qwen3_5(config, weights, ops)


class Layer:
    """One decoder layer: a mixer and a feed-forward part, each after a norm and added back."""

    def __init__(self, config: Config, index: int, weights: Weights, ops: Bound) -> None:
        c = config
        before, after = _layer_norms(c, weights, ops)
        self.mixer: GatedDelta | GatedAttention
        if c.layer_types[index] == LINEAR:
            self.mixer = GatedDelta(
                weights.under("linear_attn."),
                index,
                before,
                hidden=c.hidden_size,
                heads=c.linear,
                conv_width=c.conv_width,
                eps=c.rms_norm_eps,
                ops=ops,
            )
        else:
            self.mixer = _attention(c, index, before, weights.under("self_attn."), ops)
        self.mlp = _feed_forward(c, after, weights.under("mlp."), ops)

    def __call__(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None,
        rope: Rope,
        batch: ForwardBatch,
        arenas: Arenas,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream x + y, as two [T, hidden] -> the same; rope: cos and sin [T, rotary / 2]."""
        if isinstance(self.mixer, GatedDelta):
            return self.mlp(*self.mixer(x, y, batch, arenas))
        return self.mlp(*self.mixer(x, y, rope, batch, arenas))


class DraftLayer(PairLayer):
    """The multi-token-prediction layer (`mtp.`), a full-attention layer.

    A key is rotated by i, its token's own position. In training that pair stood at i - 1: as
    rotation is relative, one and the same shift of keys and queries changes nothing.
    """

    def __init__(self, config: Config, weights: Weights, ops: Bound) -> None:
        c, hidden = config, config.hidden_size
        key, layer = weights.under("mtp."), weights.under("mtp.layers.0.")
        before, after = _layer_norms(c, layer, ops)

        def norm(name: str) -> ZeroCentredRMSNorm:
            return ZeroCentredRMSNorm(key, f"{name}.weight", hidden, c.rms_norm_eps, ops)

        super().__init__(
            embedding_norm=norm("pre_fc_norm_embedding"),
            hidden_norm=norm("pre_fc_norm_hidden"),
            fuse=Linear(key, (("fc.weight", hidden),), 2 * hidden, ops),
            mixer=_attention(c, c.num_layers, before, layer.under("self_attn."), ops),
            mlp=_feed_forward(c, after, layer.under("mlp."), ops),
            norm=norm("norm"),
        )


class Qwen3_5:
    """The text model on one device."""

    def __init__(self, config: Config, weights: Weights, ops: Bound) -> None:
        c = config
        text = weights.root(TEXT_PREFIXES, "embed_tokens.weight")
        self.config = c
        self.ops = ops
        self.embedding = Embedding(
            text, weights, vocab=c.vocab_size, hidden=c.hidden_size, tied=c.tied, ops=ops
        )
        self.layers = tuple(
            Layer(c, index, text.under(f"layers.{index}."), ops) for index in range(c.num_layers)
        )
        self.norm = ZeroCentredRMSNorm(text, "norm.weight", c.hidden_size, c.rms_norm_eps, ops)
        self.draft_layer = DraftLayer(c, weights, ops) if c.num_draft_layers else None

    def forward(self, batch: ForwardBatch, arenas: Arenas) -> torch.Tensor:
        """The final hidden vectors [T, hidden]; see `millpond.models.base.Model`."""
        rope = self._rope(batch)
        x = embedded = self.embedding(batch.token_ids)
        y = None
        for layer in self.layers:
            x, y = layer(x, y, rope, batch, arenas)
        hidden, _ = self.norm.of_sum(x, y)
        if self.draft_layer is not None:
            previous = hidden_before(hidden, batch, arenas, self.ops)
            self.draft_layer.remember(embedded, previous, rope, batch, arenas)
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
        embedded, rope = self.embedding(batch.token_ids), self._rope(batch)
        return self.draft_layer(embedded, hidden, selected, rope, batch, arenas)

    def draft_logits(self, n: torch.Tensor) -> torch.Tensor:
        """n [M, hidden] -> [M, vocab] fp32, by the target's own head."""
        return self.embedding.logits(n)

    def _rope(self, batch: ForwardBatch) -> Rope:
        return self.ops.rope_tables(batch.positions, self.config.rotary_dim, self.config.rope_theta)


def _layer_norms(
    c: Config, weights: Weights, ops: Bound
) -> tuple[ZeroCentredRMSNorm, ZeroCentredRMSNorm]:
    before, after = (
        ZeroCentredRMSNorm(weights, f"{name}.weight", c.hidden_size, c.rms_norm_eps, ops)
        for name in ("input_layernorm", "post_attention_layernorm")
    )
    return before, after


def _attention(
    c: Config, index: int, before: ZeroCentredRMSNorm, weights: Weights, ops: Bound
) -> GatedAttention:
    return GatedAttention(
        weights,
        index,
        before,
        hidden=c.hidden_size,
        heads=c.heads,
        kv_heads=c.kv_heads,
        dim=c.head_dim,
        eps=c.rms_norm_eps,
        ops=ops,
    )


def _feed_forward(
    c: Config, norm: ZeroCentredRMSNorm, weights: Weights, ops: Bound
) -> Mlp | SoftmaxMoe:
    if isinstance(c.mlp, int):
        return Mlp(weights, norm, hidden=c.hidden_size, inner=c.mlp, ops=ops)
    return SoftmaxMoe(
        weights,
        norm,
        hidden=c.hidden_size,
        inner=c.mlp.inner,
        shared_inner=c.mlp.shared_inner,
        experts=c.mlp.experts,
        top_k=c.mlp.per_token,
        ops=ops,
    )
