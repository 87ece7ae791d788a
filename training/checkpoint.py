"""Weights to and from the published checkpoint layout, and the files beside them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.family import Family


def tensors(family: Family, model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of the checkpoint: bfloat16, float32 where the family keeps it."""
    out = {}
    for name, value in model.state_dict().items():
        for key, tensor in family.names.split(model.shape, name, value.detach().cpu()).items():
            dtype = torch.float32 if key.endswith(family.names.exact) else torch.bfloat16
            out[key] = tensor.to(dtype).contiguous()
    return out


def load_published(family: Family, model: nn.Module, path: Path) -> None:
    """Fills the training model from a published checkpoint file; every tensor must be there."""
    stored = load_file(str(path))
    state = {}
    for name, value in model.state_dict().items():
        keys = family.names.split(model.shape, name, value)
        state[name] = family.names.join(name, [stored.pop(key).float() for key in keys])
    if stored:
        raise ValueError(f"unknown tensors: {sorted(stored)[:3]}")
    model.load_state_dict(state)


def added_ids(family: Family) -> dict[str, int]:
    """Numbers of the added tokens of the family's tokenizer."""
    tokenizer = Tokenizer.from_file(str(family.bundle / "tokenizer.json"))
    return {token: tokenizer.token_to_id(token) for token in family.alphabet.added}


def save(family: Family, model: nn.Module, bundle: Path) -> None:
    """Writes model.safetensors, config.json and generation_config.json."""
    bundle.mkdir(parents=True, exist_ok=True)
    ids = added_ids(family)
    save_file(tensors(family, model), str(bundle / "model.safetensors"), metadata={"format": "pt"})
    for name, content in (
        ("config.json", family.config(model.shape, ids)),
        ("generation_config.json", family.generation_config(ids)),
    ):
        (bundle / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
