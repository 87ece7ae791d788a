"""The shape of millpond-tiny-glm and its published config files; knows no tensor."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a glm5_next text model with one draft layer (units: features unless said)."""

    vocab: int = 2048
    hidden: int = 160
    mlp: int = 320
    expert: int = 64
    experts: int = 8
    active: int = 2
    dense_layers: int = 3
    mixers: str = "kkkakk"
    """One letter a layer: k is linear attention (KDA), a is indexed latent attention."""
    heads: int = 4
    head_dim: int = 32
    conv: int = 4
    gate_lower_bound: float = -5.0
    q_rank: int = 64
    kv_rank: int = 32
    index_heads: int = 16
    index_dim: int = 16
    index_topk: int = 64
    pool: int = 4
    streams: int = 2
    sinkhorn: int = 20
    hc_eps: float = 1e-6
    eps: float = 1e-5
    swiglu_limit: float = 10.0
    routed_scale: float = 2.5
    context: int = 8192

    @property
    def width(self) -> int:
        """Features of all heads together."""
        return self.heads * self.head_dim


TOY = Shape(vocab=2048, hidden=32, mlp=48, expert=16, experts=4, mixers="kak", dense_layers=1,
            heads=2, head_dim=16, q_rank=16, kv_rank=16, index_topk=16)  # fmt: skip
"""A shape small enough to train a few steps on a CPU."""


def text_config(shape: Shape, ids: dict[str, int]) -> dict[str, Any]:
    """`text_config` of the published layout; `ids` maps added tokens to their numbers."""
    layers = len(shape.mixers)
    linear = [i for i, kind in enumerate(shape.mixers) if kind == "k"]
    full = [i for i, kind in enumerate(shape.mixers) if kind == "a"]
    return {
        "model_type": "glm5_next_text",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "intermediate_size": shape.mlp,
        "moe_intermediate_size": shape.expert,
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": shape.active,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": shape.routed_scale,
        "norm_topk_prob": True,
        "moe_router_dtype": "float32",
        "first_k_dense_replace": shape.dense_layers,
        "moe_layer_freq": 1,
        "mlp_layer_types": ["dense" if i < shape.dense_layers else "sparse" for i in range(layers)],
        "layer_types": [
            "linear_attention" if kind == "k" else "deepseek_sparse_attention"
            for kind in shape.mixers
        ],
        "linear_attn_config": {
            "num_heads": shape.heads,
            "head_dim": shape.head_dim,
            "short_conv_kernel_size": shape.conv,
            "gate_lower_bound": shape.gate_lower_bound,
            "kda_layers": linear,
            "full_attn_layers": full,
        },
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": shape.q_rank,
        "kv_lora_rank": shape.kv_rank,
        "qk_nope_head_dim": shape.head_dim,
        "qk_rope_head_dim": 0,
        "v_head_dim": shape.head_dim,
        "mla_use_nope": True,
        "head_dim": 0,
        "index_n_heads": shape.index_heads,
        "index_head_dim": shape.index_dim,
        "index_topk": shape.index_topk,
        "index_kpool": shape.pool,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "indexer_types": ["full"] * layers,
        "indexer_rope_interleave": True,
        "index_share_for_mtp_iteration": True,
        "mhc": True,
        "hc_mult": shape.streams,
        "hc_sinkhorn_iters": shape.sinkhorn,
        "hc_eps": shape.hc_eps,
        "swiglu_limit": shape.swiglu_limit,
        "rms_norm_eps": shape.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": True,
        "use_cache": True,
        "pad_token_id": ids["<|endoftext|>"],
        "bos_token_id": None,
        "eos_token_id": stop_ids(ids),
    }


def stop_ids(ids: dict[str, int]) -> list[int]:
    """End of text and the role tokens that end a reply."""
    return [ids["<|endoftext|>"], ids["<|user|>"], ids["<|observation|>"]]


def config(shape: Shape, ids: dict[str, int]) -> dict[str, Any]:
    """The whole config.json. The vision part only lets the published classes be built."""
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "eos_token_id": stop_ids(ids),
        "pad_token_id": ids["<|endoftext|>"],
        "image_token_id": ids["<|image|>"],
        "video_token_id": ids["<|video|>"],
        "image_start_token_id": ids["<|begin_of_image|>"],
        "image_end_token_id": ids["<|end_of_image|>"],
        "video_start_token_id": ids["<|begin_of_video|>"],
        "video_end_token_id": ids["<|end_of_video|>"],
        "text_config": text_config(shape, ids),
        "vision_config": {
            "model_type": "glm5_next_vision",
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 32,
            "out_hidden_size": shape.hidden,
            "projection_intermediate_size": 32,
            "patch_size": 14,
            "image_size": 28,
        },
    }


def generation_config(ids: dict[str, int]) -> dict[str, Any]:
    """generation_config.json with the family's sampling defaults."""
    return {
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
        "eos_token_id": stop_ids(ids),
        "pad_token_id": ids["<|endoftext|>"],
    }
