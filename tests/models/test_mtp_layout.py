"""What speculation keeps of a sequence: one slot, and rings of its seat."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from millpond.memory.layout import ModelLayout
from millpond.models.base import Description, describe
from tests.support import published
from tests.support.oracle import Tiny

BF16 = torch.bfloat16
MIB = 2**20


@pytest.fixture
def glm(tmp_path: Path) -> Description:
    (tmp_path / "config.json").write_text(json.dumps(published.glm_flash()))
    return describe(tmp_path)


@pytest.mark.parametrize(("num_drafts", "most"), [(0, 1.001), (3, 1.1), (5, 1.16), (7, 1.22)])
def test_a_sequence_of_glm_flash_takes_little_more_than_a_slot(
    num_drafts: int, most: float, glm: Description
) -> None:
    layout = glm.layout(BF16, num_drafts)
    kept = layout.slot.num_bytes + layout.seat.num_bytes
    share = kept / layout.slot.num_bytes
    print(
        f"K = {num_drafts}: slot {layout.slot.num_bytes / MIB:.1f} MiB, seat"
        f" {layout.seat.num_bytes / MIB:.1f} MiB, together {kept / MIB:.1f} MiB ({share:.4f} slots)"
    )
    assert share <= most


@pytest.mark.parametrize("num_drafts", [3, 5, 7])
def test_rings_of_glm_flash_hold_raw_inputs_and_hidden_twice(
    num_drafts: int, glm: Description
) -> None:
    seat = glm.layout(BF16, num_drafts).seat
    of_token = 2 * 34 * (24_576 + 8_192 + 64) + 2 * 4_096  # what a draft leaves, in bytes
    rings = sum(t.num_bytes for t in seat.tensors if t.name.startswith("ring_"))
    assert rings == 2 * num_drafts * of_token
    tails = [t.shape for t in seat.tensors if t.name == "tail"]
    assert tails == [({3: 8, 5: 12, 7: 12}[num_drafts], 2, 128)] * 12


@pytest.mark.parametrize("size", published.QWEN_SIZES, ids=lambda size: size.name)
def test_rings_of_qwen_hold_raw_inputs_and_hidden_twice(
    size: published.QwenSize, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published.qwen(size)))
    seat = describe(tmp_path).layout(BF16, 3).seat
    channels, linear = size.conv_bytes // 6, size.layers * 3 // 4
    of_token = 2 * linear * (channels + 2 * size.value_heads) + 2 * size.hidden
    assert sum(t.num_bytes for t in seat.tensors) == 2 * 3 * of_token


def test_the_tail_is_the_least_multiple_of_the_pool_that_holds_pool_and_drafts(
    make_tiny: Callable[[str], Tiny],
) -> None:
    description = make_tiny("glm").description
    found = [tails(description.layout(BF16, drafts)) for drafts in range(8)]
    assert found == [{4}, {8}, {8}, {8}, {8}, {12}, {12}, {12}]


def test_drafts_change_neither_slot_nor_page(tiny: Tiny) -> None:
    """So a checkpoint made with drafts on is one made without."""
    plain = tiny.description.layout(BF16)
    for drafts in range(8):
        layout = tiny.description.layout(BF16, drafts)
        assert (layout.slot, layout.page) == (plain.slot, plain.page)


def test_without_drafts_a_seat_holds_tails_alone_and_rings_of_no_bytes(tiny: Tiny) -> None:
    layout = tiny.description.layout(BF16, 0)
    assert layout == tiny.description.layout(BF16)
    held = {t.name for t in layout.seat.tensors if t.num_bytes}
    assert held == ({"tail"} if tiny.kind.startswith("glm") else set())


def tails(layout: ModelLayout) -> set[int]:
    """Tokens that a seat's tails hold."""
    return {t.shape[0] for t in layout.seat.tensors if t.name == "tail"}
