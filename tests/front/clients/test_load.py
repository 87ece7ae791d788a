"""Load clients of two other engines; skipped where `make load-clients` has not fetched them."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.front.clients.conftest import ENVIRONMENTS
from tests.front.conftest import BUNDLED

pytestmark = pytest.mark.clients
VLLM = ENVIRONMENTS / "load" / "vllm-rs"
SGLANG = ENVIRONMENTS / "load" / "_bench.so"


def _python() -> str | None:
    """A Python 3.12 that runs: what has the name may only be a pointer to one that is not there."""
    found = shutil.which("python3.12")
    works = (
        found is not None and not subprocess.run([found, "-c", ""], capture_output=True).returncode
    )
    return found if works else None


PYTHON = _python()
needs_vllm = pytest.mark.skipif(not VLLM.exists(), reason="make load-clients fetches vllm-rs")
needs_sglang = pytest.mark.skipif(
    not SGLANG.exists() or PYTHON is None,
    reason="make load-clients fetches the module, and it runs in Python 3.12 only",
)
LENGTHS = ("--random-input-len", "32", "--random-output-len", "16")


def counted(command: list[str], cwd: Path | None = None) -> list[tuple[str, ...]]:
    """The counts of answers, good and bad, that a client reports."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return re.findall(r"(Successful|Failed) requests: +(\d+)", done.stdout)


@needs_vllm
@pytest.mark.parametrize(
    "more",
    [
        ("--backend", "openai"),
        ("--backend", "openai-chat"),
        ("--backend", "openai-responses"),
        ("--backend", "openai-chat", "--multi-turn", "--multi-turn-num-turns", "2"),
        ("--backend", "openai", "--prompt-token-ids", "--random-cache-hit-fraction", "0.8",
         "--random-cache-ratio", "0.9"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_vllms_client(server, more):
    command = [
        str(VLLM), "bench", "serve", "--base-url", server.url, "--model", "tiny", "--tokenizer",
        str(BUNDLED), "--temperature", "0", "--ignore-eos", "--dataset-name", "random", *LENGTHS,
        "--num-prompts", "12", "--max-concurrency", "4", *more,
    ]  # fmt: skip
    found = counted(command)
    assert found
    assert all(int(count) == 0 for kind, count in found if kind == "Failed")


@needs_sglang
@pytest.mark.parametrize("more", [(), ("--return-logprob", "--top-logprobs-num", "2")], ids=str)
def test_sglangs_client(server, tmp_path, more):
    shutil.copy(SGLANG, tmp_path / "_bench.so")
    code = 'import sys, _bench; sys.argv[0] = "sglang-bench"; _bench.run_argv(sys.argv)'
    command = [
        str(PYTHON), "-c", code, "--backend", "sglang", "--base-url", server.url,
        "--dataset-name", "random-ids", "--tokenize-prompt", "--vocab-size", "2000", *LENGTHS,
        "--num-prompts", "12", *more,
    ]  # fmt: skip
    assert counted(command, tmp_path) == [("Successful", "12")]


@pytest.fixture
def renderer() -> Iterator[Callable[..., list[int]]]:
    """Their reading of our chat template, as token ids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [str(VLLM), "render", str(BUNDLED), "--port", str(port), "--tool-call-parser", "glm47"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def render(**body: object) -> list[int]:
        url = f"http://127.0.0.1:{port}/v1/chat/completions/render"
        end = time.monotonic() + 30
        while True:
            try:
                return httpx.post(url, json={"model": str(BUNDLED), **body}).json()["token_ids"]
            except httpx.TransportError:
                assert time.monotonic() < end
                time.sleep(0.1)

    yield render
    process.terminate()
    process.wait(20)


FUNCTION = {
    "name": "add", "description": "adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}  # fmt: skip
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TALKS = [
    {"messages": [{"role": "user", "content": "hello"}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a ", "b")]},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": "ok", "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
    },
]


@needs_vllm
def test_another_engine_reads_our_chat_template_alike(server, renderer):
    for talk in TALKS:
        ours = httpx.post(server.url + "/tokenize", json=talk, timeout=30).json()["tokens"]
        assert renderer(**talk) == ours
