"""A small model on the kernels and on the reference: the same tokens.

In fp32, cold and from a checkpoint, with drafts: prompt rows, exports, verify rows and rings all
take part. Other ops run on whatever kernels there are.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import millpond
from millpond import GenerationConfig, PytorchEngineConfig, SpeculativeConfig, pipeline
from millpond.ops.bind import bind
from millpond.runtime import worker

DEVICES = [
    pytest.param("cpu", marks=[pytest.mark.interpreter, pytest.mark.slow], id="interpreter"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]
MODELS = Path(millpond.__file__).parent / "bundled"
PROMPT = "Count the words: " + " ".join(f"w{i}" for i in range(30))


def answers(model: str, backend: str, device: str, patch: pytest.MonkeyPatch) -> list[tuple]:
    """(text, tokens found in the cache) of one prompt asked twice."""
    patch.setattr(worker, "bind", partial(bind, backend=backend))
    config = PytorchEngineConfig(
        device=device, dtype="float32", max_batch_size=2, session_len=512, num_state_slots=8,
        num_kv_pages=24, debug_poison=True,
    )  # fmt: skip
    drafts = SpeculativeConfig(num_speculative_tokens=2)
    wanted = GenerationConfig(max_new_tokens=5, ignore_eos=True)
    with pipeline(MODELS / model, backend_config=config, speculative_config=drafts) as pipe:
        found = [pipe(PROMPT, gen_config=wanted) for _ in range(2)]
    return [(tuple(r.token_ids), r.cached_tokens) for r in found]


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("model", ["millpond-tiny-glm", "millpond-tiny-qwen"])
def test_a_model_gives_the_tokens_of_the_reference_cold_and_from_a_checkpoint(
    model: str, on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(model, "torch", "cpu", monkeypatch)
    found = answers(model, "triton", on, monkeypatch)
    assert found == expected
    assert expected[1][1] >= 64
