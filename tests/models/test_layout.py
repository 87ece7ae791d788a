"""Bytes per sequence, token and model of the published sizes, from their configurations alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from millpond.memory.layout import EntrySpec
from millpond.models.base import Description, describe
from millpond.ops.bind import Bound
from tests.support import published

BF16 = torch.bfloat16


def test_glm_flash_keeps_the_published_bytes(tmp_path: Path) -> None:
    description = described(tmp_path, published.glm_flash())
    layout = description.layout(BF16)
    assert named(layout.slot, "recurrent") == 142_606_336
    assert named(layout.slot, "conv") == 5_013_504
    assert named(layout.slot, "recurrent", "conv") == 147_619_840
    assert layout.slot.num_bytes == 147_619_840 + 2 * 4096  # the boundary hidden
    latent, pooled = named(layout.page, "latent") // 64, named(layout.page, "pooled") // 64
    assert (latent, pooled) == (11_264 + 1_024, 704 + 64)  # eleven layers, and the draft layer
    assert layout.page.num_bytes == 64 * (latent + pooled)
    assert layout.seat.num_bytes == 12 * 2_048
    assert description.config.max_position == 1_048_576


@pytest.mark.parametrize("size", published.QWEN_SIZES, ids=lambda size: size.name)
def test_qwen_sizes_keep_the_published_bytes(size: published.QwenSize, tmp_path: Path) -> None:
    layout = described(tmp_path, published.qwen(size)).layout(BF16)
    linear = size.layers * 3 // 4
    assert named(layout.slot, "recurrent") == linear * size.recurrent_bytes
    assert named(layout.slot, "conv") == linear * size.conv_bytes
    assert named(layout.slot, "recurrent", "conv") == size.sequence_bytes
    assert layout.slot.num_bytes == size.sequence_bytes + 2 * size.hidden
    assert layout.page.num_bytes == 64 * (size.token_bytes + size.draft_bytes)
    assert layout.seat.num_bytes == 0


def test_glm_flash_has_the_published_number_of_parameters(tmp_path: Path, ops: Bound) -> None:
    description = described(tmp_path, published.glm_flash())
    assert parameters(description, ops) == pytest.approx((313.3 + 7.4) * 1e9, rel=2e-3)
    without = Description(
        description.model_dir,
        description.model_type,
        description.family,
        description.config.without_draft(),
        (),
    )
    assert parameters(without, ops) == pytest.approx(313.3e9, rel=1e-3)


@pytest.mark.parametrize("size", published.QWEN_SIZES, ids=lambda size: size.name)
def test_qwen_sizes_have_the_published_number_of_parameters(
    size: published.QwenSize, tmp_path: Path, ops: Bound
) -> None:
    total = (size.parameters + size.draft_parameters) * 1e9
    found = parameters(described(tmp_path, published.qwen(size)), ops)
    assert found == pytest.approx(total, rel=1e-3)


def described(model_dir: Path, config: dict[str, Any]) -> Description:
    (model_dir / "config.json").write_text(json.dumps(config))
    return describe(model_dir)


def named(entry: EntrySpec, *names: str) -> int:
    """Bytes of the tensors of these names in all layers."""
    return sum(t.num_bytes for t in entry.tensors if t.name in names)


def parameters(description: Description, ops: Bound) -> float:
    """Counted in fp32, where no tensor is held wider than the others."""
    return description.weight_bytes(torch.float32, ops) / 4
