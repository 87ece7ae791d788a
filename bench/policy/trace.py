"""Prompts with arrival times, as chains of block ids: a public trace format, or made from a seed.

The format is that of the open Mooncake conversation traces: one JSON object a line with `timestamp`
(ms), `input_length` and `output_length` (tokens) and `hash_ids`, one id for each 512 tokens of the
prompt. Equal ids at the same place mean equal tokens, so a block never needs more tokens than one
page to be told apart. A replay gives every block `block_tokens` tokens, made from its id, and
scales all lengths alike; the results are scaled back.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

TRACE_BLOCK = 512
"""Tokens that one id of a trace stands for."""

VOCAB = 1 << 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a trace. `arrival` in seconds, lengths in tokens."""

    arrival: float
    length: int
    answer: int
    blocks: tuple[int, ...]

    def tokens(self, block_tokens: int) -> tuple[int, ...]:
        """Its tokens at `block_tokens` tokens a block: at least one."""
        length = max(1, -(-self.length * block_tokens // TRACE_BLOCK))
        whole = tuple(chain.from_iterable(block(one, block_tokens) for one in self.blocks))
        return whole[:length]

    def answer_tokens(self, block_tokens: int) -> int:
        """Tokens to generate at the same scale: at least one."""
        return max(1, self.answer * block_tokens // TRACE_BLOCK)


def block(number: int, size: int) -> tuple[int, ...]:
    """The tokens of a block: its number in two of them, and the same rest for all."""
    return (*divmod(number, VOCAB), *range(2, size))


def load(path: Path) -> list[Prompt]:
    """Read a trace; `ValueError` names the first line that is not of the format."""
    prompts = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            prompt = Prompt(
                arrival=row["timestamp"] / 1000,
                length=row["input_length"],
                answer=row["output_length"],
                blocks=tuple(row["hash_ids"]),
            )
            whole = -(-prompt.length // TRACE_BLOCK) == len(prompt.blocks) > 0
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}") from None
        if not whole:
            raise ValueError(
                f"{path}, line {number}: {len(prompt.blocks)} blocks for {prompt.length} tokens"
            )
        prompts.append(prompt)
    return prompts


def dump(prompts: Iterable[Prompt]) -> str:
    """The same format, for `load`."""
    rows = (
        {
            "timestamp": round(prompt.arrival * 1000),
            "input_length": prompt.length,
            "output_length": prompt.answer,
            "hash_ids": list(prompt.blocks),
        }
        for prompt in prompts
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


def synthesize(
    seed: int,
    requests: int,
    *,
    per_second: float = 4.0,
    conversations: int = 60,
    agents: int = 4,
    noise: float = 0.3,
) -> list[Prompt]:
    """Conversations that grow turn by turn, agents on shared system prompts, one-shot noise.

    A `noise` part of the prompts shares nothing with any other; a quarter are agents, whose long
    system prompts are shared and whose tasks are not, the first agent being the busiest. The rest
    are turns of about `conversations` open ones, the most recent likely to go on; each ends after
    some turns. Arrivals are a Poisson process.
    """
    rng = random.Random(seed)
    ids = iter(range(requests * 100))

    def fresh(count: int) -> list[int]:
        return [next(ids) for _ in range(count)]

    systems = [fresh(rng.randint(8, 24)) for _ in range(agents)]
    turns = _turns(rng, fresh, conversations)
    prompts, arrival = [], 0.0
    for _ in range(requests):
        arrival += rng.expovariate(per_second)
        draw = rng.random()
        if draw < noise:
            blocks = fresh(rng.randint(1, 40))
        elif draw < noise + 0.25:
            which = min(int(rng.expovariate(1.0)), agents - 1)
            blocks = systems[which] + fresh(rng.randint(1, 6))
        else:
            blocks = next(turns)
        length = len(blocks) * TRACE_BLOCK - rng.randrange(TRACE_BLOCK)
        prompts.append(Prompt(arrival, length, rng.randint(16, 400), tuple(blocks)))
    return prompts


def _turns(
    rng: random.Random, fresh: Callable[[int], list[int]], conversations: int
) -> Iterator[list[int]]:
    """Prompts of conversations, for ever: each turn repeats the one before and adds to it.

    The last block of a turn is not full, so the next turn replaces it.
    """
    open_ones: list[list[int]] = []  # the most recent first
    while True:
        if len(open_ones) < conversations:
            blocks = fresh(rng.randint(2, 6))
        else:
            blocks = open_ones.pop(min(int(rng.expovariate(4 / conversations)), conversations - 1))
            blocks = blocks[:-1] + fresh(rng.randint(2, 5))
        yield blocks
        if rng.random() > 0.15:
            open_ones.insert(0, blocks)
