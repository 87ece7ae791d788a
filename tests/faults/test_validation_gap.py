"""Kind: a claim was made from a run that could not have shown the opposite.

The tests of this folder trust that a damaged state or page shows. Here each is damaged on purpose.
"""

from __future__ import annotations

import pytest

from tests.faults.house import House, prompt
from tests.support.fake_model import ATTENTION_LAYER, LINEAR_LAYERS

LONG = prompt(700)


def warm() -> tuple[House, int, int]:
    """A house with one checkpoint, its slot, and the first of its pages."""
    house = House(budget=1_024)
    house.served(LONG)
    (checkpoint,) = house.ledger.index.checkpoints()
    match = house.ledger.index.match(LONG, house.ledger.salt(""), len(LONG) - 1)
    return house, checkpoint.lease.slot, match.pages[0].id


def test_an_undamaged_checkpoint_is_read_and_right():
    house, _, _ = warm()
    again = house.served(LONG)
    assert again.cached == 640
    assert again.is_right


@pytest.mark.parametrize("layer", LINEAR_LAYERS)
def test_a_damaged_state_changes_what_is_read(layer):
    """By the least there is: one token's worth in one layer."""
    house, slot, _ = warm()
    house.arenas.slots.view(layer, "recurrent")[slot] += 1
    assert not house.served(LONG).is_right


def test_a_state_of_another_prompt_changes_what_is_read():
    house, slot, _ = warm()
    other = House(budget=1_024)
    other.served(prompt(700, 1))
    (checkpoint,) = other.ledger.index.checkpoints()
    house.arenas.slots.storage[slot] = other.arenas.slots.storage[checkpoint.lease.slot]
    assert not house.served(LONG).is_right


def test_a_damaged_page_changes_what_is_read():
    house, _, page = warm()
    house.arenas.pages.view(ATTENTION_LAYER, "key")[page, 0, 63] += 1
    assert not house.served(LONG).is_right
