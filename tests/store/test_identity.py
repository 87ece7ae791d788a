"""Fingerprints of weights, and names that operators give them."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from millpond.errors import Refused
from millpond.store import identity
from millpond.store.identity import CACHE_FILE, check_named, claim, fingerprint
from tests.store.worlds import ScriptedStore


def write(path: Path, tensors: dict[str, bytes]) -> None:
    header, at, body = {}, 0, b""
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at, body = at + len(data), body + data
    packed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(packed)) + packed + body)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"a": 1}')
    write(tmp_path / "model-1.safetensors", {"x": b"1234", "y": b"5678"})
    write(tmp_path / "model-2.safetensors", {"z": b"9"})
    return tmp_path


def test_every_byte_that_matters_is_in_a_fingerprint(model: Path):
    known = {fingerprint(model)}
    assert fingerprint(model) in known
    (model / "README.md").write_text("words")
    assert fingerprint(model) in known
    write(model / "model-2.safetensors", {"z": b"8"})
    known.add(fingerprint(model))
    write(model / "model-2.safetensors", {"zz": b"9"})
    known.add(fingerprint(model))
    (model / "config.json").write_text('{"a": 2}')
    known.add(fingerprint(model))
    assert len(known) == 4


def test_weights_are_not_read_again_while_size_and_time_stand(model: Path, monkeypatch):
    monkeypatch.setattr(identity, "WORTH_KEEPING", 1)
    first = fingerprint(model)
    assert (model / CACHE_FILE).is_file()
    monkeypatch.setattr(identity, "_file_digest", lambda file: pytest.fail("read again"))
    assert fingerprint(model) == first
    monkeypatch.undo()
    monkeypatch.setattr(identity, "WORTH_KEEPING", 1)
    stamp = (model / "model-1.safetensors").stat().st_mtime_ns
    write(model / "model-1.safetensors", {"x": b"1239", "y": b"5678"})
    os.utime(model / "model-1.safetensors", ns=(stamp + 1, stamp + 1))
    assert fingerprint(model) != first


def test_small_weights_leave_no_file_behind(model: Path):
    fingerprint(model)
    assert not (model / CACHE_FILE).exists()


def test_a_cache_that_is_damaged_is_not_believed(model: Path, monkeypatch):
    monkeypatch.setattr(identity, "WORTH_KEEPING", 1)
    first = fingerprint(model)
    for text in ("", "[]", '{"model-1.safetensors": 3}'):
        (model / CACHE_FILE).write_text(text)
        assert fingerprint(model) == first


def test_what_is_no_weights_is_refused(model: Path):
    (model / "model-2.safetensors").write_bytes(struct.pack("<Q", 1 << 40))
    with pytest.raises(Refused, match="header"):
        fingerprint(model)
    for file in model.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(Refused, match="no weights"):
        fingerprint(model)


def test_a_hash_that_is_named_must_be_that_of_the_weights():
    weights = "ab" * 32
    assert check_named("compact_model_identity", f"sha256:{weights}", weights) == weights
    assert check_named("compact_model_identity", "rev-7", weights) == "rev-7"
    with pytest.raises(Refused, match="these weights are"):
        check_named("compact_model_identity", "cd" * 32, weights)
    with pytest.raises(Refused, match="empty"):
        check_named("compact_model_identity", " ", weights)


def test_a_name_stands_for_the_weights_that_first_went_by_it():
    store = ScriptedStore()
    claim(store, "compact_model_identity", "rev-7", "ab" * 32)
    claim(store, "compact_model_identity", "rev-7", "ab" * 32)
    claim(store, "compact_model_identity", "rev-8", "cd" * 32)
    claim(store, "compact_draft_identity", "rev-7", "cd" * 32)
    with pytest.raises(Refused, match="rev-7"):
        claim(store, "compact_model_identity", "rev-7", "cd" * 32)
    store.refuse = lambda key: True
    claim(store, "compact_model_identity", "rev-9", "ab" * 32)  # a full store: not checked
