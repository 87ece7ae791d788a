"""Real models: what comes back from a tier gives the bytes and the text of a cold run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from millpond.engine.loop import Engine, EngineSettings
from millpond.engine.stream import RequestStream
from millpond.engine.tiers import Store
from millpond.engine.types import EngineRequest, EngineStats, PrefixOutcome
from millpond.memory.arena import Arenas
from millpond.plan.sampling import SamplingParams
from millpond.runtime.reach import memory_of
from millpond.runtime.staged import StagedMemory
from millpond.store.backend import Backend
from millpond.store.connector import Connector
from millpond.store.door import Door
from millpond.store.file import FileStore
from millpond.store.host import HostStore
from millpond.store.memory import RankMemory
from millpond.store.rank import RankStore
from tests.exactness.families import FAMILIES, MAX_POSITION, VOCAB, executor
from tests.store.worlds import identity
from tests.support.recording import RecordingExecutor, Truth

PROMPT = tuple((7 * i + i * i // 5) % (VOCAB - 1) for i in range(300))
SIZE = 1 << 30


class Life:
    """One engine from its start to its end, on a thread of its own, over a store."""

    def __init__(
        self,
        family: str,
        truth: Truth,
        where: str,
        backend: Callable[[], Backend] | None,
        **settings: Any,
    ) -> None:
        num_drafts = settings.pop("num_drafts", 0)
        reach: Callable[[Arenas], RankMemory] = settings.pop("reach", memory_of)
        self.executor: RecordingExecutor = executor(family, truth, where, num_drafts=num_drafts)
        given = dict(
            max_batch_size=8,
            max_prefill_tokens=256,
            session_len=MAX_POSITION,
            eos_token_ids=(VOCAB - 1,),
            debug_audit=True,
            debug_poison=True,
        )
        store = None
        if backend is not None:
            memory = reach(self.executor.arenas)
            rank = RankStore(0, memory, Door(backend, memory.regions()))
            who = identity(layout=f"{family} {num_drafts}")
            store = Store(
                connector=Connector([rank], memory, "tier"), namespaces=(who.namespace(0),)
            )
        self.engine = Engine(EngineSettings(**{**given, **settings}), self.executor, store=store)
        self.engine._ledger.prefill_rate.in_force = 2.0  # what is stored is worth it, always
        self.engine._ledger.prefill_rate.observe = lambda *numbers: 1.0
        self.engine.start()
        self._count = 0

    def ask(self, tokens=PROMPT, **params) -> tuple[list[int], PrefixOutcome]:
        """The text of a greedy answer, and how its prompt met the index."""
        given = dict(max_tokens=20, temperature=0.0, ignore_eos=True, seed=1, **params)
        self._count += 1
        stream: RequestStream = self.engine.submit(
            EngineRequest(
                request_id=f"{self._count}", tokens=tuple(tokens), params=SamplingParams(**given)
            )
        )
        deltas = list(stream)
        assert deltas[-1].finish_reason == "length", deltas[-1].error
        outcome = next(d.outcome for d in deltas if d.outcome is not None)
        return [out.token for delta in deltas for out in delta.tokens], outcome

    def close(self) -> EngineStats:
        """End it, puts finished; nothing may be held."""
        self.engine.close(timeout=60)
        assert self.engine.healthy, self.engine.failure
        ledger = self.engine._ledger
        assert ledger.pool.num_free == ledger.pool.size
        assert ledger.pages.num_free == ledger.pages.size
        return self.engine.stats()


class Kept:
    """A store that outlives the engine which closes it."""

    def __init__(self, store: Backend) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return (lambda: None) if name == "close" else getattr(self._store, name)


BACKENDS = ("host", "file")


def opener(backend: str, folder: Path) -> Callable[[], Backend]:
    if backend == "file":
        return lambda: FileStore(folder / "store", SIZE)
    kept = Kept(HostStore(SIZE))
    return lambda: kept


def staged(arenas: Arenas) -> StagedMemory:
    """As a device's memory is reached, a few pages at a time."""
    size = arenas.slots.spec.num_bytes + 2 * arenas.pages.spec.num_bytes
    return StagedMemory(arenas.slots, arenas.pages, batch_bytes=size)


# Half of all sixteen ways: any three choices are met in every combination.
WAYS = [
    pytest.param(family, drafts, reach, backend, id=f"{backend}-{family}-{drafts}-{reach.__name__}")
    for i, family in enumerate(FAMILIES)
    for j, drafts in enumerate((0, 3))
    for k, reach in enumerate((memory_of, staged))
    for m, backend in enumerate(BACKENDS)
    if (i + j + k + m) % 2 == 0
]


@pytest.mark.parametrize(("family", "num_drafts", "reach", "backend"), WAYS)
def test_a_warm_hit_from_a_tier_gives_the_bytes_of_a_cold_run(
    family, num_drafts, reach, backend, tmp_path
):
    truth, open_store = Truth(), opener(backend, tmp_path)
    numbers = dict(num_drafts=num_drafts, reach=reach)
    cold = Life(family, truth, "cold", None, **numbers)
    text, _ = cold.ask()
    cold.close()

    first = Life(family, truth, "first", open_store, **numbers)
    assert first.ask()[0] == text
    assert first.ask()[1].cached_tokens == 256  # a device hit
    first.close()

    second = Life(family, truth, "second", open_store, **numbers)
    told, outcome = second.ask()
    assert (told, outcome.cached_tokens, outcome.loaded_tokens) == (text, 256, 256)
    told, outcome = second.ask()
    assert (told, outcome.cached_tokens, outcome.loaded_tokens) == (text, 256, 0)
    index = second.engine._ledger.index
    while index.evict_slot():
        pass
    told, outcome = second.ask()  # the state alone comes back, under the pages
    assert (told, outcome.cached_tokens, outcome.loaded_tokens) == (text, 256, 256)
    assert second.close().store.breaker_trips == 0
    assert not truth.differences
    assert truth.num_compared > 10


@pytest.mark.parametrize("backend", BACKENDS)
def test_loaded_slots_and_pages_hold_the_very_bytes_that_were_stored(backend, tmp_path):
    family, truth, open_store = next(iter(FAMILIES)), Truth(), opener(backend, tmp_path)

    def bytes_of(life: Life) -> list[bytes]:
        checkpoint = next(c for c in life.engine._ledger.index.checkpoints() if c.end == 256)
        node, arenas = life.engine._ledger.index.node_of(checkpoint), life.executor.arenas
        found = [arenas.slots.storage[checkpoint.lease.slot].numpy().tobytes()]
        while node.parent is not None:
            found.append(arenas.pages.storage[node.page.id].numpy().tobytes())
            node = node.parent
        return found

    first = Life(family, truth, "first", open_store)
    first.ask()
    stored = bytes_of(first)
    first.close()
    second = Life(family, truth, "second", open_store)
    second.ask()
    assert bytes_of(second) == stored
    second.close()


def test_a_conversation_goes_on_in_the_next_life(tmp_path: Path):
    truth = Truth()
    family = next(iter(FAMILIES))
    tokens, whole = list(PROMPT[:150]), []
    for life_number in range(3):
        life = Life(
            family,
            truth,
            f"life {life_number}",
            lambda: FileStore(tmp_path / "store", SIZE),
            decode_checkpoint_interval=64,
        )
        for _ in range(2):
            said, outcome = life.ask(tokens)
            whole.append((len(tokens), outcome.cached_tokens))
            tokens += [*said, *PROMPT[:60]]
        life.close()
    for (before, _), (_, cached) in pairwise(whole):
        assert cached >= (before - 1) // 64 * 64
