"""What is asked for arrives at the engine: numbers, template, name; a refusal keeps nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from millpond import GenerationConfig, PytorchEngineConfig, Refused
from millpond.engine.settings import EngineSettings
from millpond.executor.build import Built
from millpond.front import commands, compose, serving
from millpond.front.cli import main
from millpond.front.directory import Texts
from millpond.front.guard import Limits
from millpond.front.pipeline import Pipeline
from millpond.front.sampling import Defaults, to_params
from millpond.front.server import Options
from millpond.front.service import Service
from millpond.plan.step import Capabilities
from tests.front.conftest import BUNDLED, make_service

CONFIG = PytorchEngineConfig(
    device="cpu", max_batch_size=3, session_len=1024, num_kv_pages=40, max_prefill_token_num=192,
    prefix_cache_state_budget=5, prefill_save_alignment=128, checkpoint_mode="split",
    checkpoint_interval=256, decode_checkpoint_interval=192, hold_and_join=False, max_overtakes=7,
    watchdog_timeout=9.0,
    debug_audit=True, debug_poison=True,
)  # fmt: skip
"""Nothing in it is a default."""


@pytest.fixture
def start() -> Iterator[Callable[..., Service]]:
    made: list[Service] = []

    def open_it(*given: object, **more: object) -> Service:
        made.append(compose.open_service(*given, **more))
        return made[-1]

    yield open_it
    for service in made:
        service.engine.close(drain=False, timeout=10)


def test_every_setting_of_the_engine_is_the_one_that_was_asked_for(start):
    assert start(BUNDLED, CONFIG).engine.settings == EngineSettings(
        max_batch_size=3,
        max_prefill_tokens=192,
        session_len=1024,
        prefix_caching=True,
        checkpoint_mode="split",
        prefill_save_alignment=128,
        checkpoint_interval=256,
        decode_checkpoint_interval=192,
        checkpoint_budget=5,
        hold_and_join=False,
        max_overtakes=7,
        watchdog_seconds=9.0,
        eos_token_ids=(2012, 2019, 2021),
        debug_audit=True,
        debug_poison=True,
        model_identity=hashlib.sha256((BUNDLED / "config.json").read_bytes()).digest(),
    )
    off = start(BUNDLED, PytorchEngineConfig(device="cpu", enable_prefix_caching=False))
    assert not off.engine.settings.prefix_caching


def test_a_template_may_be_handed_in_as_text_or_as_a_file(start, tmp_path):
    hello = [{"role": "user", "content": "hello"}]
    text = "{{ messages[0].content }}!"
    path = tmp_path / "template.jinja"
    path.write_text(text)
    for given in (text, path):
        service = start(BUNDLED, CONFIG, chat_template=given, name="mine")
        assert service.template.render(hello).text == "hello!"
        assert service.name == "mine"
    with pytest.raises(Refused, match=r"absent\.jinja"):
        start(BUNDLED, CONFIG, chat_template=tmp_path / "absent.jinja")


def test_the_shortest_session_that_starts_serves(start):
    with pytest.raises(Refused, match="session_len=1"):
        start(BUNDLED, PytorchEngineConfig(device="cpu", session_len=1))
    config = PytorchEngineConfig(device="cpu", session_len=2, max_batch_size=1)
    with Pipeline(start(BUNDLED, config)) as pipe:
        assert len(pipe([5], GenerationConfig(max_new_tokens=9)).token_ids) == 1


def test_sessions_too_short_for_any_chat_are_announced(start, caplog):
    texts = Texts.read(BUNDLED)
    least = texts.shortest_chat()
    for room, told in ((least, True), (least + 1, False)):
        caplog.clear()
        service = start(BUNDLED, PytorchEngineConfig(device="cpu", session_len=room))
        assert (f"use at least {least + 1}" in caplog.text) is told
    hello = [{"role": "user", "content": "?"}]
    assert len(service.ask_chat(hello, GenerationConfig()).tokens) == least


def test_a_tokenizer_of_another_model_is_refused_before_weights_are_read(monkeypatch):
    plan_model = compose.plan_model
    monkeypatch.setattr(compose, "plan_model", lambda *_: replace(plan_model(*_), vocab_size=3))
    monkeypatch.setattr(
        compose, "build_executor", lambda *_, **__: pytest.fail("weights were read")
    )
    with pytest.raises(Refused, match="tokens, the model only 3"):
        compose.open_service(BUNDLED, CONFIG)


def test_a_start_that_fails_after_loading_gives_the_device_back(monkeypatch):
    closed: list[bool] = []
    small = SimpleNamespace(
        capabilities=Capabilities(
            num_slots=1, num_pages=1, num_seats=1, export_granularity=64, vocab_size=9,
            max_position=64,
        ),
        close=lambda: closed.append(True),
    )  # fmt: skip
    monkeypatch.setattr(
        compose, "build_executor", lambda _, numbers, *__, **___: Built(small, numbers)
    )
    with pytest.raises(Refused, match="max_batch_size 3 exceeds the 1 seats"):
        compose.open_service(BUNDLED, CONFIG)
    assert closed == [True]


def test_what_was_measured_while_loading_is_what_is_served_with(start, monkeypatch):
    build = compose.build_executor

    def measured(directory, numbers, *names, **how):
        assert how["resize"](1 << 30) == replace(
            numbers, cache_budget=1 << 29, notes=how["resize"](1 << 30).notes
        )
        fewer = replace(numbers, max_batch_size=2, checkpoint_budget=4)
        return Built(build(directory, numbers, *names, **how).executor, fewer)

    monkeypatch.setattr(compose, "build_executor", measured)
    service = start(BUNDLED, CONFIG)
    assert service.resolved.max_batch_size == service.engine.settings.max_batch_size == 2
    assert service.engine.settings.checkpoint_budget == 4
    phases = service.startup.seconds
    assert list(phases) == ["planning", "loading"]
    assert service.startup.summary.startswith(f"ready after {service.startup.elapsed:.1f} s: plann")


def test_the_models_own_sampling_defaults_are_read(tmp_path: Path):
    own = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    assert Defaults.of_model(tmp_path) == Defaults(**own)
    (tmp_path / "generation_config.json").unlink()
    assert Defaults.of_model(tmp_path) == Defaults()


def test_what_a_request_leaves_open_the_model_decides():
    own = {"top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    said = {"top_p": 0.8, "top_k": 5, "min_p": 0.2, "repetition_penalty": 1.2}
    limits = {"session_len": 64, "vocab_size": 100}
    for wish, expected in (({}, own), (said, said)):
        config = GenerationConfig(do_sample=True, **wish)
        params = to_params(config, Defaults(temperature=0.6, **own), **limits)
        assert {name: getattr(params, name) for name in own} == expected
        assert params.temperature == 0.6


def test_chat_passes_every_flag_on(tokenizer, monkeypatch):
    seen: list[object] = []
    service = make_service(tokenizer, "4")
    monkeypatch.setattr(commands, "open_service", lambda *given: seen.extend(given) or service)

    def ask(pipe: object, question: str, wish: GenerationConfig, **how: object) -> int:
        seen.extend((question, wish, how))
        return 0

    monkeypatch.setattr(commands.terminal, "ask", ask)
    words = "chat Hi --model m --max-batch-size 3 --seed 7 --temperature 0.5 --max-new-tokens 9"
    draft = "--system brief --show-reasoning --speculative-num-draft-tokens 2"
    assert main([*words.split(), *draft.split()]) == 0
    assert seen[:2] == ["m", PytorchEngineConfig(max_batch_size=3)]
    assert seen[2].num_speculative_tokens == 2
    assert seen[3:] == [
        "Hi",
        GenerationConfig(max_new_tokens=9, do_sample=True, temperature=0.5, random_seed=7),
        {"system": "brief", "reasoning": True},
    ]


def test_serve_passes_every_flag_on(tokenizer, monkeypatch, tmp_path):
    seen: list[object] = []
    service = make_service(tokenizer, "4")

    def opened(*given: object, name: str, on_plan: object) -> Service:
        seen.extend((*given, name))
        return service

    monkeypatch.setattr(compose, "open_service", opened)
    monkeypatch.setattr(serving.server, "serve", lambda *given: seen.append(given[2]) or 0)
    keys = tmp_path / "keys"
    keys.write_text("# mine\nsecond\n\nthird\n")
    words = (
        "serve m --embedded --server-port 0 --model-name n --drain-seconds 2.5 --log-level ERROR "
        f"--api-key first --api-key-file {keys} --enable-admin --max-queued 7 --max-body 1MiB"
    )
    assert main([*words.split(), "--max-batch-size", "3"]) == 0
    options = Options(
        limits=Limits(keys=("first", "second", "third"), max_body=1 << 20),
        admin=True,
        drain_seconds=2.5,
        log_level="ERROR",
    )
    assert seen == ["m", PytorchEngineConfig(max_batch_size=3), None, "n", options]
    assert service.room.limit == service.resolved.max_batch_size + 7


@pytest.mark.parametrize(
    "words, why",
    [
        (["--max-body", "much"], "max_body: 'much'"),
        (["--api-key", ""], "must not be empty"),
        (["--api-key-file", "/absent"], "/absent"),
        (["--api-key-file", "/dev/null"], "holds no key"),
    ],
)
def test_limits_that_mean_nothing_are_refused(words, why, capsys):
    assert main(["serve", "--server-port", "0", *words]) == 1
    assert why in capsys.readouterr().err
