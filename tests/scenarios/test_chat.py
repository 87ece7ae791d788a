"""Chat as it is, turn by turn: how many tokens of each prompt are not computed again."""

from __future__ import annotations

import pytest

from tests.scenarios.talk import OPEN, Talk, Turn, kinds, together, tower, whole, words

SYSTEM = words(0, 300)


def test_a_plain_conversation_starts_each_turn_where_the_last_answer_ended():
    """Short answers and long ones: no further back than the last anchor before the new words."""
    talk = Talk(tower(), SYSTEM)
    before = 0
    for number, answer in enumerate((30, 200, 1, 64, 65, 500)):
        cached = talk.say(words(number + 1, 40), answer)
        assert cached == whole(before)
        # All but the last token of an answer is folded.
        before = len(talk.prompt()) - len(OPEN) - 1
    assert set(kinds(talk.tower)) <= {"decode", "prompt_end"}


def test_without_anchors_in_answers_a_turn_starts_at_the_end_of_the_last_prompt():
    talk = Talk(tower(decode_checkpoint_interval=0), SYSTEM)
    before = 0
    for number in range(4):
        assert talk.say(words(number + 1, 40), 200) == whole(before)
        before = len(talk.prompt()) - 200 - len(OPEN)
    assert set(kinds(talk.tower)) == {"prompt_end"}


def test_a_template_that_drops_thoughts_costs_the_last_turn_and_no_more():
    """The thought is gone, and the sign that opens it: the new prompt parts from the old there."""
    talk = Talk(tower(), SYSTEM, drops_thoughts=True)
    assert talk.say(words(1, 40), 150, thought=100) == 0
    for number in range(2, 7):
        parted = len(talk.prompt()) - len(OPEN) - 150 - 1
        cached = talk.say(words(number, 70), 150, thought=100)
        assert parted - 64 - len(OPEN) < cached <= parted


def test_where_the_last_anchor_lies_in_what_a_template_drops_the_one_before_serves():
    """A prompt that ends one token behind an anchor, with the sign that opens a thought."""
    talk = Talk(tower(checkpoint_interval=0), SYSTEM, drops_thoughts=True)
    assert talk.say(words(1, 18), 90, thought=80) == 0, "320 tokens in all"
    assert len(SYSTEM) + 18 + len(OPEN) == 320
    assert talk.say(words(2, 40), 90, thought=80) == 256, "319 are alike"


def test_a_tool_loop_keeps_its_thoughts_until_the_user_speaks_again():
    talk = Talk(tower(), SYSTEM, drops_thoughts=True)
    talk.say(words(1, 40), 100, thought=60)
    start = len(talk.prompt()) - len(OPEN) - 100
    for number in range(2, 8):
        before = len(talk.prompt()) - len(OPEN) - 1
        assert talk.say(words(number, 90), 100, thought=60, tool=True) == whole(before)
    cached = talk.say(words(8, 40), 100, thought=60)
    assert whole(start - len(OPEN)) <= cached <= start, "all thoughts of the loop are gone"


def test_an_edited_last_turn_starts_behind_the_turn_before_it():
    talk = Talk(tower(), SYSTEM)
    talk.say(words(1, 200), 100)
    before = len(talk.prompt()) - len(OPEN) - 1
    assert talk.say(words(2, 200), 20) == whole(before)
    kept = words(2, 130)
    assert talk.edit(kept + words(3, 70), 20) == whole(before)
    parted = len(talk.prompt()) - len(OPEN) - 20 - 70
    for number in range(4, 7):
        assert talk.edit(kept + words(number, 70), 20) == whole(parted)
    assert kinds(talk.tower)["branch_seen"] == 3


def test_the_same_turn_again_computes_less_than_a_page_and_its_answer():
    talk = Talk(tower(), SYSTEM)
    talk.say(words(1, 100), 80)
    for seed in range(1, 4):
        assert talk.again(80, seed) == whole(len(SYSTEM) + 100 + len(OPEN) - 1)
    assert kinds(talk.tower) == {"prompt_end": 3}


@pytest.mark.parametrize("mode", ["interior", "split"])
def test_agents_that_start_together_compute_their_common_beginning_once(mode):
    """Eight at once on one system prompt, each with a loop of its own."""
    house = tower(checkpoint_mode=mode)
    agents = [Talk(house, SYSTEM) for _ in range(8)]
    for number, agent in enumerate(agents):
        agent.turns.append(Turn(words(100 + number, 50)))
        agent.by_tool.append(False)
    assert together(agents, 70) == [0] + [whole(len(SYSTEM))] * 7
    for step in range(3):
        before = [len(agent.prompt()) - len(OPEN) - 1 for agent in agents]
        for number, agent in enumerate(agents):
            agent.turns.append(Turn(words(1000 + 10 * step + number, 60)))
            agent.by_tool.append(True)
        assert together(agents, 70) == [whole(end) for end in before]


def test_agents_that_start_one_after_another_pay_for_their_common_beginning_twice():
    house = tower(checkpoint_interval=0)
    cached = [Talk(house, SYSTEM).say(words(number, 50), 5) for number in range(5)]
    assert cached == [0, 0, *[whole(len(SYSTEM))] * 3]


def test_a_fork_of_a_conversation_starts_where_it_was_forked():
    """Two go on from one history, at once and later."""
    house = tower()
    talk = Talk(house, SYSTEM)
    talk.say(words(1, 40), 100)
    end = len(talk.prompt()) - len(OPEN) - 1
    forks = [Talk(house, SYSTEM, turns=list(talk.turns), by_tool=[False]) for _ in range(3)]
    for number, fork in enumerate(forks):
        fork.turns.append(Turn(words(10 + number, 40)))
        fork.by_tool.append(False)
    assert together(forks, 10) == [whole(end)] * 3
