"""The bundled tiny model loads from its published names and equals transformers."""

from __future__ import annotations

from pathlib import Path

import torch

import millpond
from millpond.models.base import describe, load
from millpond.ops.bind import Bound
from tests.support.batches import Bench
from tests.support.oracle import CPU, random_ids

BUNDLED = Path(millpond.__file__).parent / "bundled" / "millpond-tiny-glm"
TOLERANCE = 1e-3


def test_the_bundled_glm_equals_transformers(ops: Bound) -> None:
    from transformers.models.glm5_next import Glm5NextForConditionalGeneration
    from transformers.utils import logging

    logging.set_verbosity_error()
    oracle = Glm5NextForConditionalGeneration.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    description = describe(BUNDLED)
    assert description.config.num_draft_layers == 1
    model = load(description, ops, dtype=torch.float32, device=CPU)
    ids = random_ids(300, 0)
    with torch.inference_mode():
        expected = oracle(input_ids=torch.tensor([ids])).logits[0]
    bench = Bench(model, description.layout(torch.float32))
    (got,) = bench.logits([bench.row(0, 0, ids, None, 0)])
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
