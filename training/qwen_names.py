"""Published tensor names of qwen3_5, both ways."""

from torch import Tensor

from training.layers import Names
from training.qwen_shape import QwenShape

_PREFIX = "model.language_model."


def _split(shape: QwenShape, name: str, value: Tensor) -> dict[str, Tensor]:
    """One parameter of the training model under its published name."""
    if name == "embed_tokens":
        name += ".weight"
    draft = name.startswith("draft.")
    name = name.removeprefix("draft.")
    if draft:
        name = name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name
    if ".mixer." in name:
        index = 0 if draft else int(name.split(".")[1])
        attention = draft or shape.mixers[index] == "a"
        name = name.replace(".mixer.", ".self_attn." if attention else ".linear_attn.")
    if name.endswith("linear_attn.conv"):
        name, value = f"{name}1d.weight", value[:, None]
    return {("mtp." if draft else _PREFIX) + name: value}


def _join(name: str, parts: list[Tensor]) -> Tensor:
    (value,) = parts
    return value[:, 0] if name.endswith("mixer.conv") else value


NAMES = Names(_split, _join, exact=("A_log", "linear_attn.norm.weight"))
