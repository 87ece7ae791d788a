"""What a model is to the rest, and how a directory becomes one; finds families in this folder.

A family is a module with `MODEL_TYPES`, `IGNORED`, `DraftLayer`, `parse`, `build` and `draw`. Its
configuration knows the layout of slots, pages and seats, so that memory is planned before weights
are read.

Drafting, beside a model's forward. Entry i of the draft layer is made from the final hidden of
token i - 1 and the embedding of token i. The target's forward writes the entries of all its tokens;
`Model.draft` runs the whole layer on one entry a row, and what it returns predicts the token at
i + 1. A chain for the drafts of B rows goes:

    batch = B rows of one token each in decode form, whose slots are all none: token_ids the token
            just drawn, at its own position i; row_start i, row_end i + 1; starts and ends (bounds)
            and page_table reach over the whole chain, so that all its steps have one P
    hidden = the target's final hidden of i - 1: the vector that the token was drawn from
    n, selected = model.draft(batch, hidden, arenas)
    tokens = choose(model.draft_logits(n))
    n, selected = model.draft(batch one position on with `tokens`, n, arenas, selected)
    ...

The first entry of a chain is what the target's next forward writes again; later ones stand on
drafts, and are overwritten when their position is verified. A row of no seat has seat and page -1.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

import millpond.models
from millpond.errors import Refused
from millpond.memory.arena import Arenas
from millpond.memory.layout import ModelLayout
from millpond.models.fields import Fields
from millpond.models.progress import LoadBar
from millpond.models.weights import (
    Checkpoint,
    Dummy,
    Shapes,
    Weights,
    has_weights,
    read_json,
    unused,
)
from millpond.ops.batch import ForwardBatch
from millpond.ops.bind import Bound

log = logging.getLogger(__name__)

DUMMY = "dummy"
"""The load format that reads no weights and draws them at random."""


class Model(Protocol):
    """A decoder on one device. Its forward is a function from slots to slots."""

    def forward(self, batch: ForwardBatch, arenas: Arenas) -> torch.Tensor:
        """The final hidden vectors [T, hidden] of all tokens, after the final norm.

        Reads every row's `state_in`, writes its `state_out` and exports, its pages and its seat's
        tails, the draft layer's included. Every layer records what it wrote to slots in
        `batch.prefill.written` and `batch.decode.written`; what all agree on may be published.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, hidden] -> [M, vocab] fp32."""

    def draft(
        self,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        arenas: Arenas,
        selected: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One step of a chain (see above): hidden [B, hidden] -> n [B, hidden], and `selected`.

        n, after the layer's own norm, is what `draft_logits` takes, and the next step's `hidden`.
        `selected` is opaque: None starts a chain, its later steps are given what the first gave.
        Writes the entry to the row's page and, at the start of a chain, the seat's tail. Raises
        `Broken` if there is no draft layer.
        """

    def draft_logits(self, n: torch.Tensor) -> torch.Tensor:
        """n [M, hidden] -> [M, vocab] fp32, of the token after the entry's own."""


class Drafting(Protocol):
    """What the class of a draft layer says of all its instances."""

    has_recurrent_state: ClassVar[bool]
    """Whether it keeps a state of its own that checkpoints would have to hold."""


class ModelConfig(Protocol):
    """What every family's configuration says."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; a tokenizer may use fewer."""

    @property
    def max_position(self) -> int:
        """Tokens a sequence may hold."""

    @property
    def delta_rule(self) -> str:
        """Which gated delta rule its linear layers follow: `kda` or `gdn`."""

    @property
    def num_draft_layers(self) -> int:
        """Multi-token-prediction layers: 0 or 1."""

    def layout(self, dtype: torch.dtype, num_drafts: int = 0) -> ModelLayout:
        """What a slot, a page and a seat hold for a model computing in `dtype`.

        `num_drafts`: the most drafts that a step verifies; slots and pages are the same for all.
        """

    @property
    def draft_tensor(self) -> str:
        """How the name of one of the draft layer's tensors ends."""

    def without_draft(self) -> ModelConfig:
        """The same model, its draft layer left out."""


class Family(Protocol):
    """A module of this folder that builds models."""

    MODEL_TYPES: tuple[str, ...]
    IGNORED: tuple[str, ...]  # prefixes of published tensors that are no part of the text model
    DraftLayer: type[Drafting]

    def parse(self, config: Fields) -> ModelConfig:
        """The published configuration. `Refused` names what is missing or not supported."""

    def build(self, config: Any, weights: Weights, ops: Bound) -> Model:
        """Take every tensor. `Refused` names one that is missing or misshapen."""

    def draw(
        self, config: Any, name: str, shape: tuple[int, ...], generator: torch.Generator
    ) -> torch.Tensor | None:
        """A dummy value for tensors that the common rule does not suit."""


