"""Numbers that are legal and too large, or too small, for a device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond import GenerationConfig, Pipeline, PytorchEngineConfig, Rejected, pipeline
from millpond.front.text import Tokenizer
from tests.front.conftest import BUNDLED

CONFIG = PytorchEngineConfig(max_batch_size=2, session_len=256, num_kv_pages=12, device="cpu")
PROMPT = "What is 2 + 2?"


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    with pipeline(BUNDLED, backend_config=CONFIG) as made:
        yield made


@pytest.mark.parametrize("top_k", [2**31, 2**63, 10**400], ids=["2^31", "2^63", "10^400"])
def test_a_top_k_beyond_all_integers_of_a_device_keeps_every_token(pipe: Pipeline, top_k: int):
    texts = [
        pipe(
            PROMPT,
            GenerationConfig(
                max_new_tokens=6, do_sample=True, temperature=1.0, random_seed=3, top_k=k
            ),
        ).token_ids
        for k in (0, top_k)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("temperature", [1e-19, 1e-38, 1e-40, 5e-324])
@pytest.mark.parametrize("filters", [{}, {"min_p": 0.1}, {"top_p": 0.9}])
def test_the_smallest_temperatures_are_greedy(pipe: Pipeline, temperature: float, filters: dict):
    greedy = pipe(PROMPT, GenerationConfig(max_new_tokens=4)).token_ids
    cold = GenerationConfig(
        max_new_tokens=4, do_sample=True, temperature=temperature, random_seed=1, **filters
    )
    assert pipe(PROMPT, cold).token_ids == greedy


@pytest.mark.parametrize("bias", [1e39, 1e300, -1e39])
def test_a_bias_that_would_be_infinite_is_refused(pipe: Pipeline, bias: float):
    with pytest.raises(Rejected, match="logit_bias"):
        pipe(PROMPT, GenerationConfig(max_new_tokens=1, logit_bias={77: bias}))


@pytest.mark.parametrize("filters", [{}, {"min_p": 0.1}, {"top_p": 0.9}, {"top_k": 5}])
def test_the_largest_bias_decides(pipe: Pipeline, filters: dict):
    wish = GenerationConfig(
        max_new_tokens=3, do_sample=True, temperature=1e-19, repetition_penalty=0.01,
        ignore_eos=True, logit_bias={77: 1e6}, random_seed=1, **filters,
    )  # fmt: skip
    assert set(pipe(PROMPT, wish).token_ids) <= {77}


def test_other_threads_run_while_a_long_text_is_tokenized():
    tokenizer, done, seen = Tokenizer(Path(BUNDLED)), threading.Event(), 0
    worker = threading.Thread(target=lambda: (tokenizer.encode("hello " * 60_000), done.set()))
    worker.start()
    while not done.wait(0.001):
        seen += 1
    worker.join()
    assert seen > 3
