"""The two acceptance scripts, as a user would run them: in processes of their own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.front.test_cli import ACCEPTANCE
from tests.support.ports import free_port

SCRIPT = """
import os
from millpond import GenerationConfig, PytorchEngineConfig, pipeline

backend_config = PytorchEngineConfig(
    tp=1, distributed_executor_backend="uni", dtype="bfloat16", language_model_only=True,
    max_batch_size=8, session_len=8192, num_gpu_blocks=2048, max_prefill_token_num=2048,
    enable_prefix_caching=True, prefix_cache_state_budget=8, prefill_save_alignment=512,
    block_size=64,
)
if __name__ == "__main__":
    with pipeline(os.environ.get("MODEL_PATH"), backend_config=backend_config,
                  log_level="INFO") as pipe:
        response = pipe("What is 2 + 2? Answer briefly.",
                        gen_config=GenerationConfig(max_new_tokens=512, do_sample=False))
        print(response.text)
"""
QUESTION = "What is 2 + 2? Answer briefly."


def test_the_python_script_answers_four_and_says_what_was_chosen(tmp_path):
    path = tmp_path / "acceptance.py"
    path.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\b4\b", done.stdout)
    assert "17 slots" in done.stderr
    assert "2048 pages" in done.stderr
    assert done.stderr.count("ops on cpu") == 1


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port()
    argv = [str(port) if a == "23333" else a for a in ACCEPTANCE[1:]]
    log = tmp_path / "log"
    with log.open("wb") as err:
        started = subprocess.Popen(
            [sys.executable, "-m", "millpond.front.cli", "serve", *argv], stderr=err
        )
    url = f"http://127.0.0.1:{port}"
    end = time.monotonic() + 90
    while True:
        try:
            if httpx.get(url + "/ready").status_code == 200:
                break
        except httpx.TransportError:
            assert started.poll() is None, log.read_text()
            assert time.monotonic() < end
            time.sleep(0.1)
    yield started, url
    started.kill()
    started.wait()


def test_the_served_model_answers_four_and_leaves_in_order(process, tmp_path):
    started, url = process
    body = {
        "model": "glm53-flash",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 512,
        "temperature": 0,
    }
    reply = httpx.post(url + "/v1/chat/completions", json=body, timeout=60).json()
    assert re.search(r"\b4\b", reply["choices"][0]["message"]["content"])
    assert httpx.get(url + "/v1/models").json()["data"][0]["max_model_len"] == 8192

    # Asked to end in the middle of a stream, it finishes that stream first.
    long = {**body, "stream": True, "ignore_eos": True, "max_tokens": 200}
    with httpx.stream("POST", url + "/v1/chat/completions", json=long, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        started.send_signal(signal.SIGTERM)
        rest = [x for x in lines if x]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    assert started.wait(30) == 0
    err = (tmp_path / "log").read_text()
    assert "17 slots" in err
    assert "smallest reusable prefix" in err
    assert "Traceback" not in err
