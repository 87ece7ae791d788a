"""Tiny random models of both families in transformers, all parameters re-drawn, and directories.

Half of the linear heads have log decay in [-0.02, 0], so that a damaged state shows long after.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCAB = 256

GLM_TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=64,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=8,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    v_head_dim=24,
    index_head_dim=32,
    index_n_heads=32,
    index_topk=32,  # sparse from token 36 on
    index_kpool=4,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    linear_attn_config=dict(
        num_heads=8, head_dim=32, short_conv_kernel_size=4, gate_lower_bound=-5.0
    ),
    layer_types=[
        *(["linear_attention"] * 3),
        "deepseek_sparse_attention",
        "linear_attention",
        "deepseek_sparse_attention",
    ],
    mlp_layer_types=["dense", *["sparse"] * 5],
    max_position_embeddings=4096,
    pad_token_id=0,
    eos_token_id=[1],
)
GLM_VISION: dict[str, Any] = dict(
    depth=1,
    hidden_size=32,
    num_heads=2,
    intermediate_size=64,
    out_hidden_size=128,
    projection_intermediate_size=64,
    patch_size=14,
    image_size=28,
)
QWEN_TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=32,
    linear_value_head_dim=24,
    linear_conv_kernel_dim=4,
    rms_norm_eps=1e-6,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    pad_token_id=0,
    eos_token_id=1,
    rope_parameters=dict(
        rope_type="default",
        rope_theta=1e7,
        partial_rotary_factor=0.25,
        mrope_section=[3, 3, 2],
        mrope_interleaved=True,
    ),
)
QWEN_DENSE: dict[str, Any] = dict(intermediate_size=256)
QWEN_MOE: dict[str, Any] = dict(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=48,
)
QWEN_VISION: dict[str, Any] = dict(
    depth=1, hidden_size=32, num_heads=2, intermediate_size=64, out_hidden_size=128
)
QWEN_IDS: dict[str, int] = dict(
    image_token_id=250, video_token_id=251, vision_start_token_id=252, vision_end_token_id=253
)


GLM_OTHER: dict[str, Any] = dict(
    linear_attn_config=dict(
        num_heads=8, head_dim=32, short_conv_kernel_size=3, gate_lower_bound=None, safe_gate=False
    ),
    n_shared_experts=2,
    num_experts_per_tok=3,
    norm_topk_prob=False,
    routed_scaling_factor=0.5,
    swiglu_limit=0.3,
    index_kpool=8,
    hc_mult=2,
    hc_sinkhorn_iters=3,
    tie_word_embeddings=True,
)
"""What the published model has at one value only: the other value of each."""


def glm_model(**changes: Any) -> Any:
    """A `Glm5NextForConditionalGeneration`, re-drawn."""
    from transformers.models.glm5_next import Glm5NextConfig, Glm5NextForConditionalGeneration

    text = {**GLM_TEXT, **changes}
    config = Glm5NextConfig(
        text_config=text,
        vision_config=GLM_VISION,
        image_token_id=250,
        video_token_id=251,
        tie_word_embeddings=text.get("tie_word_embeddings", False),
    )
    return redrawn(Glm5NextForConditionalGeneration(config).float().eval())


def qwen_model(kind: str, **changes: Any) -> Any:
    """`kind` dense or moe, wrapped; `dense_text` or `moe_text`: without a vision tower."""
    from transformers.models import qwen3_5, qwen3_5_moe

    module, name = (qwen3_5_moe, "Qwen3_5Moe") if "moe" in kind else (qwen3_5, "Qwen3_5")
    text = {**QWEN_TEXT, **(QWEN_MOE if "moe" in kind else QWEN_DENSE), **changes}
    if kind.endswith("_text"):
        config = getattr(module, f"{name}TextConfig")(**text)
        model = getattr(module, f"{name}ForCausalLM")(config)
    else:
        tied = text["tie_word_embeddings"]
        config = getattr(module, f"{name}Config")(
            text_config=text, vision_config=QWEN_VISION, tie_word_embeddings=tied, **QWEN_IDS
        )
        model = getattr(module, f"{name}ForConditionalGeneration")(config)
    return redrawn(model.float().eval())


def redrawn(module: torch.nn.Module, seed: int = 1) -> torch.nn.Module:
    """Give every parameter and bias buffer a value that shows when it is forgotten."""
    generator = torch.Generator().manual_seed(seed)

    def normal(p: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.randn(p.shape, generator=generator) * scale

    buffers = [(n, b) for n, b in module.named_buffers() if "bias" in n]
    text = module.config.get_text_config() if hasattr(module, "config") else None
    bounded = getattr(text, "linear_lower_bound", None) is not None
    by_channel = hasattr(text, "linear_num_heads")
    with torch.no_grad():
        for name, p in [*module.named_parameters(), *buffers]:
            if name.endswith("A_log"):
                p.copy_(_alternate(p, *((0.0, 0.3) if bounded else (-1.0, 0.3))))
            elif name.endswith("dt_bias"):
                heads = 8 if by_channel else p.numel()
                slow = -8.0 if bounded else -6.0
                p.copy_(_alternate(p.view(heads, -1), slow, -1.0).reshape(-1) + normal(p, 0.2))
            elif "e_score" in name:
                p.copy_(normal(p, 0.3))
            elif name.endswith(("_hc.base", "_hc.scale")):
                p.copy_(normal(p, 0.3) + (0.7 if name.endswith("scale") else 0.0))
            elif "norm" in name:
                p.add_(normal(p, 0.2))
            elif name.endswith("ape"):
                p.copy_(normal(p, 0.7))
            elif name.endswith("conv1d.weight"):
                p.copy_(normal(p, 0.5))
            elif p.ndim == 1:
                p.copy_(normal(p, 0.3))
            else:
                p.copy_(normal(p, 1.0 / math.sqrt(p.shape[-1])))
    return module


def _alternate(p: torch.Tensor, even: float, odd: float) -> torch.Tensor:
    """Rows of `p` filled with `even` and `odd` in turn."""
    rows = torch.where(torch.arange(p.shape[0]) % 2 == 0, even, odd)
    return rows.view(-1, *[1] * (p.ndim - 1)).expand_as(p)


def build(kind: str, model_dir: Path) -> tuple[Any, torch.nn.ModuleDict, Path]:
    """A model, the modules of its draft layer, and both in a directory under published names.

    Kinds: glm, glm_other, qwen_dense, qwen_moe. Experts of the body are stored one by one, as
    `save_pretrained` writes them, those of the draft layer fused.
    """
    other = GLM_OTHER if kind == "glm_other" else {}
    model = glm_model(**other) if kind.startswith("glm") else qwen_model(kind.removeprefix("qwen_"))
    draft = _glm_draft(model) if kind.startswith("glm") else _qwen_draft(model)
    redrawn(draft, seed=2)
    model.save_pretrained(model_dir)
    file = model_dir / "model.safetensors"
    stored = load_file(file) | _published_draft(kind, draft, model)
    save_file(stored, file, metadata={"format": "pt"})
    edit_config(model_dir, num_nextn_predict_layers=1, mtp_num_hidden_layers=1)
    return model, draft.float().eval(), model_dir


def _glm_draft(model: Any) -> torch.nn.ModuleDict:
    """The draft layer by hand: one sparse attention and one mixture, with plain residuals."""
    from transformers.models.glm5_next import modeling_glm5_next as glm

    text = model.config.text_config
    one = type(text)(
        **text.to_dict()
        | dict(num_hidden_layers=1, layer_types=["indexed_attention"], mlp_layer_types=["sparse"])
        | dict(indexer_types=["full"])
    )
    one._attn_implementation = "sdpa"
    hidden, eps = text.hidden_size, text.rms_norm_eps
    norms = {
        name: glm.Glm5NextTextRMSNorm(hidden, eps)
        for name in ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "norm")
    }
    return torch.nn.ModuleDict(
        {
            "eh_proj": torch.nn.Linear(2 * hidden, hidden, bias=False),
            "self_attn": glm.Glm5NextTextAttention(one, 0),
            "mlp": glm.Glm5NextTextMoE(one),
            **norms,
        }
    )


def _qwen_draft(model: Any) -> torch.nn.ModuleDict:
    """The draft layer by hand: a text model of one attending layer, whose norm is the draft's."""
    text = model.config.get_text_config()
    values = text.to_dict() | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    kind = type(model.get_decoder())
    norm = type(model.get_decoder().norm)
    hidden, eps = text.hidden_size, text.rms_norm_eps
    return torch.nn.ModuleDict(
        {
            "fc": torch.nn.Linear(2 * hidden, hidden, bias=False),
            "pre_fc_norm_embedding": norm(hidden, eps),
            "pre_fc_norm_hidden": norm(hidden, eps),
            "decoder": kind(type(text)(**values)),
        }
    )


def _published_draft(kind: str, draft: torch.nn.ModuleDict, model: Any) -> dict[str, torch.Tensor]:
    """The draft layer's tensors under their published names."""
    found = {}
    if kind.startswith("glm"):
        layers = model.config.text_config.num_hidden_layers
        for name, value in draft.state_dict().items():
            name = "shared_head.norm.weight" if name == "norm.weight" else name
            found[f"model.language_model.layers.{layers}.{name}"] = value
        return found
    for name, value in draft.state_dict().items():
        if not name.startswith("decoder.embed_tokens"):
            found[f"mtp.{name.removeprefix('decoder.')}"] = value
    return found


def edit_config(model_dir: Path, **fields: Any) -> None:
    """Change fields of the text configuration; None removes one."""
    path = model_dir / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    text.update(fields)
    for name in [n for n, value in fields.items() if value is None]:
        del text[name]
    path.write_text(json.dumps(config))
