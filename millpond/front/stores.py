"""Opens the store a configuration names, for one engine: identity, ranks, and what the log says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from rich.table import Table

from millpond.config import PAGE, Resolved
from millpond.engine.tiers import Store
from millpond.errors import Refused
from millpond.runtime.reach import Made
from millpond.store.backend import Backend, StoreUnavailable
from millpond.store.config import StoreConfig
from millpond.store.connector import Connector
from millpond.store.door import Door
from millpond.store.identity import Identity, check_named, claim, fingerprint
from millpond.store.memory import RankMemory
from millpond.store.open import open_backend
from millpond.store.rank import RankStore
from millpond.telemetry import logger
from millpond.units import human

log = logger("store")


@runtime_checkable
class Reachable(Protocol):
    """An executor whose memory a store can reach."""

    def memories(self, staging_bytes: int | None = None) -> Sequence[RankMemory]:
        """Of each rank, by way of so many bytes of host memory where one is needed."""

    @property
    def makes(self) -> Made:
        """What shapes the bytes there."""


def tiers(config: StoreConfig, slot_bytes: int, page_bytes: int) -> tuple[Table, bool]:
    """Where checkpoints are kept, for people, and whether the store can be reached just now."""
    made = Table(title="tiers", title_justify="left")
    for name in ("tier", "holds", "verdict"):
        made.add_column(name)
    made.add_row("device", "slots and pages as above", "ok")
    holds, verdict, reachable = "", "ok", True
    try:
        backend = open_backend(config)
        try:
            stats = backend.stats()
            known = (stats.bytes_held, stats.capacity)
            holds = " of ".join(human(size) for size in known if size is not None)
        finally:
            backend.close()
    except (Refused, StoreUnavailable) as error:
        verdict, reachable = str(error), False
    made.add_row(f"{config.backend} {config.path or ''}".strip(), holds, verdict)
    for tokens in (1 << 10, 1 << 15):
        size = slot_bytes + tokens // PAGE * page_bytes
        made.add_row("", f"a record of {tokens:,} tokens takes {human(size)}", "")
    return made, reachable


class Weights:
    """What the weights of an engine are called: by their operator, or else by their bytes."""

    def __init__(self, config: StoreConfig, model_dir: Path, resolved: Resolved) -> None:
        """`Refused` for names that contradict the weights, or where there is no name at all."""
        drafts = resolved.num_draft_tokens > 0
        named, draft = config.model_identity, config.draft_identity
        if named is not None and drafts and draft is None:
            raise Refused(
                "compact_model_identity without compact_draft_identity: with draft tokens the store"
                " needs both, or neither, and then the weights are hashed"
            )
        if draft is not None and named is None:
            raise Refused("compact_draft_identity goes with compact_model_identity")
        self.hash: str | None = None
        if resolved.load_format != "dummy":
            self.hash = fingerprint(model_dir)
        elif named is None:
            raise Refused("dummy weights have no identity: a store needs compact_model_identity")
        self._names = {
            what: check_named(what, name, self.hash)
            for what, name in (("compact_model_identity", named), ("compact_draft_identity", draft))
            if name is not None
        }
        self.model = self._names.get("compact_model_identity", self.hash or "")
        self.draft = self._names.get("compact_draft_identity", self.model) if drafts else ""

    def claim(self, backend: Backend) -> None:
        """Hold every name to the weights that first went by it. Raises `Refused`."""
        for what, name in self._names.items():
            if self.hash is not None:
                claim(backend, what, name, self.hash)


def open_store(
    config: StoreConfig, weights: Weights, resolved: Resolved, executor: object
) -> Store:
    """The store, reachable now unless it is optional. Raises `Refused`."""
    if not isinstance(executor, Reachable):
        raise Refused(f"a store does not go with the executor {type(executor).__name__}")
    memories, makes = executor.memories(config.staging), executor.makes
    identity = Identity(
        model="@".join(part for part in (config.prefix, weights.model) if part),
        draft=weights.draft,
        dtype=makes.dtype,
        state_dtype=makes.state_dtype,
        layout=makes.layout,
        tp_size=len(memories),
        alignment=resolved.prefill_save_alignment,
        kernels=makes.kernels,
    )

    def opened() -> Backend:
        backend = open_backend(config)
        weights.claim(backend)
        return backend

    doors = [Door(opened, memory.regions()) for memory in memories]
    for door in doors:
        try:
            door.open()
        except StoreUnavailable as error:
            if not config.optional:
                raise Refused(
                    f"the {config.backend} store cannot be reached: {error} (with store_optional"
                    " the engine starts without it, and uses it once it is there)"
                ) from error
            log.warning("starting without the %s store: %s", config.backend, error)
    ranks = [RankStore(rank, memories[rank], doors[rank]) for rank in range(len(memories))]
    memory = memories[0]
    log.info(
        "%s store (%s), %s: records of %s and %s a page, keys under %s, weights %s",
        *(config.backend, config.path or "", config.role),
        *(human(memory.slot_bytes), human(memory.page_bytes)),
        *(identity.namespace(0), weights.model[:16]),
    )
    return Store(
        connector=Connector(ranks, memory, config.backend),
        namespaces=tuple(identity.namespace(rank) for rank in range(len(memories))),
        role=config.role,
    )
