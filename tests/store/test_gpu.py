"""A store behind an engine on a GPU: what comes back gives the text and the bytes of before."""

from __future__ import annotations

from pathlib import Path

import pytest

import millpond
from millpond import GenerationConfig, PytorchEngineConfig, SpeculativeConfig, pipeline

pytestmark = pytest.mark.gpu

MODELS = Path(millpond.__file__).parent / "bundled"
PROMPT = "Count the words: " + " ".join(f"w{i}" for i in range(60))


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("model", ["millpond-tiny-glm", "millpond-tiny-qwen"])
def test_an_engine_goes_on_from_what_an_earlier_one_left_in_a_directory(
    model: str, num_drafts: int, tmp_path: Path
) -> None:
    config = PytorchEngineConfig(
        device="cuda", max_batch_size=4, session_len=1024, num_state_slots=16, num_kv_pages=64,
        store=f"file:{tmp_path / 'store'}", debug_poison=True,
    )  # fmt: skip
    drafts = SpeculativeConfig(num_speculative_tokens=num_drafts) if num_drafts else None
    wanted = GenerationConfig(max_new_tokens=12, ignore_eos=True)
    found = []
    for _ in range(2):
        with pipeline(MODELS / model, backend_config=config, speculative_config=drafts) as pipe:
            answer = pipe(PROMPT, gen_config=wanted)
            found.append((tuple(answer.token_ids), answer.cached_tokens))
    (first, cold), (second, loaded) = found
    assert cold == 0
    assert loaded >= 64
    assert second == first
