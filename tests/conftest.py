"""What every test gets: the Hypothesis profiles, its own log and noise, a GPU or why there is none.

Warnings, markers, timeouts: pyproject.toml.

`--hypothesis-profile NAME` chooses one. Without it the runs are few and the same every time.
"""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import HealthCheck, settings

GPUS = {"gpu": 1, "multigpu": 2}
"""Markers, and how many devices their tests need."""

# No deadline anywhere: a busy machine must not fail a property.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("ci-lite", max_examples=60, derandomize=True, print_blob=True, **_COMMON)
settings.register_profile("dev", max_examples=100, **_COMMON)
settings.register_profile("ci", max_examples=400, derandomize=True, print_blob=True, **_COMMON)
settings.register_profile("nightly", max_examples=20_000, print_blob=True, **_COMMON)
settings.load_profile("ci-lite")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what asks for more GPUs than there are."""
    wanted = max((n for name, n in GPUS.items() if item.get_closest_marker(name)), default=0)
    if wanted and (found := torch.cuda.device_count()) < wanted:
        pytest.skip(f"needs {wanted} CUDA device{'s' * (wanted > 1)}, torch sees {found}")


@pytest.fixture(autouse=True)
def _noise_as_ever() -> None:
    """What a test draws without a generator is the same whatever ran before, and where."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _log_as_it_was() -> None:
    """What a command did to the package's log is undone: the next test may want to read it."""
    package = logging.getLogger("millpond")
    package.setLevel(logging.NOTSET)
    package.handlers.clear()
    package.propagate = True
