"""What a user may configure, and the numbers derived from it; knows no tensors.

`options` are what a user may say, `checks` refuse what no model can be served with, `sizes` split
the memory, and `resolve` puts together what the engine runs with.
"""

from millpond.config.checks import DEVICES, LEAST_SESSION, check
from millpond.config.options import (
    DRAFT_METHOD,
    NOT_SERVED,
    PAGE,
    GenerationConfig,
    PytorchEngineConfig,
    SpeculativeConfig,
    num_drafts,
)
from millpond.config.resolved import Resolved, resolve
from millpond.config.sizes import ModelFacts

__all__ = [
    "DEVICES",
    "DRAFT_METHOD",
    "LEAST_SESSION",
    "NOT_SERVED",
    "PAGE",
    "GenerationConfig",
    "ModelFacts",
    "PytorchEngineConfig",
    "Resolved",
    "SpeculativeConfig",
    "check",
    "num_drafts",
    "resolve",
]
