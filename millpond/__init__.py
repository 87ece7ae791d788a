"""The public names of millpond. Importing the package alone loads none of them, nor torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.config import GenerationConfig, PytorchEngineConfig, SpeculativeConfig
    from millpond.errors import (
        Broken,
        Busy,
        Exhausted,
        LeaseError,
        MillpondError,
        Refused,
        Rejected,
        StepFailed,
        Unavailable,
    )
    from millpond.front.pipeline import Pipeline, Response, pipeline

__version__ = "0.1.0"

__all__ = [
    "Broken",
    "Busy",
    "Exhausted",
    "GenerationConfig",
    "LeaseError",
    "MillpondError",
    "Pipeline",
    "PytorchEngineConfig",
    "Refused",
    "Rejected",
    "Response",
    "SpeculativeConfig",
    "StepFailed",
    "Unavailable",
    "__version__",
    "pipeline",
]

_HOME = {
    "millpond.config": ("GenerationConfig", "PytorchEngineConfig", "SpeculativeConfig"),
    "millpond.front.pipeline": ("Pipeline", "Response", "pipeline"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'millpond' has no attribute {name!r}")
    home = next((module for module, names in _HOME.items() if name in names), "millpond.errors")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
