"""From a store's configuration to the store, opened; knows every backend by name."""

from __future__ import annotations

from millpond.errors import Broken
from millpond.store.backend import Backend
from millpond.store.config import StoreConfig
from millpond.store.file import FileStore
from millpond.store.host import HostStore
from millpond.store.mooncake import MooncakeStore


def open_backend(config: StoreConfig) -> Backend:
    """The store. `Refused` if it can never be opened, `StoreUnavailable` if not now."""
    if config.backend == "mooncake" and config.mooncake is not None:
        return MooncakeStore(config.mooncake)
    if config.size is None:
        raise Broken(f"a configuration of the {config.backend} store without a size")
    if config.backend == "file" and config.path is not None:
        return FileStore(config.path, config.size)
    return HostStore(config.size)
