"""What checkpoints cost: no forward, no product, no byte beyond what the forward writes anyway."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.exactness.engines import Ask, House, Served, serve
from tests.exactness.families import FAMILIES
from tests.exactness.prompts import BASE, GREEDY, TWO
from tests.support.recording import Truth

PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
}


class CountProducts(TorchDispatchMode):
    """Counts matrix products, whoever asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func in PRODUCTS
        return func(*args, **(kwargs or {}))


def cost(family: str, mode: str) -> tuple[Served, int]:
    """A prompt of 330 tokens in one forward, then decoding: what was served, and its products."""
    house = House(
        settings={
            "checkpoint_mode": mode,
            "checkpoint_interval": 64,
            "max_prefill_tokens": 512,
            "checkpoint_budget": 8,
        }
    )
    with CountProducts() as products:
        served = serve(family, house, [Ask(BASE, GREEDY)], Truth(), mode)
    return served, products.count


@pytest.mark.parametrize("family", FAMILIES)
def test_five_anchors_cost_no_forward_and_no_product(family: str) -> None:
    without, products_without = cost(family, "off")
    with_five, products_with_five = cost(family, "interior")
    assert without.executor.num_exports == 0
    assert with_five.executor.num_exports == 5
    assert sum(with_five.stats.checkpoints_published.values()) == 5
    assert len(with_five.executor.plans) == len(without.executor.plans) == GREEDY.max_tokens
    assert products_with_five == products_without > 0
    assert with_five.texts == without.texts


@pytest.mark.parametrize("family", FAMILIES)
def test_split_mode_pays_a_forward_for_every_anchor_but_the_grid_is_the_same(family: str) -> None:
    interior, _ = cost(family, "interior")
    split, _ = cost(family, "split")
    assert len(split.executor.plans) == len(interior.executor.plans) + 5
    assert split.texts == interior.texts


@pytest.mark.parametrize("family", FAMILIES)
def test_publish_resume_and_fan_out_write_no_byte_of_a_slot(family: str) -> None:
    # Every test here compares each step's writes with its rows and exports, and looks for writes
    # between steps; this one has all of publishing, resuming and fanning out, and counts.
    asks = [Ask(BASE[:200], TWO), Ask(BASE[:200], TWO, arrives=3), Ask(BASE, GREEDY, arrives=6)]
    served = serve(
        family,
        House(count_writes=True, settings={"checkpoint_interval": 64, "max_prefill_tokens": 512}),
        asks,
        Truth(),
        "bytes",
    )
    assert served.cached == [0, 192, 192]
    assert sum(served.stats.checkpoints_published.values()) >= 5
    served.executor.look_between_steps()
    assert served.executor.bytes_beyond == []
    rows = [r for plan in served.executor.plans for r in plan.prefill + plan.decode]
    slot_bytes = sum(t.num_bytes for t in served.executor.arenas.slots.spec.tensors)
    outputs = len(rows) + served.executor.num_exports
    assert served.executor.slot_bytes_written == outputs * slot_bytes
