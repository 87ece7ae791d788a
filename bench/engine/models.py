"""Directories of models for speed: a configuration in the published format, and no weights.

Weights are drawn at random (load format `dummy`). `q4` has the shape of the published Qwen3.5-4B,
`g8` that of GLM-5.3-Flash cut to eight layers, with all its experts and its draft layer; the tiny
ones have the same layers a few hundred times smaller, for a CPU.

python -m bench.engine.models [NAME --to DIR]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from millpond.models.base import Description, describe
from millpond.ops.bind import bind

QWEN_COMMON: dict[str, Any] = dict(
    model_type="qwen3_5_text",
    architectures=["Qwen3_5ForCausalLM"],
    hidden_act="silu",
    attention_bias=False,
    attn_output_gate=True,
    mamba_ssm_dtype="float32",
    mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False,
    full_attention_interval=4,
    linear_conv_kernel_dim=4,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    max_position_embeddings=262144,
)

Q4: dict[str, Any] = QWEN_COMMON | dict(
    vocab_size=248320,
    hidden_size=2560,
    intermediate_size=9216,
    num_hidden_layers=32,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_key_head_dim=128,
    linear_num_value_heads=32,
    linear_value_head_dim=128,
    eos_token_id=248044,
    rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25),
)

TINY_Q4: dict[str, Any] = QWEN_COMMON | dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    linear_num_key_heads=1,
    linear_key_head_dim=16,
    linear_num_value_heads=2,
    linear_value_head_dim=16,
    eos_token_id=1,
    rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25),
)

GLM_COMMON: dict[str, Any] = dict(
    model_type="glm5_next_text",
    architectures=["Glm5NextForCausalLM"],
    num_hidden_layers=8,
    num_nextn_predict_layers=1,
    layer_types=[*["linear_attention"] * 3, "deepseek_sparse_attention"] * 2,
    mlp_layer_types=[*["dense"] * 3, *["sparse"] * 5],
    qk_rope_head_dim=0,
    index_kpool=4,
    index_kpool_compress=True,
    index_kpool_always_select_tail=True,
    n_group=1,
    topk_group=1,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    norm_topk_prob=True,
    n_shared_experts=1,
    routed_scaling_factor=2.5,
    mhc=True,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    swiglu_limit=10.0,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    attention_bias=False,
    tie_word_embeddings=False,
    max_position_embeddings=1048576,
)

G8: dict[str, Any] = GLM_COMMON | dict(
    vocab_size=154880,
    hidden_size=4096,
    intermediate_size=12288,
    moe_intermediate_size=2048,
    n_routed_experts=288,
    num_experts_per_tok=8,
    num_attention_heads=64,
    num_key_value_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=256,
    v_head_dim=256,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=2048,
    linear_attn_config=dict(
        num_heads=64, head_dim=128, short_conv_kernel_size=4, gate_lower_bound=-5.0
    ),
    eos_token_id=[154820, 154827, 154829],
)

TINY_G8: dict[str, Any] = GLM_COMMON | dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    n_routed_experts=8,
    num_experts_per_tok=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    v_head_dim=16,
    index_n_heads=16,
    index_head_dim=16,
    index_topk=256,
    linear_attn_config=dict(
        num_heads=4, head_dim=16, short_conv_kernel_size=4, gate_lower_bound=-5.0
    ),
    eos_token_id=[1],
)

CONFIGS: dict[str, dict[str, Any]] = {
    "q4": Q4,
    "g8": G8,
    "tiny-q4": TINY_Q4,
    "tiny-g8": TINY_G8,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a model: its weights, a slot, a page of 64 tokens, and a seat by drafts a step."""

    weights: int
    slot: int
    page: int
    seat: dict[int, int]

    @classmethod
    def of(cls, description: Description, dtype: torch.dtype) -> Sizes:
        """Counted without making any weights."""
        layout = description.layout(dtype)
        ops = bind(torch.device("cpu"), quiet=True)
        return cls(
            weights=description.weight_bytes(dtype, ops),
            slot=layout.slot.num_bytes,
            page=layout.page.num_bytes,
            seat={k: description.layout(dtype, k).seat.num_bytes for k in (0, 1, 3, 5, 7)},
        )


def write(name: str, folder: Path) -> Path:
    """A directory `folder/name` of the model called `name`; one that is there is written anew."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(CONFIGS[name], indent=1) + "\n", "utf-8")
    return target


def main(arguments: list[str]) -> int:
    """Print the bytes of every model; with a name and a folder, write that one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=sorted(CONFIGS))
    parser.add_argument("--to", type=Path, default=Path("out/models"))
    chosen = parser.parse_args(arguments)
    print(
        "| model | weights | slot | page | seat with 0, 1, 3, 5, 7 drafts |\n|---|---|---|---|---|"
    )
    for name in [chosen.name] if chosen.name else CONFIGS:
        sizes = Sizes.of(describe(write(name, chosen.to)), torch.bfloat16)
        seats = ", ".join(f"{one / 1e6:.2f}" for one in sizes.seat.values())
        print(
            f"| {name} | {sizes.weights / 1e9:.2f} GB | {sizes.slot / 1e6:.2f} MB"
            f" | {sizes.page / 1e6:.3f} MB | {seats} MB |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
