"""Conversations as a client holds them: every turn sends all of it, as a template shows it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.towers import Tower, collect

OPEN = [48, 49]  # how a template ends a prompt: the answer begins here, with a thought
PAGE = 64


def words(number: int, length: int) -> list[int]:
    """Some text, told apart by its number."""
    return random.Random(number).choices(range(48), k=length)


def whole(tokens: int) -> int:
    """As far as whole pages go."""
    return tokens // PAGE * PAGE


def tower(**numbers: int | str) -> Tower:
    """An engine with room for everything, so that what is found depends on what was kept."""
    return Tower(
        **{
            "num_slots": 80,
            "num_pages": 400,
            "max_batch_size": 16,
            "num_seats": 16,
            "max_prefill_tokens": 4096,
            "checkpoint_budget": 60,
            "decode_checkpoint_interval": 64,
            **numbers,
        }
    )


@dataclass
class Turn:
    """What was said; `thought` tokens of `made` are the thought, the rest is the answer."""

    said: list[int]
    made: list[int] = field(default_factory=list)
    thought: int = 0


@dataclass
class Talk:
    """One conversation with an engine.

    With `drops_thoughts` the template shows thoughts of the turns after the last user message only,
    as those of reasoning models do; `by_tool` turns continue the turn of a user.
    """

    tower: Tower
    system: Sequence[int]
    drops_thoughts: bool = False
    turns: list[Turn] = field(default_factory=list)
    by_tool: list[bool] = field(default_factory=list)

    def prompt(self) -> list[int]:
        """The history, and the beginning of an answer."""
        last_user = max((i for i, tool in enumerate(self.by_tool) if not tool), default=0)
        shown = list(self.system)
        for index, turn in enumerate(self.turns):
            shown += turn.said
            if turn.made:
                keep = index >= last_user or not self.drops_thoughts
                shown += OPEN[:1] + OPEN[1:] * keep
                shown += turn.made if keep else turn.made[turn.thought :]
        return [*shown, *OPEN]

    def say(self, said: list[int], answer: int, thought: int = 0, *, tool: bool = False) -> int:
        """One more turn, answered with so many tokens; returns the cached tokens of its prompt."""
        self.turns.append(Turn(said, thought=thought))
        self.by_tool.append(tool)
        return self.again(answer)

    def again(self, answer: int, seed: int = 0) -> int:
        """The last turn once more."""
        self.turns[-1].made = []
        [cached] = together([self], answer, seed)
        return cached

    def edit(self, said: list[int], answer: int) -> int:
        """The last turn, put differently."""
        self.turns[-1] = Turn(said)
        return self.again(answer)


def together(talks: Sequence[Talk], answer: int, seed: int = 0) -> list[int]:
    """The last turns of all at once; the cached tokens of each."""
    house = talks[0].tower
    how = {"max_tokens": answer, "min_tokens": answer, "ignore_eos": True, "seed": seed}
    requests = [house.request(talk.prompt(), **how) for talk in talks]
    streams = [house.engine.submit(request) for request in requests]
    house.run()
    for talk, request, stream in zip(talks, requests, streams, strict=True):
        said = collect(stream, house.outcomes)
        assert said == house.naive(request), "a hit changed an answer"
        talk.turns[-1].made = said[0][0]
    return [house.outcomes[request.request_id].cached_tokens for request in requests]


def kinds(house: Tower) -> dict[str, int]:
    """Which anchors were hit."""
    return house.engine.stats().prefix_hits
