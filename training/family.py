"""The two bundled models as families: what the trainer needs to know of each, in one record."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from training import glm, glm_names, qwen, qwen_names, qwen_shape, render, shape, tokenizer
from training.layers import Names


@dataclass(frozen=True, slots=True)
class Family:
    """One bundled model.

    `model` builds the training model of a shape; `compiled` lists its token-wise parts as (class,
    method); `names` maps its parameters to published ones; the config functions make the files.
    """

    name: str
    bundle: Path
    alphabet: tokenizer.Alphabet
    eos: str
    text: Callable[..., str]
    encoder: Callable[[], render.Encoder]
    shape: Any
    toy: Any
    model: Callable[[Any], nn.Module]
    compiled: tuple[tuple[type[nn.Module], str], ...]
    names: Names
    config: Callable[[Any, dict[str, int]], dict[str, Any]]
    generation_config: Callable[[dict[str, int]], dict[str, Any]]


GLM = Family(
    name="glm",
    bundle=render.GLM_BUNDLE,
    alphabet=tokenizer.GLM,
    eos="<|endoftext|>",
    text=render.glm_text,
    encoder=render.GlmEncoder,
    shape=shape.Shape(),
    toy=shape.TOY,
    model=glm.Model,
    compiled=tuple((c, m) for c in (glm.Layer, glm.DraftLayer) for m in ("open", "close")),
    names=glm_names.NAMES,
    config=shape.config,
    generation_config=shape.generation_config,
)
QWEN = Family(
    name="qwen",
    bundle=render.QWEN_BUNDLE,
    alphabet=tokenizer.QWEN,
    eos="<|im_end|>",
    text=render.qwen_text,
    encoder=render.QwenEncoder,
    shape=qwen_shape.QwenShape(),
    toy=qwen_shape.QWEN_TOY,
    model=qwen.Model,
    compiled=tuple((c, m) for c in (qwen.Layer, qwen.DraftLayer) for m in ("open", "close")),
    names=qwen_names.NAMES,
    config=qwen_shape.config,
    generation_config=qwen_shape.generation_config,
)
FAMILIES = {family.name: family for family in (GLM, QWEN)}