@dataclass(frozen=True, slots=True)
class Description:
    """All that is known of a model without reading its weights."""

    model_dir: Path
    model_type: str
    family: Family
    config: ModelConfig
    eos_token_ids: tuple[int, ...]

    def layout(self, dtype: torch.dtype, num_drafts: int = 0) -> ModelLayout:
        """What a slot, a page and a seat hold; `num_drafts`: the most that a step verifies."""
        return self.config.layout(dtype, num_drafts)

    def weight_bytes(self, dtype: torch.dtype, ops: Bound) -> int:
        """Bytes of the weights on the device, counted by building the model without them."""
        weights = Weights(Shapes(), dtype=dtype, device=torch.device("meta"))
        self.family.build(self.config, weights, ops)
        return weights.taken.num_bytes


def families() -> Mapping[str, Family]:
    """Every family of this folder under each model type it serves."""
    found: dict[str, Family] = {}
    for entry in pkgutil.iter_modules(millpond.models.__path__):
        module: Any = import_module(f"{millpond.models.__name__}.{entry.name}")
        for model_type in getattr(module, "MODEL_TYPES", ()):
            found[model_type] = module
    return found


def describe(model_dir: Path) -> Description:
    """Read the configuration of a model directory; weights are neither read nor needed.

    Raises `Refused` for an unknown architecture, an unsupported quantisation, a field that is
    missing or not supported.
    """
    values = read_json(model_dir / "config.json")
    top = Fields(values, str(model_dir / "config.json"))
    known = families()
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in known:
        named = values.get("architectures") or "none named"
        raise Refused(
            f"{top.where}: model_type {model_type!r} (architectures {named}) is not supported; "
            f"supported: {', '.join(sorted(known))}"
        )
    text = top.section("text_config") if "text_config" in top else top
    for fields in (top, text):
        if "quantization_config" in fields:
            method = fields.section("quantization_config").values.get("quant_method")
            raise Refused(f"{fields.where}: quantisation {method!r} is not supported yet")
    family = known[model_type]
    return Description(
        model_dir=model_dir,
        model_type=model_type,
        family=family,
        config=_with_what_is_there(family.parse(top), model_dir),
        eos_token_ids=_eos(model_dir, top, text),
    )


def load(
    description: Description,
    ops: Bound,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
) -> Model:
    """Build the model, its weights read from the directory or, for `dummy`, drawn from `seed`.

    A long load shows a bar on stderr. Raises `Refused`.
    """
    family, config, model_dir = description.family, description.config, description.model_dir
    if config.num_draft_layers and family.DraftLayer.has_recurrent_state:
        raise Refused(
            f"{model_dir}: the draft layer of {description.model_type} keeps a recurrent state of"
            " its own, which no checkpoint holds; such draft layers are not supported yet"
        )
    if load_format == DUMMY:
        drawn = Dummy(lambda *what: family.draw(config, *what), seed, device)
        return family.build(config, Weights(drawn, dtype=dtype, device=device), ops)
    checkpoint = Checkpoint(model_dir)
    with LoadBar(model_dir.name, checkpoint.num_bytes) as bar:
        weights = Weights(checkpoint, dtype=dtype, device=device, on_bytes=bar)
        model = family.build(config, weights, ops)
    left = unused(checkpoint, weights.taken, family.IGNORED)
    if left:
        log.warning("%d tensors of %s are not used: %s", len(left), model_dir, left[:4])
    return model


def _with_what_is_there(config: ModelConfig, model_dir: Path) -> ModelConfig:
    """Leave out a draft layer that the configuration names and the weights, if any, do not hold."""
    if not config.num_draft_layers or not has_weights(model_dir):
        return config
    if any(name.endswith(config.draft_tensor) for name in Checkpoint(model_dir).names()):
        return config
    log.warning("%s holds no draft layer, though its configuration names one", model_dir)
    return config.without_draft()


def _eos(model_dir: Path, top: Fields, text: Fields) -> tuple[int, ...]:
    """The ids that end a text: generation_config.json first, the model's own configuration else."""
    generation = model_dir / "generation_config.json"
    if generation.is_file():
        found = Fields(read_json(generation), str(generation)).token_ids("eos_token_id")
        if found:
            return found
    return text.token_ids("eos_token_id") or top.token_ids("eos_token_id")
