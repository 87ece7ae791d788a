from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from millpond.config import PytorchEngineConfig
from millpond.errors import Refused
from millpond.front import flags
from millpond.store.config import CONNECTORS, NO_MEANING, MooncakeConfig, StoreConfig, store_config
from millpond.store.file import FileStore
from millpond.store.host import HostStore
from millpond.store.open import open_backend
from millpond.units import GIB, MIB

OPERATORS = {
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "127.0.0.1:50051",
    "protocol": "tcp",
    "device_name": "",
    "mode": "embedded",
    "global_segment_size": "256mb",
    "local_buffer_size": "64mb",
}
"""The file as operators write it for LMDeploy and vLLM."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps(OPERATORS))
    return path


def read(**given: Any) -> StoreConfig | None:
    return store_config(PytorchEngineConfig(**given))


def transfer(connector: str = "MooncakeStoreConnector", **extra: Any) -> StoreConfig | None:
    given = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return read(kv_transfer_config=given)


def test_no_store_is_the_default() -> None:
    assert read() is None


def test_the_form_that_users_of_other_engines_know_names_a_mooncake_store(file: Path) -> None:
    found = transfer(
        mooncake_config_path=str(file),
        cache_prefix="blue",
        model_name="tiny",
        lookup_async=True,
        compact_model_identity="sha256:aa",
        compact_draft_identity="sha256:bb",
    )
    assert found == StoreConfig(
        backend="mooncake",
        mooncake=MooncakeConfig(**OPERATORS),
        prefix="blue@tiny",
        model_identity="sha256:aa",
        draft_identity="sha256:bb",
    )
    assert found.mooncake is not None
    assert found.mooncake.segment_bytes == 256 * MIB
    assert found.mooncake.master == ("127.0.0.1", 50051)


def test_a_file_or_host_store_may_be_named_in_either_form(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    named = transfer("FileStoreConnector", path=path, size="2GiB")
    assert named == read(store=f"file:{path}", store_size="2GiB")
    assert named == StoreConfig(backend="file", path=path, size=2 * GIB)
    assert transfer("HostStoreConnector", size=4096) == read(store="host", store_size=4096)
    staged = transfer("HostStoreConnector", size=4096, staging="64MiB")
    assert staged == read(store="host", store_size=4096, store_staging="64MiB")
    assert staged.staging == 64 * MIB
    assert read(store="host", store_optional=True) == StoreConfig(
        backend="host", size=4 * GIB, optional=True
    )


@pytest.mark.parametrize(
    ("role", "puts", "gets"),
    [("kv_both", True, True), ("kv_producer", True, False), ("kv_consumer", False, True)],
)
def test_a_role_says_which_way(role: str, puts: bool, gets: bool) -> None:
    found = read(kv_transfer_config={"kv_connector": "HostStoreConnector", "kv_role": role})
    assert found is not None
    assert (found.puts, found.gets) == (puts, gets)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_connector": "NixlConnector"}, "NixlConnector.*MooncakeStoreConnector"),
        ({"kv_connector": "HostStoreConnector", "kv_rol": "x"}, "unknown kv_rol.*kv_role"),
        ({"kv_connector": "HostStoreConnector", "kv_role": "both"}, "kv_role='both'"),
        ({"kv_connector": "HostStoreConnector", "engine_id": "a"}, "unknown engine_id"),
        ({"kv_connector": "HostStoreConnector", "kv_load_failure_policy": "fail"}, "'recompute'"),
        ({}, "kv_connector.*Field required"),
    ],
)
def test_what_is_unknown_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        read(kv_transfer_config=given)


@pytest.mark.parametrize(
    ("connector", "extra", "words"),
    [
        ("HostStoreConnector", {"cach_prefix": "a"}, "unknown cach_prefix, did you mean cache_pre"),
        ("HostStoreConnector", {"lookup_async": False}, "lookup_async=False"),
        ("HostStoreConnector", {"compact_model_identity": ""}, "compact_model_identity=''"),
        ("HostStoreConnector", {"path": "/x"}, "no path"),
        ("HostStoreConnector", {"size": "much"}, "'much' is no size"),
        ("HostStoreConnector", {"size": "50%"}, "'50%' is no size"),
        ("HostStoreConnector", {"mooncake_config_path": "x"}, "does not go with HostStore"),
        ("FileStoreConnector", {}, "needs a directory"),
        ("MooncakeStoreConnector", {}, "mooncake_config_path"),
        ("MooncakeStoreConnector", {"size": 1, "mooncake_config_path": "x"}, "not Mooncake's"),
        ("MooncakeStoreConnector", {"mooncake_config_path": "/none.json"}, "cannot read"),
    ],
)
def test_an_extra_field_that_cannot_be_meant_is_refused(
    connector: str, extra: dict[str, Any], words: str
) -> None:
    with pytest.raises(Refused, match=words):
        transfer(connector, **extra)


@pytest.mark.parametrize("name", sorted(NO_MEANING))
def test_fields_of_other_connectors_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(Refused, match=f"{name} is not supported: {NO_MEANING[name]}"):
        transfer("HostStoreConnector", **{name: 1})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"store": "moncake:x"}, "did you mean mooncake"),
        ({"store": "redis"}, "no store 'redis'"),
        ({"store": "file"}, "needs a directory"),
        ({"store": "mooncake"}, "JSON file"),
        ({"store_optional": True}, "need a store"),
        ({"store_size": 1}, "need a store"),
        ({"store_staging": 1}, "need a store"),
        ({"store": "host", "store_staging": "much"}, "store_staging 'much' is no size"),
        (
            {"store_staging": 1, "kv_transfer_config": {"kv_connector": "HostStoreConnector"}},
            "store_staging goes with store",
        ),
        (
            {"store": "host", "kv_transfer_config": {"kv_connector": "HostStoreConnector"}},
            "both name a store",
        ),
        (
            {"store_size": 1, "kv_transfer_config": {"kv_connector": "HostStoreConnector"}},
            "store_size goes with store",
        ),
    ],
)
def test_plain_settings_that_contradict_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        read(**given)


def test_the_operators_file_is_read_as_it_is_and_what_means_nothing_is_named(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert MooncakeConfig.read(file) == MooncakeConfig(**OPERATORS)
    assert caplog.records == []
    file.write_text(json.dumps({**OPERATORS, "prefer_local": True, "global_segment_size": 1 << 30}))
    assert MooncakeConfig.read(file).segment_bytes == GIB
    assert "prefer_local have no meaning" in caplog.text


def test_its_defaults_are_those_of_the_other_engines(file: Path) -> None:
    file.write_text('{"master_server_address": "10.0.0.1:50051"}')
    found = MooncakeConfig.read(file)
    assert (found.metadata_server, found.protocol) == ("P2PHANDSHAKE", "rdma")
    assert found.segment_bytes == found.buffer_bytes == 4 * GIB
    file.write_text('{"master_server_address": "a:1", "mode": "standalone-store"}')
    assert MooncakeConfig.read(file).segment_bytes == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"master_server_address": "etcd://a:1"}, "not host:port"),
        ({"master_server_address": "a"}, "not host:port"),
        ({"mode": "embeded"}, "mode='embeded'"),
        ({"global_segment_size": "256 pages"}, "'256 pages' is no size"),
        ({"enable_offload": True}, "enable_offload"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(
    file: Path, change: dict[str, Any], words: str
) -> None:
    file.write_text(json.dumps({**OPERATORS, **change}))
    with pytest.raises(Refused, match=words):
        MooncakeConfig.read(file)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"protocol": "tcp"}'])
def test_a_file_that_is_none_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(Refused, match=r"mooncake\.json"):
        MooncakeConfig.read(file)


def test_the_command_line_takes_json_and_plain_flags(file: Path) -> None:
    extra = {"mooncake_config_path": str(file)}
    text = json.dumps(
        {"kv_connector": "MooncakeStoreConnector", "kv_connector_extra_config": extra}
    )
    made, _ = flags.parse(flags.ServeFlags, "serve", ["--kv-transfer-config", text])
    assert store_config(made.engine()) == transfer(mooncake_config_path=str(file))
    words = ["--store", "file:/tmp/x", "--store-size", "1GiB", "--store-optional"]
    made, _ = flags.parse(flags.ServeFlags, "serve", words)
    found = store_config(made.engine())
    assert found == StoreConfig(backend="file", path="/tmp/x", size=GIB, optional=True)


def test_every_store_has_a_connector_and_can_be_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    assert set(CONNECTORS.values()) == {"mooncake", "file", "host"}
    assert isinstance(open_backend(StoreConfig(backend="host", size=1)), HostStore)
    path = str(tmp_path / "s")
    assert isinstance(open_backend(StoreConfig(backend="file", path=path, size=1)), FileStore)
