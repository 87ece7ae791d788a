"""Every kernel test runs twice: under the interpreter (`make interp`) and on a GPU (`make gpu`)."""

from __future__ import annotations

import pytest
import torch

from tests.ops.triton.layers import poisoned

__all__ = ["device", "poisoned"]

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter, id="interpreter"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernels run; the reference runs on the CPU."""
    return torch.device(request.param)
