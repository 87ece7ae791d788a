"""Kind: what is billed is not what is allocated, or not what can ever be used."""

from __future__ import annotations

import random

import pytest
import torch

from millpond.config import ModelFacts, PytorchEngineConfig, resolve
from millpond.memory.arena import Arenas
from millpond.memory.layout import EntrySpec, ModelLayout, TensorSpec
from millpond.units import GIB
from tests.faults.house import House, prompt
from tests.support.fake_model import fake_layout

ODD = ModelLayout(
    slot=EntrySpec(
        (
            TensorSpec(0, "recurrent", (3, 5, 7), torch.float32),
            TensorSpec(0, "conv", (11, 3), torch.bfloat16),
            TensorSpec(-1, "boundary_hidden", (13,), torch.bfloat16),
        )
    ),
    page=EntrySpec((TensorSpec(1, "latent", (64, 9), torch.bfloat16),)),
    seat=EntrySpec((TensorSpec(1, "tail", (4, 2, 5), torch.bfloat16),)),
)


@pytest.mark.parametrize("layout", [ODD, fake_layout()], ids=["odd", "fake"])
def test_bytes_billed_are_bytes_allocated(layout):
    """The plan that is printed at start, against the three allocations that follow from it."""
    facts = ModelFacts(
        name="odd",
        slot_bytes=layout.slot.num_bytes,
        page_bytes=layout.page.num_bytes,
        seat_bytes=layout.seat.num_bytes,
        weight_bytes=0,
        max_position=4_096,
    )
    config = PytorchEngineConfig(max_batch_size=5, prefix_cache_state_budget=7)
    resolved = resolve(config, facts, available=GIB)
    arenas = Arenas.allocate(
        layout,
        num_slots=resolved.num_slots,
        num_pages=resolved.num_pages,
        num_seats=resolved.num_seats,
        device=torch.device("cpu"),
    )
    assert arenas.num_bytes == resolved.cache_bytes <= resolved.cache_budget


def test_an_fp32_state_is_billed_as_fp32():
    in_fp32 = TensorSpec(0, "recurrent", (8, 16, 16), torch.float32)
    assert in_fp32.num_bytes == 8 * 16 * 16 * 4
    assert EntrySpec((in_fp32,)).num_bytes >= in_fp32.num_bytes


def test_a_page_holds_no_state_and_a_slot_no_keys():
    """Sizes are independent: more recurrent state changes no page, longer pages no slot."""
    tall = ModelLayout(
        slot=EntrySpec((*ODD.slot.tensors, TensorSpec(2, "recurrent", (99, 9), torch.float32))),
        page=ODD.page,
        seat=ODD.seat,
    )
    few = {"available": GIB, "device": "cpu"}
    config = PytorchEngineConfig(max_batch_size=2, prefix_cache_state_budget=2, num_kv_pages=64)
    plans = [
        resolve(
            config,
            ModelFacts("m", m.slot.num_bytes, m.page.num_bytes, m.seat.num_bytes, 0, 4_096),
            **few,
        )
        for m in (ODD, tall)
    ]
    assert plans[0].num_pages == plans[1].num_pages == 64
    assert plans[0].prefill_save_alignment == plans[1].prefill_save_alignment == 64


def test_a_request_that_publishes_nothing_holds_one_slot():
    """Short prompts never reach an anchor; whatever their length they run in one slot each."""
    house = House(slots=8, seats=4)
    asks = [house.ask(prompt(10 + n, n), 40) for n in range(4)]
    most = 0
    while house.engine.step():
        stats = house.engine.stats()
        most = max(most, stats.slots_total - stats.slots_free)
    for ask in asks:
        assert ask.is_right
    assert most == 4


@pytest.mark.parametrize("budget", [1, 2, 5])
def test_a_long_prompt_takes_no_more_checkpoints_than_the_budget(budget):
    """Nor do several, one after the other, although slots are free."""
    house = House(slots=20, checkpoint_budget=budget, checkpoint_interval=64)
    prompts = [prompt(3_000 + 10 * n, n) for n in range(3)]
    most = 0
    for tokens in prompts:
        ask = house.ask(tokens)
        while house.engine.step():
            most = max(most, house.engine.stats().slots_checkpoint)
        assert ask.is_right
    assert most == budget
    again = house.served(prompts[-1])
    assert again.cached == 3_008  # the newest prompt's end is the last to go
    assert again.is_right


@pytest.mark.parametrize("seed", range(4))
def test_after_any_traffic_everything_is_free_or_a_checkpoint(seed):
    draw = random.Random(seed)
    house = House(slots=draw.randrange(4, 9), pages=48, seats=3, budget=192)
    asks = []
    for n in range(30):
        stem = prompt(draw.randrange(0, 400), draw.randrange(3))
        samples = draw.choice([1, 1, 1, 2, 3])
        asks.append(
            house.ask(stem + prompt(draw.randrange(1, 90), n), draw.randrange(1, 9), n=samples)
        )
        for _ in range(draw.randrange(6)):
            house.engine.step()
        if draw.random() < 0.2:
            draw.choice(asks).stream.abort()
    house.run(*asks)
    assert all(ask.is_right or "abort" in ask.finish for ask in asks)
    house.assert_nothing_is_held()
