"""One tiny random model of each family, in transformers and in millpond, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from millpond.models.base import Description, Model, describe, load
from millpond.ops.bind import Bound, bind
from tests.support import tiny_models
from tests.support.batches import Bench

CPU = torch.device("cpu")
KINDS = ("glm", "glm_tied", "qwen_dense", "qwen_moe")


@dataclass(frozen=True)
class Tiny:
    """A model both ways. `draft` is the oracle of its draft layer, a set of transformers modules."""

    kind: str
    oracle: Any
    draft: torch.nn.ModuleDict
    description: Description
    model: Model

    def bench(self, **sizes: int) -> Bench:
        """Fresh memory, all of it NaN."""
        return Bench(self.model, self.description.layout(torch.float32), **sizes)

    def reference(self, ids: list[int]) -> torch.Tensor:
        """Logits of every position, by transformers."""
        with torch.inference_mode():
            return self.oracle(input_ids=torch.tensor([ids])).logits[0]

    @property
    def linear_layers(self) -> list[int]:
        """Indices of the layers that keep a state."""
        types = self.description.config.layer_types  # type: ignore[attr-defined]
        return [i for i, kind in enumerate(types) if kind == "linear_attention"]


@pytest.fixture(scope="session")
def ops() -> Bound:
    return bind(CPU)


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory, ops: Bound) -> Callable[[str], Tiny]:
    """Tiny models by kind, each made when first asked for."""
    made: dict[str, Tiny] = {}

    def make(kind: str) -> Tiny:
        if kind not in made:
            oracle, draft, model_dir = tiny_models.build(kind, tmp_path_factory.mktemp(kind))
            description = describe(model_dir)
            model = load(description, ops, dtype=torch.float32, device=CPU)
            made[kind] = Tiny(kind, oracle, draft, description, model)
        return made[kind]

    return make


@pytest.fixture(params=KINDS)
def tiny(request: pytest.FixtureRequest, make_tiny: Callable[[str], Tiny]) -> Tiny:
    return make_tiny(request.param)


@pytest.fixture
def tiny_glm_dir(make_tiny: Callable[[str], Tiny]) -> Path:
    return make_tiny("glm").description.model_dir


@pytest.fixture
def prompt() -> list[int]:
    """200 tokens: three whole pages and a bit."""
    return random_ids(200, 0)


def random_ids(count: int, seed: int) -> list[int]:
    """Token ids that mean nothing to any family."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 250, (count,), generator=generator).tolist()
