"""Kind: what the engine tells its user cannot distinguish two different things."""

from __future__ import annotations

from tests.faults.house import House, prompt


def test_every_way_to_miss_has_a_name_of_its_own():
    """Each outcome is brought about once, and nothing else explains it."""
    aligned = House(prefill_save_alignment=256)
    assert aligned.served(prompt(200)).reason == "too_short"
    assert aligned.served(prompt(700)).reason == "never_seen"
    assert aligned.served(prompt(700)).reason == "hit"
    # shares three pages with the one before, and the first anchor lies behind the fourth
    parted = prompt(200) + prompt(500, 8)
    assert aligned.served(parted).reason == "alignment"

    house = House(checkpoint_budget=1)
    long, other = prompt(700), prompt(500, 4)
    house.served(long)
    branch = prompt(320) + prompt(300, 5)
    assert house.served(branch).reason == "no_checkpoint"
    house.served(other)  # the one slot for checkpoints goes to this one
    assert house.served(long).reason == "evicted"
    assert house.served(long, prompt_logprobs=0).reason == "needs_prompt_logits"
    assert House(prefix_caching=False).served(long).reason == "disabled"


def test_outcomes_are_counted_in_tokens():
    house = House()
    first = house.served(prompt(500))
    again = house.served(prompt(500))
    assert (first.cached, again.cached) == (0, 448)
    counted = house.engine.stats().prefix_tokens
    assert counted == {"never_seen": 500, "hit": 448}
    assert house.engine.stats().prompt_tokens == 1_000
