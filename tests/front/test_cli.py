"""Flags, their spellings, the configuration file, and the exit status of the command."""

from __future__ import annotations

import json
import socket

import pytest

from millpond.config import NOT_SERVED, PytorchEngineConfig
from millpond.errors import Refused
from millpond.front.cli import main
from millpond.front.flags import (
    ALIASES,
    QUIET,
    ChatFlags,
    DoctorFlags,
    EvalFlags,
    ServeFlags,
    parse,
)

ACCEPTANCE = (
    "/models/x --backend pytorch --tp 1 --distributed-executor-backend uni --dtype bfloat16 "
    "--language-model-only --max-batch-size 8 --session-len 8192 --num-gpu-blocks 2048 "
    "--max-prefill-token-num 2048 --enable-prefix-caching --prefix-cache-state-budget 8 "
    "--prefill-save-alignment 512 --cache-block-seq-len 64 --model-name glm53-flash "
    "--server-name 127.0.0.1 --server-port 23333 --log-level INFO"
).split()


def test_the_acceptance_command_means_what_it_says():
    flags, notes = parse(ServeFlags, "serve", ACCEPTANCE)
    assert notes == []
    assert (flags.model, flags.model_name) == ("/models/x", "glm53-flash")
    assert (flags.server_name, flags.server_port, flags.log_level) == ("127.0.0.1", 23333, "INFO")
    assert flags.engine() == PytorchEngineConfig(
        backend="pytorch", tp=1, distributed_executor_backend="uni", dtype="bfloat16",
        language_model_only=True, max_batch_size=8, session_len=8192, num_gpu_blocks=2048,
        max_prefill_token_num=2048, enable_prefix_caching=True, prefix_cache_state_budget=8,
        prefill_save_alignment=512, block_size=64,
    )  # fmt: skip


def test_what_was_not_said_stays_unsaid():
    flags, _ = parse(ServeFlags, "serve", ["--tp", "1"])
    assert flags.engine().model_fields_set == {"tp"}
    assert flags.speculative() is None


def test_every_field_of_the_configuration_has_a_flag():
    flags, _ = parse(DoctorFlags, "doctor", [])
    for name in PytorchEngineConfig.model_fields:
        assert hasattr(flags, name)


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_other_spellings_are_read_and_told(alias):
    ours = ALIASES[alias]
    value = [] if ours.startswith("--no-") else ["0.5" if ours == "--cache-memory" else "1"]
    kind = EvalFlags if ours == "--json-path" else ServeFlags
    flags, notes = parse(kind, "serve", [alias, *value])
    field = ours.removeprefix("--no-").removeprefix("--").replace("-", "_")
    assert field in flags.model_fields_set
    assert (f"{alias} read as {ours}" in notes) == (alias not in QUIET)


def test_speculation_flags_become_its_configuration():
    flags, _ = parse(
        ServeFlags, "serve",
        ["--speculative-algorithm", "deepseek_mtp", "--speculative-num-draft-tokens", "3"],
    )  # fmt: skip
    assert flags.speculative().num_speculative_tokens == 3


@pytest.mark.parametrize("name", ["f.toml", "f.json"])
def test_a_file_gives_values_and_flags_win(tmp_path, name):
    path = tmp_path / name
    values = {"max-batch-size": 3, "session_len": 128, "server-port": 99}
    toml = "\n".join(f"{k} = {v}" for k, v in values.items())
    path.write_text(json.dumps(values) if name.endswith("json") else toml)
    flags, _ = parse(ServeFlags, "serve", ["--config", str(path), "--session-len", "256"])
    assert (flags.max_batch_size, flags.session_len, flags.server_port) == (3, 256, 99)


def test_no_environment_variable_is_read(monkeypatch):
    monkeypatch.setenv("MAX_BATCH_SIZE", "3")
    monkeypatch.setenv("TP", "2")
    flags, _ = parse(ServeFlags, "serve", [])
    assert (flags.max_batch_size, flags.tp) == (None, 1)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["serve", "--max-batch-siz", "3"], ["--max-batch-siz", "did you mean --max-batch-size"]),
        (["serve", "--max-batch-size", "x"], ["max_batch_size", "integer"]),
        (["serve", "--max-batch-size", "0"], ["max_batch_size"]),
        (["serve", "--dtype", "int3"], ["dtype", "bfloat16"]),
        (["serve", "--tp"], ["--tp"]),
        (["serve", "a", "b"], ["b"]),
        (["serve", "--log-level", "loud"], ["log_level"]),
        (["serve", "--server-port", "70000"], ["server_port"]),
        (["serve", "--config", "/absent.toml"], ["/absent.toml"]),
        (["chat", "--max-new-tokens", "-1"], ["max_new_tokens"]),
        (["sereve"], ["sereve", "serve, chat, doctor"]),
    ],
)
def test_a_bad_flag_is_one_line_and_status_2(argv, words, capsys):
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert all(w in err for w in words)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["chat", "hi", "--model", "/absent"], ["/absent", "millpond-tiny-glm"]),
        (["chat", "hi", "--tp", "2"], ["tp=2"]),
        (["chat", "hi", "--prefill-save-alignment", "100"], ["100", "64"]),
        (["serve", "--server-port", "0", "--speculative-num-draft-tokens", "8"], ["0 to 7"]),
        (["serve", "--server-port", "0", "--speculative-algorithm", "eagle"], ["eagle"]),
        (
            "serve --server-port 0 --checkpoint-mode split --no-enable-prefix-caching".split(),
            ["split"],
        ),
    ],
)
def test_what_cannot_be_served_is_one_line_and_status_1(argv, words, capsys):
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert all(w in err for w in words)


def test_an_address_that_is_taken_is_told_before_a_model_is_loaded(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        assert main(["serve", "/absent", "--server-port", str(port)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"127.0.0.1:{port}" in err


def test_help_and_version(capsys):
    assert main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["--version"]) == 0
    with pytest.raises(SystemExit) as done:
        main(["chat", "--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert "--prefix-cache-state-budget" in text
    assert not any(f"--{name.replace('_', '-')} " in text for name in NOT_SERVED)


def test_chat_takes_its_question_as_an_argument():
    flags, _ = parse(ChatFlags, "chat", ["What is 2 + 2?", "--temperature", "0.5"])
    assert (flags.prompt, flags.temperature) == ("What is 2 + 2?", 0.5)


def test_a_file_with_an_unknown_name_is_refused(tmp_path):
    path = tmp_path / "f.toml"
    path.write_text("max_batch = 3\n")
    with pytest.raises(Refused, match="max_batch"):
        parse(ServeFlags, "serve", ["--config", str(path)])
