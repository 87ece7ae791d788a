"""A Mooncake Store as a backend; knows its client library's habits, and nothing of records.

The library ends the process if it is used after it was closed, takes seconds for every call to a
dead master, goes on writing into memory after a call of its own gave up, says "stored" of what is
not, and checks no bytes. All of that stops here.
"""

from __future__ import annotations

import importlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from millpond.errors import Refused
from millpond.store.backend import BackendStats, Item, StoreUnavailable
from millpond.store.config import MooncakeConfig
from millpond.store.parts import STAGE, Batch, Ranges, batches
from millpond.telemetry import logger
from millpond.units import human

log = logger("store")

FULL, NO_CHECKSUM, TRANSFER = -200, -801, -800
DOWN = (-900, -901)

PATIENCE = 3  # seconds without a byte after which a transfer fails
STALL = 2.5  # seconds that a failed transfer took if somebody hangs
ENOUGH = 15.0  # seconds after which a call starts no further batch
GIVEN_UP = 55.0  # seconds after which a failed call may have left a transfer running
CALLS = 2  # at once: more are not faster, and all wait for one who hangs
KEYS = 1024  # of one lookup
REACH = 1.0  # seconds for a connection to the master

ENVIRONMENT = {
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": str(PATIENCE),
    "MC_TCP_STATUS_TIMEOUT_SEC": str(PATIENCE),
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_LOG_LEVEL": "ERROR",
}
"""What the library lets nobody say in another way; it reads them when the first client starts."""

_abandoned: list[Any] = []
"""Clients with a call inside that never returned: closing or freeing one ends the process."""


