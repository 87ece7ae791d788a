"""Which store, how large and how it is reached: read from flags, JSON or Mooncake's own file.

Knows the spellings of other engines and the fields they have that mean nothing here; opens nothing.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from millpond.config import PytorchEngineConfig
from millpond.errors import Refused
from millpond.strict import Strict, explain
from millpond.telemetry import logger
from millpond.units import GIB, parse_memory

log = logger("store")

_T = TypeVar("_T", bound=Strict)

CONNECTORS = {
    "MooncakeStoreConnector": "mooncake",
    "FileStoreConnector": "file",
    "HostStoreConnector": "host",
}
"""`kv_connector` of a transfer configuration, and the store it names."""

SIZES = {"file": 32 * GIB, "host": 4 * GIB}
"""Bytes a store of one's own may take unless told otherwise."""


class MooncakeConfig(BaseModel):
    """The JSON file that Mooncake's operators write for every engine, read as it is.

    Sizes are numbers of bytes, or text in `b`, `kb`, `mb` or `gb`, which are powers of 1024 here.
    `global_segment_size` is memory this process lends to the store, 0 for none; mode
    "standalone-store" lends none either. Without `local_hostname` it is the address that the
    master is reached from.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    master_server_address: str
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "rdma"
    device_name: str = ""
    mode: Literal["embedded", "standalone-store"] = "embedded"
    global_segment_size: int | str = 4 * GIB
    local_buffer_size: int | str = 4 * GIB
    local_hostname: str = ""
    tenant_id: str = ""
    enable_offload: bool = False

    @property
    def segment_bytes(self) -> int:
        """Memory to lend."""
        return 0 if self.mode == "standalone-store" else mooncake_size(self.global_segment_size)

    @property
    def buffer_bytes(self) -> int:
        """The client's own staging, which millpond does not use."""
        return mooncake_size(self.local_buffer_size)

    @property
    def master(self) -> tuple[str, int]:
        """Host and port of the master."""
        host, _, port = self.master_server_address.rpartition(":")
        if not host or not port.isdigit() or "://" in host:
            raise Refused(
                f"master_server_address={self.master_server_address!r} is not host:port; "
                "masters that are found through another service are not supported"
            )
        return host.strip("[]"), int(port)

    @classmethod
    def read(cls, path: str | Path) -> MooncakeConfig:
        """The file at `path`. Fields that no engine gives a meaning here are named in the log."""
        try:
            found = json.loads(Path(path).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise Refused(f"cannot read the Mooncake configuration {path}: {error}") from error
        if not isinstance(found, dict):
            raise Refused(f"the Mooncake configuration {path} is not a table of names and values")
        if unknown := sorted(found.keys() - cls.model_fields.keys()):
            log.warning("%s: %s have no meaning here", path, ", ".join(unknown))
        try:
            made = cls(**found)
        except ValidationError as error:
            raise Refused(f"{path}: {explain(error, cls.model_fields)}") from None
        if made.enable_offload:
            raise Refused(f"{path}: enable_offload: Mooncake's own disk tier is not supported")
        _ = made.master, made.segment_bytes, made.buffer_bytes
        return made


class StoreConfig(Strict):
    """One store. `size` in bytes is the capacity of a store of one's own, `path` its directory.

    `prefix` separates deployments that share a store, beyond what they compute. A role of
    "kv_producer" only puts, "kv_consumer" only gets. `optional`: the engine starts, and serves,
    without the store if need be. `staging` bytes of host memory lie between each GPU and it (None:
    as many as are of use). The identities are an operator's word for what the weights are.
    """

    backend: Literal["mooncake", "file", "host"]
    path: str | None = None
    size: int | None = Field(default=None, ge=1)
    mooncake: MooncakeConfig | None = None
    prefix: str = ""
    role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both"
    model_identity: str | None = None
    draft_identity: str | None = None
    optional: bool = False
    staging: int | None = None

    @property
    def puts(self) -> bool:
        """Whether this engine writes to it."""
        return self.role != "kv_consumer"

    @property
    def gets(self) -> bool:
        """Whether this engine reads from it."""
        return self.role != "kv_producer"


class _Extra(Strict):
    """`kv_connector_extra_config`."""

    mooncake_config_path: str | None = None
    path: str | None = None
    size: str | int | None = None
    staging: str | int | None = None
    cache_prefix: str | None = None
    model_name: str | None = None
    compact_model_identity: str | None = Field(default=None, min_length=1)
    compact_draft_identity: str | None = Field(default=None, min_length=1)
    # Always so here; only the other value is refused.
    lookup_async: Literal[True] = True
    load_async: Literal[True] = True
    enable_lookup: Literal[True] = True


class _Transfer(Strict):
    """`--kv-transfer-config`, as LMDeploy and vLLM users write it."""

    kv_connector: str
    kv_role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both"
    kv_connector_extra_config: dict[str, Any] = Field(default_factory=dict)
    kv_load_failure_policy: Literal["recompute"] = "recompute"


NO_MEANING = {
    "lookup_rpc_path": "lookups need no second process here",
    "lookup_rpc_port": "lookups need no second process here",
    "lookup_rpc_timeout_ms": "lookups need no second process here",
    "save_decode_cache": "decode_checkpoint_interval says what is kept along an answer",
    "store_tp_size": "tensor parallelism is not supported yet",
    "enable_store_tp_lcm": "tensor parallelism is not supported yet",
    "prefill_tp_sizes": "tensor parallelism is not supported yet",
    "enable_cross_layers_blocks": "a page always holds all layers",
    "enable_group_semantics": "a record is always whole",
    "preferred_segment": "the master places objects",
    "custom_mem_pool": "slots and pages are registered where they lie",
}
"""Fields of other engines' connectors, and why there is nothing to set here."""


def store_config(config: PytorchEngineConfig) -> StoreConfig | None:
    """The store that an engine's configuration asks for, None if none. Raises `Refused`."""
    transfer, plain, size = config.kv_transfer_config, config.store, config.store_size
    staging = config.store_staging
    if transfer is None and plain is None:
        if config.store_optional or size is not None or staging is not None:
            raise Refused(
                "store_optional, store_size and store_staging need a store: name one with store"
            )
        return None
    if transfer is not None and plain is not None:
        raise Refused("store and kv_transfer_config both name a store: give one of them")
    if plain is not None:
        num_bytes = _bytes("store_staging", staging)
        return _plain(plain, size, optional=config.store_optional, staging=num_bytes)
    if size is not None:
        raise Refused("store_size goes with store: put size into kv_connector_extra_config")
    if staging is not None:
        raise Refused("store_staging goes with store: put staging into kv_connector_extra_config")
    return _transfer(transfer or {}, config.store_optional)


def _plain(
    text: str, size: str | int | None, *, optional: bool, staging: int | None
) -> StoreConfig:
    """`host`, `file:DIRECTORY` or `mooncake:FILE`."""
    backend, _, path = text.partition(":")
    if backend not in CONNECTORS.values():
        near = difflib.get_close_matches(backend, CONNECTORS.values(), 1)
        hint = f", did you mean {near[0]}?" if near else ""
        raise Refused(
            f"store={text!r}: there is no store {backend!r}{hint} "
            "(host, file:DIRECTORY, mooncake:CONFIGURATION.json)"
        )
    return _made(backend, path or None, size, "store", optional=optional, staging=staging)


def _transfer(given: dict[str, Any], optional: bool) -> StoreConfig:
    known = _named(_Transfer, given, "kv_transfer_config")
    backend = CONNECTORS.get(known.kv_connector)
    if backend is None:
        raise Refused(
            f"kv_connector={known.kv_connector!r} is not supported, use one of "
            f"{', '.join(CONNECTORS)}"
        )
    extra, where = known.kv_connector_extra_config, "kv_connector_extra_config"
    for name in extra.keys() & NO_MEANING.keys():
        raise Refused(f"{where}.{name} is not supported: {NO_MEANING[name]}")
    more = _named(_Extra, extra, where)
    path = more.path
    if backend == "mooncake":
        if path is not None or more.size is not None:
            raise Refused(f"{where}: path and size are not Mooncake's, use mooncake_config_path")
        path = more.mooncake_config_path
    elif more.mooncake_config_path is not None:
        raise Refused(f"{where}.mooncake_config_path does not go with {known.kv_connector}")
    return _made(
        *(backend, path, more.size, where),
        optional=optional,
        staging=_bytes(f"{where}.staging", more.staging),
        role=known.kv_role,
        prefix="@".join(part for part in (more.cache_prefix, more.model_name) if part),
        model_identity=more.compact_model_identity,
        draft_identity=more.compact_draft_identity,
    )


def _made(
    backend: str, path: str | None, size: str | int | None, where: str, **rest: Any
) -> StoreConfig:
    """A configuration with what its kind of store needs and nothing it does not."""
    if backend == "host" and path is not None:
        raise Refused(f"{where}: the host store has no path")
    if backend == "file" and path is None:
        raise Refused(f"{where}: the file store needs a directory")
    if backend == "mooncake":
        if path is None:
            raise Refused(f"{where}: Mooncake needs its JSON file, as mooncake_config_path")
        if size is not None:
            raise Refused(f"{where}: the size of a Mooncake Store is what its members lend")
        return StoreConfig(backend="mooncake", mooncake=MooncakeConfig.read(path), **rest)
    num_bytes = SIZES[backend] if size is None else _bytes(f"{where}: size", size)
    return StoreConfig(backend=backend, path=path, size=num_bytes, **rest)  # type: ignore[arg-type]


def _bytes(what: str, size: str | int | None) -> int | None:
    """A number of bytes, or None for None. Raises `Refused`."""
    if size is None:
        return None
    try:
        found = parse_memory(size, 0)
    except Refused:
        found = 0
    if not found:  # a share such as 0.5 is 0 here, and refused: there is nothing it is a share of
        raise Refused(f"{what} {size!r} is no size such as 8GiB")
    return found


def _named(kind: type[_T], given: dict[str, Any], where: str) -> _T:
    """The fields read strictly, with the mistakes told under the name the user knows."""
    try:
        return kind(**given)
    except Refused as error:
        raise Refused(str(error).replace(f"{kind.__name__}:", f"{where}:", 1)) from None


def mooncake_size(value: int | str) -> int:
    """Bytes meant by 268435456 or "256mb", as Mooncake's other users read it."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *(b|kb|mb|gb|tb)?", str(value).strip().lower())
    if found is None:
        raise Refused(f"{value!r} is no size such as 256mb")
    return int(float(found[1]) * 1024 ** ("b", "kb", "mb", "gb", "tb").index(found[2] or "b"))
