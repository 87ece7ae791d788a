"""An engine and its store at start: what is refused, what is said, and what goes on without."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from millpond.config import PytorchEngineConfig, SpeculativeConfig
from millpond.engine.loop import Engine
from millpond.errors import Refused
from millpond.front import doctor, stores
from millpond.front.compose import open_engine, plan_model
from millpond.front.metrics import Metrics
from millpond.store.backend import StoreUnavailable
from millpond.store.file import FileStore

SMALL = dict(session_len=512, max_batch_size=2, device="cpu")


def opened(speculative: SpeculativeConfig | None = None, **config) -> Engine:
    """The bundled model's engine."""
    return open_engine(plan_model(None, PytorchEngineConfig(**SMALL, **config), speculative))


def transfer(path: Path, **extra) -> dict:
    return {
        "kv_connector": "FileStoreConnector",
        "kv_connector_extra_config": {"path": str(path), **extra},
    }


def test_one_line_says_which_store_whose_states_and_how_large(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "millpond.store"):
        opened(store=f"file:{tmp_path / 's'}").close()
    (line,) = [r.message for r in caplog.records if "records of" in r.message]
    assert str(tmp_path) in line
    assert "kv_both" in line


def test_a_store_absent_at_start_is_an_error_unless_it_is_optional(tmp_path, monkeypatch):
    there: list[FileStore] = []

    def absent(config):
        if not there:
            raise StoreUnavailable("no route")
        return there[0]

    monkeypatch.setattr(stores, "open_backend", absent)
    with pytest.raises(Refused, match=r"no route.*store_optional"):
        opened(store=f"file:{tmp_path / 's'}")
    engine = opened(store=f"file:{tmp_path / 's'}", store_optional=True)
    stats = engine.stats().store
    assert stats is not None
    assert stats.breaker == "open"
    engine.close()


@pytest.mark.parametrize(
    "extra, drafts, words",
    [
        ({"compact_model_identity": "ab" * 32}, 0, "these weights are"),
        ({"compact_draft_identity": "d"}, 0, "goes with compact_model_identity"),
        ({"compact_model_identity": "m"}, 3, "without compact_draft_identity"),
    ],
)
def test_identities_that_are_missing_or_wrong_are_refused(tmp_path, extra, drafts, words):
    speculative = SpeculativeConfig(num_speculative_tokens=drafts) if drafts else None
    with pytest.raises(Refused, match=words):
        opened(speculative, kv_transfer_config=transfer(tmp_path / "s", **extra))


def test_a_name_that_stood_for_other_weights_is_refused(tmp_path, monkeypatch):
    named = transfer(tmp_path / "s", compact_model_identity="rev-1")
    opened(kv_transfer_config=named).close()
    opened(kv_transfer_config=named).close()
    monkeypatch.setattr(stores, "fingerprint", lambda path: "ab" * 32)
    with pytest.raises(Refused, match="rev-1"):
        opened(kv_transfer_config=named)


def test_dummy_weights_need_a_name(tmp_path):
    with pytest.raises(Refused, match="dummy"):
        opened(load_format="dummy", store="host")
    named = transfer(tmp_path / "s", compact_model_identity="dummy-1")
    opened(load_format="dummy", kv_transfer_config=named).close()


def test_an_engine_that_ends_leaves_no_thread(tmp_path):
    before = set(threading.enumerate())
    opened(store=f"file:{tmp_path / 's'}").close()
    assert set(threading.enumerate()) <= before


def test_a_start_that_is_refused_leaves_no_thread(tmp_path):
    before = set(threading.enumerate())
    with pytest.raises(Refused):
        opened(kv_transfer_config=transfer(tmp_path / "s", compact_model_identity="ab" * 32))
    assert set(threading.enumerate()) <= before


def test_metrics_tell_tiers_rates_sheds_and_the_breaker(tmp_path):
    engine = opened(store=f"file:{tmp_path / 's'}")
    metrics = Metrics()
    metrics.read_engine(engine.stats)
    text = metrics.exposition().decode()
    engine.close()
    for name in (
        'millpond_store_breaker{state="closed"} 1.0',
        'millpond_store_breaker{state="open"} 0.0',
        "millpond_store_breaker_trips_total 0.0",
        'millpond_store_bytes_per_second{kind="get"}',
        "millpond_store_waiting 0.0",
        "millpond_store_bytes ",
    ):
        assert name in text


def test_doctor_shows_tiers_and_whether_the_store_is_there(tmp_path, capsys):
    config = PytorchEngineConfig(**SMALL, store=f"file:{tmp_path / 's'}", store_size="1GiB")
    assert doctor.run(None, config) == 0
    shown = capsys.readouterr().out
    assert "tiers" in shown
    assert "of 1.0 GiB" in shown
    (tmp_path / "plain").write_text("a file")
    config = PytorchEngineConfig(**SMALL, store=f"file:{tmp_path / 'plain'}")
    assert doctor.run(None, config) == 1
