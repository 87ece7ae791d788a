"""Kind: a configuration that cannot work is accepted, or one that can is refused."""

from __future__ import annotations

import pytest

from millpond.config import ModelFacts, PytorchEngineConfig, resolve
from millpond.errors import Refused
from millpond.units import GIB, MIB

SMALL = ModelFacts("small", 300_000, 40_000, 2_000, 4_000_000, 8_192)
LARGE = ModelFacts("large", 140 * MIB, 3 * MIB, 40_000, 100 * GIB, 262_144)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("facts, available", [(SMALL, GIB), (SMALL, 64 * GIB), (LARGE, 60 * GIB)])
def test_the_defaults_pass_their_own_validation(facts, available, device):
    """What was derived is accepted when it is asked for by name, and derives the same again."""
    derived = resolve(PytorchEngineConfig(), facts, available=available, device=device)
    assert derived.num_pages * 64 >= derived.session_len
    assert derived.num_slots > derived.max_batch_size
    named = PytorchEngineConfig(
        max_batch_size=derived.max_batch_size,
        session_len=derived.session_len,
        max_prefill_token_num=derived.max_prefill_tokens,
        num_kv_pages=derived.num_pages,
        prefix_cache_state_budget=derived.checkpoint_budget,
        prefill_save_alignment=derived.prefill_save_alignment,
        checkpoint_mode=derived.checkpoint_mode,
        checkpoint_interval=derived.checkpoint_interval,
        dtype=derived.dtype,
    )
    again = resolve(named, facts, available=available, device=device)
    for field in ("num_slots", "num_pages", "num_seats", "session_len", "checkpoint_mode", "dtype"):
        assert getattr(again, field) == getattr(derived, field), field


def test_an_alignment_that_no_prompt_can_reach_is_reported():
    """A prefix of 8,192 tokens is the smallest that could be reused, and no prompt is longer."""

    def warnings(alignment: int) -> list[str]:
        config = PytorchEngineConfig(prefill_save_alignment=alignment)
        notes = resolve(config, SMALL, available=GIB).notes
        return [note for note in notes if "never hit" in note]

    assert ["8192" in note for note in warnings(8_192)] == [True]
    assert warnings(4_096) == []


@pytest.mark.parametrize("alignment", [-64, 0, 1, 63, 100])
def test_an_alignment_off_the_page_grid_is_refused_with_both_numbers(alignment):
    config = PytorchEngineConfig(prefill_save_alignment=alignment)
    with pytest.raises(Refused, match=rf"{alignment}\b.*\b64"):
        resolve(config, SMALL, available=GIB)


def test_a_pool_that_no_session_fits_is_refused_with_both_numbers():
    config = PytorchEngineConfig(session_len=8_192, num_kv_pages=100)
    with pytest.raises(Refused, match=r"8192.*100"):
        resolve(config, SMALL, available=GIB)
