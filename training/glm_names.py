"""Published tensor names of glm5_next, both ways."""

import torch
from torch import Tensor

from training.layers import Names
from training.shape import Shape

_PREFIX = "model.language_model."
_HC = ("attn", "ffn")


def _split(shape: Shape, name: str, value: Tensor) -> dict[str, Tensor]:
    """One parameter of the training model under its published name or names."""
    name = name.replace("draft.", f"layers.{len(shape.mixers)}.", 1)
    name = _PREFIX + name.replace("shared_head_norm", "shared_head.norm")
    for part in _HC:
        name = name.replace(f"hc_{part}.", f"hc_{part}_")
    if name.endswith("embed_tokens"):
        return {f"{name}.weight": value}
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


def _join(name: str, parts: list[Tensor]) -> Tensor:
    if name.endswith("self_attn.conv"):
        return torch.cat(parts)[:, 0]
    if name.endswith("experts_gate_up"):
        return torch.stack([torch.cat(parts[i : i + 2]) for i in range(0, len(parts), 2)])
    if name.endswith("experts_down"):
        return torch.stack(parts)
    (value,) = parts
    return value


NAMES = Names(
    _split,
    _join,
    exact=("A_log", "dt_bias", "hc_attn_base", "hc_attn_scale", "hc_ffn_base", "hc_ffn_scale",
           "e_score_correction_bias"),
)  # fmt: skip
