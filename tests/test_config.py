"""Configuration: strict types, derived numbers, and what is refused with which numbers."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from millpond.config import (
    PAGE,
    GenerationConfig,
    ModelFacts,
    PytorchEngineConfig,
    Resolved,
    SpeculativeConfig,
    check,
    resolve,
)
from millpond.errors import Refused, Rejected
from millpond.front.plan import fitting
from millpond.units import GIB, MIB, parse_memory

TINY = ModelFacts("tiny", 110_000, 9_000, 5_000, 6 * MIB, 8192)
FLASH = ModelFacts("flash", 147_619_840, 744_128, 40_000, 260 * GIB, 1_048_576)


def derive(facts: ModelFacts = TINY, *, available: int = 4 * GIB, **given_: object) -> Resolved:
    return resolve(PytorchEngineConfig(**given_), facts, available=available)  # type: ignore[arg-type]


def test_the_first_acceptance_configuration_means_what_it_says():
    r = derive(
        tp=1,
        distributed_executor_backend="uni",
        dtype="bfloat16",
        language_model_only=True,
        max_batch_size=8,
        session_len=8192,
        num_gpu_blocks=2048,
        max_prefill_token_num=2048,
        enable_prefix_caching=True,
        prefix_cache_state_budget=8,
        prefill_save_alignment=512,
        block_size=64,
    )
    assert (r.max_batch_size, r.num_seats, r.session_len, r.num_pages) == (8, 8, 8192, 2048)
    assert (r.checkpoint_budget, r.num_slots) == (8, 17)  # one each, and the spare
    assert (r.dtype, r.checkpoint_mode, r.prefill_save_alignment) == ("bfloat16", "interior", 512)
    assert r.notes == ()


def test_nobody_has_to_set_a_count():
    r = derive()
    assert r.num_slots == r.max_batch_size + 1 + r.checkpoint_budget
    assert r.num_pages * PAGE >= r.session_len
    assert r.cache_bytes <= r.cache_budget
    assert fitting(r, [64, r.session_len])[r.session_len] >= 1


@given(
    facts=st.builds(
        ModelFacts,
        name=st.just("m"),
        slot_bytes=st.integers(1_000, 200 * MIB),
        page_bytes=st.integers(100, MIB),
        seat_bytes=st.integers(0, 100_000),
        weight_bytes=st.just(0),
        max_position=st.integers(64, 1 << 20),
    ),
    available=st.integers(MIB, 64 * GIB),
    device=st.sampled_from(["cpu", "cuda"]),
    caching=st.booleans(),
)
def test_defaults_fit_the_budget_or_are_refused(facts, available, device, caching):
    config = PytorchEngineConfig(enable_prefix_caching=caching)
    try:
        r = resolve(config, facts, available=available, device=device)
    except Refused:
        least = 2 * facts.slot_bytes + facts.seat_bytes + facts.page_bytes
        assert (
            least + facts.slot_bytes * caching > available * (0.9 if device == "cuda" else 0.5) - 1
        )
        return
    assert r.cache_bytes <= r.cache_budget
    assert r.num_slots >= r.max_batch_size + 1
    assert r.num_pages * PAGE >= r.session_len
    assert r.max_batch_size >= 1
    assert (r.checkpoint_budget > 0) == caching


def test_a_default_that_does_not_fit_is_clamped_and_noted():
    r = derive(FLASH, available=8 * GIB)
    assert r.max_batch_size < 32
    assert r.session_len < FLASH.max_position or r.checkpoint_budget < 128
    assert any("->" in n for n in r.notes)


@pytest.mark.parametrize(
    "given_, fits",
    [
        (dict(num_state_slots=8, max_batch_size=8), "a batch of 7 fits"),
        (dict(num_kv_pages=10**6), r"\d+ fit beside"),
        (dict(session_len=9000), "8192"),
        (dict(session_len=8192, num_kv_pages=100), "at most 6400 tokens"),
        (dict(max_batch_size=100_000), r"\d+ slots fit"),
        (dict(cache_memory="1MiB", max_batch_size=32), r"\d+ slots fit"),
        (dict(num_state_slots=1), "a batch of 0 fits"),
    ],
)
def test_an_explicit_value_that_does_not_fit_is_refused_with_what_would(given_, fits):
    with pytest.raises(Refused, match=fits):
        derive(**given_)


@pytest.mark.parametrize(
    "given_, words",
    [
        (dict(prefill_save_alignment=0), ["0", "64"]),
        (dict(prefill_save_alignment=-64), ["-64", "64"]),
        (dict(prefill_save_alignment=100), ["100", "64"]),
        (dict(checkpoint_interval=700), ["700", "64"]),
        (dict(block_size=32), ["32", "64"]),
        (dict(checkpoint_mode="interior", enable_prefix_caching=False), ["interior", "caching"]),
        (dict(checkpoint_mode="split", enable_prefix_caching=False), ["split", "caching"]),
        (dict(tp=2), ["tp=2"]),
        (dict(distributed_executor_backend="mp"), ["mp"]),
        (dict(distributed_executor_backend="ray"), ["ray"]),
        (dict(language_model_only=False), ["vision"]),
        (dict(decode_checkpoint_interval=100), ["decode_checkpoint_interval=100", "64"]),
        (
            dict(decode_checkpoint_interval=64, enable_prefix_caching=False),
            ["decode_checkpoint_interval=64", "caching"],
        ),
        (
            dict(decode_checkpoint_interval=64, checkpoint_mode="off"),
            ["decode_checkpoint_interval=64", "checkpoints"],
        ),
        (dict(dp=2), ["data parallelism"]),
        (dict(ep=2), ["expert parallelism"]),
        (dict(prefill_context_parallel_size=2), ["prefill context parallelism"]),
        (dict(decode_context_parallel_size=2), ["decode context parallelism"]),
        (dict(role="prefill"), ["disaggregation"]),
        (dict(quant_policy=8), ["quantised KV"]),
        (dict(num_cpu_blocks=1), ["paging"]),
        (dict(adapters={"a": "b"}), ["adapters"]),
        (dict(enable_return_routed_experts=True), ["routed-expert"]),
        (dict(store="host", enable_prefix_caching=False), ["store", "prefix caching"]),
        (dict(kv_transfer_config={"kv_connector": "x"}, checkpoint_mode="off"), ["store"]),
        (dict(num_kv_pages=3, num_gpu_blocks=4), ["3", "4"]),
        (dict(cache_memory="lots"), ["lots"]),
        (dict(device="gpu"), ["device='gpu'", "cuda:1"]),
        (dict(device="cuda:x"), ["device='cuda:x'", "cpu"]),
        (dict(session_len=1), ["session_len=1", "at least 2", "leave it out"]),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(given_, words):
    with pytest.raises(Refused) as caught:
        check(PytorchEngineConfig(**given_))
    assert all(w in str(caught.value) for w in words)


def test_only_the_models_own_draft_layer_drafts():
    for count in (0, 3):
        check(PytorchEngineConfig(), SpeculativeConfig(num_speculative_tokens=count))
    for method in ("eagle3", "ngram"):
        with pytest.raises(Refused, match=f"'{method}' is not supported, use 'deepseek_mtp'"):
            check(PytorchEngineConfig(), SpeculativeConfig(method=method))


def test_the_number_of_drafts_is_derived_from_what_was_asked():
    assert derive().num_draft_tokens == 0
    asked = SpeculativeConfig(method="deepseek_mtp", num_speculative_tokens=5)
    facts = ModelFacts("tiny", 300_000, 40_000, 2_000, 4_000_000, 8_192)
    found = resolve(PytorchEngineConfig(), facts, available=1 << 30, speculative=asked)
    assert found.num_draft_tokens == 5


def test_checkpoints_along_an_answer_lie_on_the_alignment_unless_told_otherwise():
    assert derive(prefill_save_alignment=128).decode_checkpoint_interval == 128
    assert derive(decode_checkpoint_interval=256).decode_checkpoint_interval == 256
    assert derive(decode_checkpoint_interval=0).decode_checkpoint_interval == 0
    assert derive(enable_prefix_caching=False).decode_checkpoint_interval == 0
    assert derive(checkpoint_mode="off").decode_checkpoint_interval == 0


def test_no_caching_means_no_checkpoints_and_no_complaint():
    r = derive(enable_prefix_caching=False)
    assert (r.checkpoint_mode, r.checkpoint_budget, r.prefix_caching) == ("off", 0, False)


def test_an_explicit_number_of_slots_is_kept_and_shared_out():
    def shares(**given_: object) -> tuple[int, int, int]:
        r = derive(num_state_slots=13, **given_)
        return r.num_slots, r.max_batch_size, r.checkpoint_budget

    assert shares(max_batch_size=4) == (13, 4, 8)
    assert shares() == (13, 4, 8)
    assert shares(prefix_cache_state_budget=2) == (13, 10, 2)
    assert shares(max_batch_size=2, prefix_cache_state_budget=2) == (13, 2, 2)
    assert shares(enable_prefix_caching=False) == (13, 12, 0)
    assert shares(prefix_cache_state_budget=0) == (13, 12, 0)


def test_an_inert_prefix_cache_is_announced():
    r = derive(prefill_save_alignment=8192, session_len=4096)
    assert any("never hit" in n for n in r.notes)


def test_a_prefill_limit_off_the_grid_is_rounded_and_noted():
    assert derive(max_prefill_token_num=100).max_prefill_tokens == 64
    assert derive(max_prefill_token_num=1).max_prefill_tokens == 64  # never none, it would stall
    assert any("100 -> 64" in n for n in derive(max_prefill_token_num=100).notes)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("8GiB", 8 * GIB),
        ("8 GB", 8 * 10**9),
        ("512m", 512 * MIB),
        (123_456_789, 123_456_789),
        ("0.5", GIB // 2),
        (0.25, GIB // 4),
        (1.0, GIB),
        ("50%", GIB // 2),
    ],
)
def test_memory_is_a_size_or_a_share(text, expected):
    assert parse_memory(text, GIB) == expected


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "0", "GiB", "nan", "inf", "1.5", "0.0", "200%", "1e400"]
)
def test_memory_that_is_neither_is_refused(text):
    with pytest.raises(Refused):
        parse_memory(text, GIB)


@pytest.mark.parametrize(
    "given_",
    [
        dict(temperature=float("nan")),
        dict(temperature=float("inf")),
        dict(temperature=-0.1),
        dict(top_p=0.0),
        dict(top_p=1.5),
        dict(top_k=-2),
        dict(min_p=-0.1),
        dict(max_new_tokens=-1),
        dict(max_new_tokens=0),
        dict(max_new_tokens=True),
        dict(max_new_tokens="8"),
        dict(repetition_penalty=0.0),
        dict(presence_penalty=3.0),
        dict(logprobs=21),
        dict(n=0),
        dict(random_seed=-1),
        dict(stop_words="END"),
        dict(stop_words=[3]),
        dict(max_tokens=8),
        dict(logit_bias={1: float("nan")}),
    ],
)
def test_generation_config_refuses_wrong_values_and_names(given_):
    with pytest.raises(Rejected) as refused:
        GenerationConfig(**given_)
    assert refused.value.param == next(iter(given_))
    assert next(iter(given_)) in str(refused.value)
    assert "pydantic" not in str(refused.value)


@pytest.mark.parametrize(
    "kind, given_, words",
    [
        (
            PytorchEngineConfig,
            {"max_batchsize": 3},
            "unknown max_batchsize, did you mean max_batch_size",
        ),
        (PytorchEngineConfig, {"dtype": "fp8"}, "dtype='fp8': should be 'auto', 'float32'"),
        (
            PytorchEngineConfig,
            {"tp": "1", "xyz": 1},
            "tp='1': should be a valid integer; unknown xyz",
        ),
        (SpeculativeConfig, {"methodd": "x"}, "did you mean method"),
    ],
)
def test_a_mistake_in_a_configuration_is_told_in_one_line(kind, given_, words):
    with pytest.raises(Refused, match=re.escape(words)) as refused:
        kind(**given_)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(kind.__name__)


def test_configurations_are_frozen():
    config = GenerationConfig(stop_words=["a"], stop_token_ids=[1])
    assert config.stop_words == ("a",)
    with pytest.raises(ValidationError):
        config.top_k = 3  # type: ignore[misc]


def test_importing_the_package_imports_neither_torch_nor_the_server():
    code = (
        "import sys, millpond; millpond.GenerationConfig; millpond.Refused; dir(millpond);"
        "sys.exit(any(m in sys.modules for m in ('torch', 'fastapi', 'jinja2')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


FACTS = st.builds(
    ModelFacts,
    name=st.just("m"),
    slot_bytes=st.integers(1_000, 200 * MIB),
    page_bytes=st.integers(100, 4 * MIB),
    seat_bytes=st.integers(0, 5 * MIB),
    weight_bytes=st.just(0),
    max_position=st.integers(64, 1 << 20),
)


@given(
    facts=FACTS,
    available=st.integers(16 * MIB, 256 * GIB),
    batch=st.one_of(st.none(), st.integers(1, 300)),
    interval=st.sampled_from([64, 512, 4096]),
    pages=st.one_of(st.none(), st.integers(1, 5000)),
)
def test_on_a_gpu_seats_come_first_and_every_checkpoint_has_the_pages_it_closes(
    facts, available, batch, interval, pages
):
    config = PytorchEngineConfig(
        max_batch_size=batch, checkpoint_interval=interval, num_kv_pages=pages
    )
    try:
        r = resolve(config, facts, available=available, device="cuda")
    except Refused:
        return
    assert r.cache_bytes <= r.cache_budget <= available
    assert r.num_slots == r.num_seats + 1 + r.checkpoint_budget
    assert 1 <= r.checkpoint_budget <= max(1024, 4 * r.max_batch_size)
    if batch is not None:
        assert r.max_batch_size == batch
    if pages is not None:
        assert r.num_pages == pages
    elif r.checkpoint_budget > 1:
        prefix = min(interval, r.session_len) // PAGE
        assert r.num_pages >= min(
            r.checkpoint_budget * prefix + r.session_len // PAGE,
            (r.max_batch_size + r.checkpoint_budget) * -(-r.session_len // PAGE),
        )
        # One more checkpoint with its pages would not have fitted beside the longest sequence.
        one_more = facts.slot_bytes + prefix * facts.page_bytes
        full = r.checkpoint_budget == max(1024, 4 * r.max_batch_size)
        left = r.num_pages - r.session_len // PAGE - r.checkpoint_budget * prefix
        unused = r.cache_budget - r.cache_bytes
        assert full or left * facts.page_bytes + unused < 2 * one_more + 2 * facts.page_bytes


def test_a_gpu_is_asked_for_no_more_than_it_has_and_the_cpu_keeps_its_rule():
    config = PytorchEngineConfig(cache_memory="5GiB")
    with pytest.raises(Refused, match=r"cache_memory=5GiB.*4\.0 GiB"):
        resolve(config, TINY, available=4 * GIB, device="cuda")
    assert resolve(config, TINY, available=4 * GIB).cache_budget == 5 * GIB
    r = derive()
    assert r.checkpoint_budget == 4 * r.max_batch_size


def test_every_gpu_of_several_is_sized_as_a_gpu():
    one, other = (
        resolve(PytorchEngineConfig(device=name), TINY, available=4 * GIB, device=name)
        for name in ("cuda", "cuda:3")
    )
    assert other.device == "cuda:3"
    assert (other.max_batch_size, other.dtype, other.cache_budget) == (
        one.max_batch_size, one.dtype, one.cache_budget,
    )  # fmt: skip


def test_explicit_slots_and_pages_win_over_what_was_measured():
    config = PytorchEngineConfig(num_state_slots=40, num_kv_pages=500, max_batch_size=8)
    for available in (4 * GIB, 8 * GIB):
        r = resolve(config, TINY, available=available, device="cuda")
        assert (r.num_slots, r.num_pages) == (40, 500)
