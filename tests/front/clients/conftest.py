"""The bundled model behind a real server, and programs of others in environments of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millpond import PytorchEngineConfig
from millpond.front.compose import open_service
from tests.front.conftest import BUNDLED, Running

SCRIPTS = Path(__file__).parent / "scripts"
ENVIRONMENTS = Path(sys.prefix) / "clients"
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "OPENAI_API_KEY": "none",
    "NO_PROXY": "127.0.0.1",
}


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    config = PytorchEngineConfig(device="cpu", max_batch_size=8, session_len=4096)
    service = open_service(BUNDLED, config, name="tiny")
    running = Running(service)
    yield running
    running.close()
    service.engine.close(drain=False, timeout=10)


@pytest.fixture
def run(tmp_path) -> Callable[..., str]:
    """Run a program of an environment, or a script in it; returns what it printed."""

    def start(environment: str, program: str, *words: str) -> str:
        tools = ENVIRONMENTS / environment / "bin"
        if not tools.is_dir():
            pytest.fail(f"{tools} is missing: make clients installs it")
        command = [str(tools / program), *words]
        if program.endswith(".py"):
            command = [str(tools / "python"), str(SCRIPTS / program), *words]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, **OFFLINE, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
        return done.stdout

    return start
