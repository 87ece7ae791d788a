"""Kind: a prefix that could be reused is not, or is reused to another length than it is worth."""

from __future__ import annotations

import pytest

from tests.faults.house import House, prompt
from tests.support.fake_model import checksum


@pytest.mark.parametrize("mode", ["interior", "split"])
def test_a_checkpoint_is_filed_under_the_number_of_tokens_folded_into_it(mode):
    """Every checkpoint holds the bytes of its own first `end` tokens, whatever chunks made it."""
    house = House(slots=40, budget=320, checkpoint_mode=mode, checkpoint_interval=128)
    prompts = [prompt(length, length) for length in (64, 129, 700, 1_000)]
    house.run(*[house.ask(tokens) for tokens in prompts])
    ends = []
    for tokens in prompts:
        match = house.ledger.index.match(tokens, house.ledger.salt(""), len(tokens))
        ends.append(match.end)
    assert ends == [64, 128, 640, 960]
    states = house.arenas.slots.view(0, "recurrent")
    sums = {
        end: {checksum(list(tokens[:end])) for tokens in prompts if len(tokens) >= end}
        for end in range(64, 1_024, 64)
    }
    checked = 0
    for checkpoint in house.ledger.index.checkpoints():
        assert int(states[checkpoint.lease.slot].item()) in sums[checkpoint.end]
        checked += 1
    assert checked >= 4


def test_the_second_turn_of_a_conversation_starts_from_the_end_of_the_first_prompt():
    house = House()
    first = house.served(prompt(500), 30)
    turn = (*first.spec.tokens, *first.tokens[0], *prompt(40, 5))
    second = house.served(turn, 10)
    assert second.cached == 448  # the last page boundary of the first prompt
    assert second.is_right
    third = house.served((*turn, *second.tokens[0], *prompt(40, 6)), 10)
    assert third.cached == (len(turn) - 1) // 64 * 64
    assert third.is_right


@pytest.mark.parametrize("shared", [64, 100, 192, 255, 256, 257])
def test_two_prompts_that_part_inside_one_forward_do_not_disturb_each_other(shared):
    house = House(slots=20, budget=2_048)
    common = prompt(shared)
    asks = [house.ask(common + prompt(200 + 30 * n, 50 + n), 6) for n in range(3)]
    house.run(*asks)
    assert all(ask.is_right for ask in asks)
    again = house.served(asks[1].spec.tokens, 6)
    assert again.cached == (len(again.spec.tokens) - 1) // 64 * 64
    assert again.is_right


def test_a_prefix_that_ends_in_the_middle_of_a_forward_can_be_hit():
    """One forward computes the whole first prompt; the second shares only its first half."""
    house = House(slots=20, budget=4_096, checkpoint_interval=128)
    common = prompt(320)
    first = house.served(common + prompt(400, 60))
    assert len(house.executor.rows(first.name)) == 3  # one of prompt, two of single tokens
    second = house.served(common + prompt(400, 61))
    assert second.cached == 256
    assert second.is_right


@pytest.mark.parametrize("mode", ["interior", "split"])
@pytest.mark.parametrize("together", [False, True])
def test_where_prompts_are_seen_to_part_a_state_is_kept(mode, together):
    """One after another the third hits there; of those that wait together, the second."""
    house = House(slots=20, checkpoint_mode=mode, checkpoint_interval=4_096)
    prompts = [prompt(320) + prompt(300, 70 + n) for n in range(3)]
    if together:
        asks = [house.ask(tokens) for tokens in prompts]
        house.run(*asks)
    else:
        asks = [house.served(tokens) for tokens in prompts]
    assert [ask.cached for ask in asks] == ([0, 320, 320] if together else [0, 0, 320])
    assert all(ask.is_right for ask in asks)


def test_a_match_leaves_one_token_to_compute():
    """A prompt that is a checkpoint to its last token still needs the logits of that token."""
    house = House()
    tokens = prompt(256)
    assert house.served(tokens).is_right
    again = house.served(tokens)
    assert again.cached == 192
    assert again.is_right


def test_a_longer_prompt_hits_to_the_very_end_of_a_prompt_on_the_grid():
    house = House()
    house.served(prompt(256))
    longer = house.served(prompt(300))
    assert longer.cached == 256
    assert longer.is_right
