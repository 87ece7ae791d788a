"""Published text configurations, written by hand, and the bytes each size keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def glm_flash() -> dict[str, Any]:
    """GLM-5.3-Flash, without the vision tower's own fields."""
    full = [i for i in range(45) if i % 4 == 3]
    text = dict(
        model_type="glm5_next_text",
        vocab_size=154880,
        hidden_size=4096,
        num_hidden_layers=45,
        num_nextn_predict_layers=1,
        intermediate_size=12288,
        moe_intermediate_size=2048,
        n_routed_experts=288,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=1,
        topk_group=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        moe_router_dtype="float32",
        first_k_dense_replace=3,
        moe_layer_freq=1,
        mlp_layer_types=["dense"] * 3 + ["sparse"] * 42,
        layer_types=[
            "deepseek_sparse_attention" if i in full else "linear_attention" for i in range(45)
        ],
        linear_attn_config=dict(
            num_heads=64,
            head_dim=128,
            short_conv_kernel_size=4,
            gate_lower_bound=-5.0,
            kda_layers=[i for i in range(45) if i not in full],
            full_attn_layers=full,
        ),
        num_attention_heads=64,
        num_key_value_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=256,
        qk_rope_head_dim=0,
        v_head_dim=256,
        mla_use_nope=True,
        head_dim=0,
        index_n_heads=32,
        index_head_dim=128,
        index_topk=2048,
        index_kpool=4,
        index_kpool_compress=True,
        index_kpool_always_select_tail=True,
        indexer_types=["full"] * 45,
        indexer_rope_interleave=True,
        index_share_for_mtp_iteration=True,
        mhc=True,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        swiglu_limit=10.0,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        attention_bias=False,
        max_position_embeddings=1048576,
        pad_token_id=154820,
        eos_token_id=[154820, 154827, 154829],
    )
    return dict(
        architectures=["Glm5NextForConditionalGeneration"],
        model_type="glm5_next",
        tie_word_embeddings=False,
        text_config=text,
        vision_config=dict(depth=24, hidden_size=1024),
    )


@dataclass(frozen=True)
class QwenSize:
    """One row of the family's table. `mixture`: experts, per token, inner; None: dense."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    value_heads: int
    tied: bool
    mixture: tuple[int, int, int] | None
    recurrent_bytes: int  # of one layer
    conv_bytes: int  # of one layer
    sequence_bytes: int
    token_bytes: int  # keys and values of the body, bf16
    draft_bytes: int  # of the draft layer
    parameters: float  # text, in 1e9
    draft_parameters: float


QWEN_SIZES = tuple(
    QwenSize(*shape, *kept)
    for shape, kept in (
        (
            ("0.8B", 1024, 3584, 24, 8, 2, 16, True, None),
            (1_048_576, 36_864, 19_537_920, 12_288, 2_048, 0.752, 0.0205),
        ),
        (
            ("2B", 2048, 6144, 24, 8, 2, 16, True, None),
            (1_048_576, 36_864, 19_537_920, 12_288, 2_048, 1.882, 0.0608),
        ),
        (
            ("4B", 2560, 9216, 32, 16, 4, 32, True, None),
            (2_097_152, 49_152, 51_511_296, 32_768, 4_096, 4.206, 0.121),
        ),
        (
            ("9B", 4096, 12288, 32, 16, 4, 32, False, None),
            (2_097_152, 49_152, 51_511_296, 32_768, 4_096, 8.954, 0.243),
        ),
        (
            ("27B", 5120, 17408, 64, 24, 4, 48, False, None),
            (3_145_728, 61_440, 153_944_064, 65_536, 4_096, 26.90, 0.425),
        ),
        (
            ("35B-A3B", 2048, 512, 40, 16, 2, 32, False, (256, 8, 512)),
            (2_097_152, 49_152, 64_389_120, 20_480, 2_048, 34.66, 0.845),
        ),
        (
            ("122B-A10B", 3072, 1024, 48, 32, 2, 64, False, (256, 8, 1024)),
            (4_194_304, 73_728, 153_649_152, 24_576, 2_048, 122.1, 2.52),
        ),
        (
            ("397B-A17B", 4096, 1024, 60, 32, 2, 64, False, (512, 10, 1024)),
            (4_194_304, 73_728, 192_061_440, 30_720, 2_048, 396.3, 6.60),
        ),
    )
)


def qwen(size: QwenSize) -> dict[str, Any]:
    """The wrapped configuration of one size."""
    moe = size.mixture is not None
    text: dict[str, Any] = dict(
        model_type="qwen3_5_moe_text" if moe else "qwen3_5_text",
        vocab_size=248320,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=256,
        full_attention_interval=4,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * (size.layers // 4),
        linear_num_key_heads=16,
        linear_num_value_heads=size.value_heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        attention_bias=False,
        attn_output_gate=True,
        mamba_ssm_dtype="float32",
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
        max_position_embeddings=262144,
        eos_token_id=248044,
        rope_parameters=dict(
            rope_type="default",
            rope_theta=1e7,
            partial_rotary_factor=0.25,
            mrope_section=[11, 11, 10],
            mrope_interleaved=True,
        ),
    )
    if size.mixture is None:
        text["intermediate_size"] = size.inner
    else:
        experts, per_token, inner = size.mixture
        text |= dict(
            num_experts=experts,
            num_experts_per_tok=per_token,
            moe_intermediate_size=inner,
            shared_expert_intermediate_size=inner,
        )
    family = "Qwen3_5Moe" if moe else "Qwen3_5"
    return dict(
        architectures=[f"{family}ForConditionalGeneration"],
        model_type="qwen3_5_moe" if moe else "qwen3_5",
        tie_word_embeddings=size.tied,
        text_config=text,
        vision_config=dict(depth=27),
    )
