"""A service over a scripted engine, and a real server of it on a loopback port.

Processes of their own start servers from here, too: so nothing in here needs torch.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import httpx
import pytest
import uvicorn

from millpond.config import ModelFacts, PytorchEngineConfig, resolve
from millpond.engine.types import EngineRequest
from millpond.front.chat import ChatTemplate
from millpond.front.sampling import Defaults
from millpond.front.server import Options, bind, build_app
from millpond.front.service import Service
from millpond.front.text import Tokenizer
from tests.support.fake_engine import FakeEngine

BUNDLED = Path(__file__).resolve().parents[2] / "millpond" / "bundled" / "millpond-tiny-glm"
EOS = frozenset(json.loads((BUNDLED / "generation_config.json").read_text())["eos_token_id"])
FACTS = ModelFacts(
    name="tiny", slot_bytes=1000, page_bytes=100, seat_bytes=10, weight_bytes=0, max_position=512
)


@pytest.fixture(scope="session", autouse=True)
def _patient_clients() -> Iterator[None]:
    """Clients wait a minute for a busy machine, and read the certificates of the web only once.

    Nobody here speaks TLS, yet each `httpx.get` would take 25 ms of its own to be ready for it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        usual = httpx._config.DEFAULT_TIMEOUT_CONFIG
        for wait in usual.as_dict():
            patch.setattr(usual, wait, 60.0)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(BUNDLED)


def make_service(tokenizer: Tokenizer, text: str, *, pause: float = 0.0) -> Service:
    """A service whose engine answers `text` and ends the turn; sample 1 says `text #1`."""
    user = tokenizer.token_id("<|user|>")
    assert user is not None

    def script(request: EngineRequest, sample: int) -> list[int]:
        return [*tokenizer.encode(text + (f" #{sample}" if sample else "")), user]

    engine = FakeEngine(script, eos=EOS, pause=pause)
    config = PytorchEngineConfig(max_batch_size=8)
    return Service(
        name="tiny",
        directory=BUNDLED,
        tokenizer=tokenizer,
        template=ChatTemplate.of_model(BUNDLED, tokenizer),
        defaults=Defaults.of_model(BUNDLED),
        resolved=resolve(config, FACTS, available=1 << 30),
        vocab_size=2048,
        engine=engine,
    )


class Running:
    """A server on a loopback port, in a thread."""

    client: httpx.Client  # of tests that talk to it a lot

    def __init__(self, service: Service, options: Options | None = None) -> None:
        self.service = service
        listening = bind("127.0.0.1", 0)
        self.port = listening.getsockname()[1]
        config = uvicorn.Config(
            build_app(service, options),
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()
        wait_for(lambda: self._server.started)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until `condition` holds; fails the test when it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("waited in vain")
        time.sleep(0.005)


def held(service: Service) -> int:
    """What a service still holds for requests; 0 when all is given back."""
    stats = service.engine.stats()
    return stats.requests_running + stats.requests_waiting + stats.slots_running


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Iterator[Callable[..., Running]]:
    """Starts servers; after the test nothing may be held by any of them."""
    started: list[Running] = []

    def start(text: str, *, pause: float = 0.0, options: Options | None = None) -> Running:
        started.append(Running(make_service(tokenizer, text, pause=pause), options))
        return started[-1]

    yield start
    for running in started:
        wait_for(lambda r=running: held(r.service) == 0)
        running.close()


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[Running]:
    """One server for the tests that must submit nothing."""
    running = Running(make_service(tokenizer, "x"))
    yield running
    assert held(running.service) == 0
    running.close()
