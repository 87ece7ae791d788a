"""The shape of millpond-tiny-qwen and its published config files; knows no tensor."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class QwenShape:
    """Sizes of a dense qwen3_5 text model with one draft layer (units: features unless said)."""

    vocab: int = 2048
    hidden: int = 160
    mlp: int = 320
    layers: int = 6
    every: int = 3
    """Every third layer is attention, the others are linear (GDN)."""
    key_heads: int = 2
    value_heads: int = 4
    linear_dim: int = 32
    conv: int = 4
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 32
    rotary: float = 0.25
    theta: float = 1e7
    eps: float = 1e-6
    context: int = 8192

    @property
    def mixers(self) -> str:
        """One letter a layer: g is linear attention, a is attention."""
        return "".join("a" if (i + 1) % self.every == 0 else "g" for i in range(self.layers))

    @property
    def rotary_dim(self) -> int:
        """Features of a head that turn with the position."""
        return int(self.head_dim * self.rotary)


QWEN_TOY = QwenShape(hidden=32, mlp=48, layers=3, heads=2, head_dim=16, linear_dim=16)
"""A shape small enough to train a few steps on a CPU."""


def _section(shape: QwenShape) -> list[int]:
    """How many of the rotated pairs follow each of three positions; text uses one for all."""
    pairs = shape.rotary_dim // 2
    side = pairs // 3
    return [pairs - 2 * side, side, side]


def text_config(shape: QwenShape, ids: dict[str, int]) -> dict[str, Any]:
    """`text_config` of the published layout; `ids` maps added tokens to their numbers."""
    kinds = {"a": "full_attention", "g": "linear_attention"}
    return {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "full_attention_interval": shape.every,
        "layer_types": [kinds[kind] for kind in shape.mixers],
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.value_heads,
        "linear_key_head_dim": shape.linear_dim,
        "linear_value_head_dim": shape.linear_dim,
        "linear_conv_kernel_dim": shape.conv,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rms_norm_eps": shape.eps,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": shape.context,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.theta,
            "partial_rotary_factor": shape.rotary,
            "mrope_section": _section(shape),
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "pad_token_id": ids["<|endoftext|>"],
        "bos_token_id": None,
        "eos_token_id": ids["<|endoftext|>"],
    }


def stop_ids(ids: dict[str, int]) -> list[int]:
    """The end of a turn and the end of text; as published, only generation_config names both."""
    return [ids["<|im_end|>"], ids["<|endoftext|>"]]


def config(shape: QwenShape, ids: dict[str, int]) -> dict[str, Any]:
    """The whole config.json. The vision part only lets the published classes be built."""
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "text_config": text_config(shape, ids),
        "vision_config": {
            "model_type": "qwen3_5",
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 32,
            "out_hidden_size": shape.hidden,
            "patch_size": 14,
        },
    }


def generation_config(ids: dict[str, int]) -> dict[str, Any]:
    """generation_config.json with the family's sampling defaults."""
    return {
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 20,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": stop_ids(ids),
        "pad_token_id": ids["<|endoftext|>"],
    }
