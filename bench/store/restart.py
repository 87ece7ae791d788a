"""Seconds from a request to its first token after a restart: out of a store, and computed again.

    python -m bench.store.restart [--tokens 1024,4096] [--trials 5] [--model MODEL] [--mooncake]

Every trial opens two engines over one store, after a first one stored the prompt: one with the
store and one without, in turns. The time is that from the submission to the first token, without
the start of the engine. The Mooncake Store is a real one on loopback whose objects lie in another
process, as they must to survive.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millpond.config import PytorchEngineConfig
from millpond.engine.types import EngineRequest, PrefixOutcome
from millpond.front.compose import open_engine, plan_model
from millpond.plan.sampling import SamplingParams
from millpond.units import MIB
from tests.store.backends.mooncakes import Master, Owner


def first_token(
    model: str | None, config: dict, tokens: tuple[int, ...]
) -> tuple[float, PrefixOutcome]:
    """Seconds, and how the prompt met the index; the engine is ended, its puts finished."""
    engine = open_engine(plan_model(model, PytorchEngineConfig(**config)), warm=True)
    engine.start()
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    begin = time.perf_counter()
    stream = engine.submit(EngineRequest(request_id="r", tokens=tokens, params=params))
    delta = next(iter(stream))
    seconds = time.perf_counter() - begin
    list(stream)
    engine.close()
    assert delta.outcome is not None
    return seconds, delta.outcome


def compare(name: str, model: str | None, store: dict, lengths: list[int], trials: int) -> None:
    """One line a length."""
    for length in lengths:
        config = {"session_len": length + 128, "max_batch_size": 2, "device": "cpu"}
        tokens = tuple((7 * i + i * i // 11) % 500 for i in range(length))
        first_token(model, {**config, **store}, tokens)
        loaded, computed = [], []
        for _ in range(trials):
            seconds, outcome = first_token(model, {**config, **store}, tokens)
            assert outcome.loaded_tokens, outcome
            loaded.append(seconds)
            computed.append(first_token(model, config, tokens)[0])
        spans = [
            f"{statistics.median(some):7.3f} s ({min(some):.3f} to {max(some):.3f})"
            for some in (loaded, computed)
        ]
        print(f"{name:9} {length:6} tokens  {spans[0]}  computed {spans[1]}", flush=True)


@contextmanager
def mooncake(folder: Path) -> Iterator[dict]:
    """A master and a member that holds the objects."""
    master = Master(folder)
    master.start()
    owner = Owner(master, 512 * MIB)
    config = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{master.port}",
        "protocol": "tcp",
        "global_segment_size": 0,
        "local_hostname": "127.0.0.1",
    }
    (folder / "mooncake.json").write_text(json.dumps(config))
    try:
        yield {"store": f"mooncake:{folder / 'mooncake.json'}"}
    finally:
        owner.kill()
        master.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1024,4096")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--model")
    parser.add_argument("--mooncake", action="store_true")
    given = parser.parse_args()
    lengths = [int(length) for length in given.tokens.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        store = {"store": f"file:{folder}/store"}
        compare("file", given.model, store, lengths, given.trials)
        if given.mooncake:
            with mooncake(Path(folder)) as store:
                compare("mooncake", given.model, store, lengths, given.trials)


if __name__ == "__main__":
    main()
