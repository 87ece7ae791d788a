"""A tiny model both ways, in transformers and in millpond, for tests that compare them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from millpond.models.base import Description, Model, describe, load
from millpond.ops.bind import Bound
from tests.support import tiny_models
from tests.support.batches import Bench

CPU = torch.device("cpu")
KINDS = ("glm", "qwen_dense", "qwen_moe")


@dataclass(frozen=True)
class Tiny:
    """A model both ways. `draft` holds transformers modules wired into its draft layer."""

    kind: str
    oracle: Any
    draft: torch.nn.ModuleDict
    description: Description
    model: Model

    def bench(self, **sizes: int) -> Bench:
        """Fresh memory, all of it NaN."""
        layout = self.description.layout(torch.float32, sizes.get("num_drafts", 0))
        return Bench(self.model, layout, **sizes)

    def reference(self, ids: list[int]) -> torch.Tensor:
        """Logits of every position, by transformers."""
        with torch.inference_mode():
            return self.oracle(input_ids=torch.tensor([ids])).logits[0]

    @property
    def linear_layers(self) -> list[int]:
        """Indices of the layers that keep a state."""
        types = self.description.config.layer_types  # type: ignore[attr-defined]
        return [i for i, kind in enumerate(types) if kind == "linear_attention"]


def make(kind: str, model_dir: Path, ops: Bound) -> Tiny:
    """Draw a model, store it in `model_dir` under published names, and load it."""
    oracle, draft, model_dir = tiny_models.build(kind, model_dir)
    description = describe(model_dir)
    model = load(description, ops, dtype=torch.float32, device=CPU)
    return Tiny(kind, oracle, draft, description, model)


def random_ids(count: int, seed: int) -> list[int]:
    """Token ids that mean nothing to any family."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 250, (count,), generator=generator).tolist()