class MooncakeStore:
    """A member of a Mooncake Store.

    Slots and pages go from and to where they lie, with a checksum beside them; small objects pass
    through a staging area. A member that hangs fails a call within a quarter of a minute; one that
    sends a few bytes now and then, within `bound`.
    """

    name = "mooncake"
    seals = True
    bound = 75.0

    def __init__(self, config: MooncakeConfig) -> None:
        self.config = config
        self._library = _load()
        for name, value in ENVIRONMENT.items():
            os.putenv(name, value)
        self._stage = np.zeros(CALLS * STAGE, dtype=np.uint8)
        self._free = list(range(CALLS))  # parts of the stage, one for each call
        self._ranges = Ranges()
        self._ranges.add(self._stage.data)
        self._change = threading.Condition(threading.RLock())
        self._process = os.getpid()
        self._closed = self._leaving = False
        self._left: list[Any] = []  # clients that could not be closed when they should have been
        self._suspect = 0.0  # when a call last failed for want of the store
        self._refused = self._corrupt = 0
        self._client: Any = self._connect()
        log.info(
            "mooncake store: master %s, lending %s over %s; its data ports are open to everyone "
            "who can reach this machine",
            *(config.master_server_address, human(config.segment_bytes), config.protocol),
        )

    def __repr__(self) -> str:
        return f"Mooncake at {self.config.master_server_address}"

    def register(self, memory: memoryview) -> None:
        """Let the library read and write the range."""
        with self._change:
            self._check()
            added = self._ranges.add(memory)
            if self._client is not None:
                self._register(self._client, *added)

    def put(self, items: Sequence[Item]) -> list[bool]:
        """Store each; what exists keeps its bytes. True is what the library says, no more."""
        settings = self._library.ReplicateConfig()

        def send(client: Any, batch: Batch) -> list[int]:
            batch.fill()
            codes: list[int] = client.batch_put_from_multi_buffers(
                batch.keys, batch.pointers, batch.sizes, settings
            )
            self._refused += codes.count(FULL)
            return codes

        return [code == 0 for code in self._transfer(items, send)]

    def get(self, items: Sequence[Item]) -> list[bool]:
        """Fill each view, and check what came. What is damaged is removed from the store."""

        def receive(client: Any, batch: Batch) -> list[int]:
            codes: list[int] = client.batch_get_into_multi_buffers(
                batch.keys, batch.pointers, batch.sizes
            )
            damaged = [n for n, code in enumerate(codes) if code == batch.total(n)]
            damaged = [n for n in damaged if not batch.accept(n)]
            damaged += [n for n, code in enumerate(codes) if code == NO_CHECKSUM]
            if damaged:
                self._corrupt += len(damaged)
                log.warning("mooncake store: %d damaged objects removed", len(damaged))
                client.batch_remove([batch.keys[n] for n in damaged], True)
            return [
                code if code < 0 else int(code == batch.total(n) and n not in damaged)
                for n, code in enumerate(codes)
            ]

        return [code == 1 for code in self._transfer(items, receive)]

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which the master knows of; it keeps those for some seconds."""
        return [code == 1 for code in self._ask(keys, lambda client, k: client.batch_is_exist(k))]

    def remove(self, keys: Sequence[str]) -> None:
        """Forget the keys, looked up or not. One that is being put stays."""
        self._ask(keys, lambda client, k: client.batch_remove(k, True))

    def stats(self) -> BackendStats:
        """What befell this member; what the store holds is known to its master."""
        return BackendStats(refused=self._refused, corrupt=self._corrupt)

    def close(self) -> None:
        """Leave the store once nobody is inside a call; memory lent to it goes."""
        with self._change:
            self._closed = True
            self._change.notify_all()
            clients, self._client = [*self._left, self._client], None
            self._left = []
            for client in clients:
                if client is not None and not self._dismiss(client, CALLS):
                    log.error("mooncake store: a call does not return, its client is left open")
                    _abandoned.append(client)

    # -- calls

    def _transfer(
        self, items: Sequence[Item], work: Callable[[Any, Batch], list[int]]
    ) -> list[int]:
        """Every code of `work`, batch after batch. `StoreUnavailable` if one shows an outage."""
        codes = list[int]()
        begin = time.monotonic()
        if not items:
            self._check()
        with self._inside() as (client, place):
            area = self._stage[place * STAGE : (place + 1) * STAGE]
            for batch in batches(items, self._ranges, area):
                start = time.monotonic()
                if start - begin > ENOUGH:
                    self._fail(f"the Mooncake Store took more than {ENOUGH:g} s")
                codes += self._judge(client, work(client, batch), time.monotonic() - start)
        return codes

    def _ask(self, keys: Sequence[str], work: Callable[[Any, list[str]], list[int]]) -> list[int]:
        codes = list[int]()
        with self._inside() as (client, _):
            for at in range(0, len(keys), KEYS):
                codes += self._judge(client, work(client, list(keys[at : at + KEYS])), 0.0)
        return codes

    @contextmanager
    def _inside(self) -> Iterator[tuple[Any, int]]:
        """A client nobody closes meanwhile, and a part of the stage for this call alone."""
        with self._change:
            came = time.monotonic()
            self._check()
            while not self._free or self._leaving:
                if not self._change.wait(self.bound):
                    raise StoreUnavailable("the Mooncake Store is busy")
                self._check()
                if self._suspect > came:
                    raise StoreUnavailable("the Mooncake Store has just failed another call")
            if self._client is None or self._suspect:
                self._reach()
            if self._client is None:
                self._client = self._connect()
            client, place = self._client, self._free.pop()
        try:
            yield client, place
        finally:
            with self._change:
                self._free.append(place)
                self._change.notify_all()

    def _check(self) -> None:
        if self._closed:
            raise StoreUnavailable("the Mooncake Store is closed")
        if os.getpid() != self._process:
            raise StoreUnavailable("a Mooncake Store cannot be used in a forked process")

    def _judge(self, client: Any, codes: list[int], took: float) -> list[int]:
        """The codes, if they are about objects and not about the store."""
        if any(code in DOWN for code in codes):
            self._fail(f"the master of the Mooncake Store does not answer ({min(codes)})")
        if took > GIVEN_UP and any(code < 0 for code in codes):
            self._leave(client)
        if took > STALL and TRANSFER in codes:
            self._fail(f"a member of the Mooncake Store hangs: a transfer failed after {took:.0f}s")
        self._suspect = 0.0
        return codes

    def _fail(self, message: str) -> None:
        self._suspect = time.monotonic()
        raise StoreUnavailable(message)

    def _leave(self, client: Any) -> None:
        """Stop transfers that the library only stopped waiting for: only leaving does that."""
        with self._change:
            self._suspect = time.monotonic()
            if client is self._client:
                self._client, self._leaving = None, True
                try:
                    if not self._dismiss(client, CALLS - 1):
                        self._left.append(client)
                finally:
                    self._leaving = False
            # Else another call has done so, or tried to, and waited for this one.
            still = any(client is left for left in self._left)
        raise StoreUnavailable(
            "a transfer to the Mooncake Store did not end; left it, to join again",
            memory_in_use=still,
        )

    def _dismiss(self, client: Any, idle: int) -> bool:
        """Close a client as soon as `idle` places are free; False if they never were."""
        if not self._change.wait_for(lambda: len(self._free) >= idle, self.bound):
            return False
        for address, _ in self._ranges:
            client.unregister_buffer(address)
        client.close()
        return True

    # -- joining

    def _reach(self) -> str:
        """The address that the master sees this machine at. Far quicker than the library."""
        host, port = self.config.master
        try:
            with socket.create_connection((host, port), REACH) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            raise StoreUnavailable(
                f"the master of the Mooncake Store, {host}:{port}, cannot be reached: {error}"
            ) from error

    def _connect(self) -> Any:
        """A new client with all memory registered."""
        config, own = self.config, self._reach()
        client = self._library.MooncakeDistributedStore()
        more = {"tenant_id": config.tenant_id} if config.tenant_id else {}
        code = client.setup(
            config.local_hostname or own,
            config.metadata_server,
            config.segment_bytes,
            config.buffer_bytes,
            config.protocol,
            config.device_name,
            config.master_server_address,
            **more,
        )
        if code:
            raise StoreUnavailable(f"joining the Mooncake Store failed ({code})")
        for address, size in self._ranges:
            self._register(client, address, size)
        self._suspect = 0.0
        return client

    def _register(self, client: Any, address: int, size: int) -> None:
        if code := client.register_buffer(address, size):
            raise StoreUnavailable(f"Mooncake refuses {human(size)} of memory ({code})")


def _load() -> Any:
    """The client library. `Refused`, with what to install, if it is not there."""
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise Refused(
            f"the Mooncake Store needs a library that cannot be loaded: {error}. Install "
            "millpond[mooncake]; on Debian also libibverbs1, libnuma1 and libcurl4"
        ) from error
