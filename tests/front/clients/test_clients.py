"""Programs that others wrote, over HTTP against the bundled model. `make clients` runs these."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.front.conftest import Running, make_service

pytestmark = pytest.mark.clients


def test_langchain(server, run):
    assert run("kit", "with_langchain.py", server.url).strip() == "ok"


def test_litellm(server, run):
    assert run("litellm", "with_litellm.py", server.url).strip().endswith("ok")


def test_the_command_line_program_llm(server, run, tmp_path):
    folder = tmp_path / ".config" / "io.datasette.llm"
    folder.mkdir(parents=True)
    entry = {
        "model_id": "tiny", "model_name": "tiny", "api_base": server.url + "/v1",
        "supports_schema": True, "supports_tools": True,
    }  # fmt: skip
    # JSON is YAML.
    (folder / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    base = ("-m", "tiny", "--key", "none", "-n")
    asked = "What is 2 + 2? Answer briefly."
    streamed = run("kit", "llm", *base, asked, "-o", "temperature", "0", "-o", "max_tokens", "64")
    assert "4" in streamed
    whole = run(
        "kit", "llm", *base, asked, "--no-stream", "-o", "temperature", "0", "-o", "max_tokens",
        "64",
    )  # fmt: skip
    assert whole == streamed
    # Greedy: a sampled string of a tiny model may not end before the session does.
    shaped = run(
        "kit", "llm", *base, "--schema", "name, age int", "a dog", "-o", "temperature", "0",
    )  # fmt: skip
    assert set(json.loads(shaped)) == {"name", "age"}


TASKS = {
    "tiny_mc": """
task: tiny_mc
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/mc.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
""",
    "tiny_ppl": """
task: tiny_ppl
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/ppl.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "tiny_add": """
task: tiny_add
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/add.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 64, do_sample: false}
filter_list:
  - name: last
    filter:
      - {function: regex, regex_pattern: '(-?\\d+)', group_select: -1}
      - {function: take_first}
metric_list: [{metric: exact_match}]
""",
}
ROWS = {
    "mc": [
        {"question": f"What is {a} + {b}?", "choices": [f" {a + b}", " blue", " 99"], "answer": 0}
        for a, b in ((2, 2), (3, 4), (1, 5))
    ],
    "ppl": [{"text": "The sum of two and two is four."}, {"text": "A short line of text."}],
    "add": [
        {"question": f"What is {a} + {b}? Answer briefly.", "answer": str(a + b)}
        for a, b in ((2, 2), (3, 4), (1, 5))
    ],
}  # fmt: skip


@pytest.fixture
def tasks(tmp_path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
    return folder


def results_of(folder: Path) -> dict[str, dict[str, float]]:
    (found,) = folder.rglob("results_*.json")
    return json.loads(found.read_text())["results"]


def test_lm_eval_over_completions_with_our_tokenizer(server, run, tasks, tmp_path):
    arguments = (
        f"model=tiny,base_url={server.url}/v1/completions,num_concurrent=2,max_length=2048,"
        "tokenizer_backend=remote,tokenized_requests=True"
    )
    run(
        "lm-eval", "lm_eval", "run", "--model", "local-completions", "--model_args", arguments,
        "--include_path", str(tasks), "--tasks", "tiny_mc,tiny_ppl", "--batch_size", "4",
        "--output_path", str(tmp_path / "out"),
    )  # fmt: skip
    found = results_of(tmp_path / "out")
    bits = size = 0.0
    for row in ROWS["ppl"]:
        ids = server.service.tokenizer.encode(row["text"])
        first = server.service.tokenizer.token_id("<|endoftext|>")
        body = {"prompt": [first, *ids], "max_tokens": 0, "echo": True, "logprobs": 0}
        reply = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
        shown = reply.json()["choices"][0]["logprobs"]["token_logprobs"]
        bits -= sum(shown[1:]) / math.log(2)
        size += len(row["text"].encode())
    assert found["tiny_ppl"]["bits_per_byte,none"] == pytest.approx(bits / size, rel=1e-3)
    assert 0.0 <= found["tiny_mc"]["acc,none"] <= 1.0


def test_lm_eval_over_chat(server, run, tasks, tmp_path):
    arguments = f"model=tiny,base_url={server.url}/v1/chat/completions,num_concurrent=2"
    run(
        "lm-eval", "lm_eval", "run", "--model", "local-chat-completions", "--model_args",
        arguments, "--apply_chat_template", "--include_path", str(tasks), "--tasks", "tiny_add",
        "--output_path", str(tmp_path / "out"),
    )  # fmt: skip
    assert results_of(tmp_path / "out")["tiny_add"]["exact_match,last"] == 1.0


@pytest.fixture
def scripted(tokenizer) -> Iterator[Running]:
    running = Running(make_service(tokenizer, "Think.</think>hello well"))
    yield running
    running.close()


CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_headers_conformance,response_schema_conformance,negative_data_rejection,"
    "missing_required_header"
)


def test_schemathesis_finds_no_fault_of_ours_and_no_undocumented_answer(scripted, run):
    """What is right by the schema may still be refused (a length, a tool): that is not checked."""
    run(
        "kit", "schemathesis", "run", scripted.url + "/openapi.json", "--max-examples", "20",
        "--seed", "1", "--checks", CHECKS, "--continue-on-failure", "--no-color",
    )  # fmt: skip
