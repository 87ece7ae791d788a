"""Weights to and from the published checkpoint layout; knows names and dtypes only."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.model import Model
from training.shape import Shape, config, generation_config
from training.tokenizer import ADDED

PREFIX = "model.language_model."
_FLOAT32 = ("A_log", "dt_bias", "hc_attn_base", "hc_attn_scale", "hc_ffn_base", "hc_ffn_scale",
            "e_score_correction_bias")  # fmt: skip
_HC = ("attn", "ffn")


def _published(shape: Shape, name: str, value: Tensor) -> dict[str, Tensor]:
    """One parameter of the training model under its published name or names."""
    layers = len(shape.mixers)
    name = name.replace("draft.", f"layers.{layers}.", 1) if name.startswith("draft.") else name
    name = name.replace("shared_head_norm", "shared_head.norm")
    for part in _HC:
        name = name.replace(f"hc_{part}.", f"hc_{part}_")
    if name == "embed_tokens":
        return {"embed_tokens.weight": value}
    if name.endswith("self_attn.conv"):
        stem = name.removesuffix("conv")
        parts = value[:, None].chunk(3)
        return {f"{stem}{x}_conv1d.weight": p for x, p in zip("qkv", parts, strict=True)}
    if name.endswith("experts_gate_up"):
        stem = name.removesuffix("experts_gate_up") + "experts"
        out = {}
        for i, expert in enumerate(value):
            gate, up = expert.chunk(2)
            out |= {f"{stem}.{i}.gate_proj.weight": gate, f"{stem}.{i}.up_proj.weight": up}
        return out
    if name.endswith("experts_down"):
        stem = name.removesuffix("experts_down") + "experts"
        return {f"{stem}.{i}.down_proj.weight": expert for i, expert in enumerate(value)}
    if name.endswith(("indexer.wq_b", "indexer.wk", "indexer.weights_proj")):
        name += ".weight"
    return {name: value}


def tensors(model: Model) -> dict[str, Tensor]:
    """Every tensor of the checkpoint: bfloat16, float32 where rounding would change routing."""
    out = {}
    for name, value in model.state_dict().items():
        for key, tensor in _published(model.shape, name, value.detach().cpu()).items():
            dtype = torch.float32 if key.endswith(_FLOAT32) else torch.bfloat16
            out[PREFIX + key] = tensor.to(dtype).contiguous()
    return out


def load_published(model: Model, path: Path) -> None:
    """Fills the training model from a published checkpoint file; every tensor must be there."""
    stored = load_file(str(path))
    state = {}
    for name, value in model.state_dict().items():
        parts = [stored.pop(PREFIX + key).float() for key in _published(model.shape, name, value)]
        if name.endswith("self_attn.conv"):
            state[name] = torch.cat(parts)[:, 0]
        elif name.endswith("experts_gate_up"):
            state[name] = torch.stack(
                [torch.cat(parts[i : i + 2]) for i in range(0, len(parts), 2)]
            )
        elif name.endswith("experts_down"):
            state[name] = torch.stack(parts)
        else:
            (state[name],) = parts
    if stored:
        raise ValueError(f"unknown tensors: {sorted(stored)[:3]}")
    model.load_state_dict(state)


def added_ids(bundle: Path) -> dict[str, int]:
    """Numbers of the added tokens of the tokenizer in `bundle`."""
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    return {token: tokenizer.token_to_id(token) for token in ADDED}


def save(model: Model, bundle: Path, ids: dict[str, int]) -> None:
    """Writes model.safetensors, config.json and generation_config.json."""
    bundle.mkdir(parents=True, exist_ok=True)
    save_file(tensors(model), str(bundle / "model.safetensors"), metadata={"format": "pt"})
    for name, content in (
        ("config.json", config(model.shape, ids)),
        ("generation_config.json", generation_config(ids)),
    ):
        (bundle / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
