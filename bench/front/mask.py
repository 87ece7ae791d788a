"""Host time of masks: compiling a constraint, filling one row's mask, advancing a matcher.

    python bench/front/mask.py [--tokenizer TOKENIZER.JSON ...] [--rows 32] [--answers 20]

Without --tokenizer: that of the bundled model (2,048 tokens). Any byte-level tokenizer.json will
do, a large one says what a large model pays. Answers are random walks through what is allowed; a
mask is filled in the engine's own way, alone and for a batch of rows that share the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import millpond
from millpond.engine.constraint import Constraint
from millpond.engine.grammar import Grammar, Grammars
from millpond.engine.guidance import Guidance
from millpond.engine.guide import Guide
from millpond.plan.sampling import SamplingParams

BUNDLED = Path(millpond.__file__).parent / "bundled" / "millpond-tiny-glm" / "tokenizer.json"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "json object": Constraint(kind="json_object"),
    "json schema": Constraint(kind="json_schema", text=json.dumps(SCHEMA)),
    "regex": Constraint(kind="regex", text=r"[A-Z][a-z]{2,12}( [A-Z][a-z]{2,12}){1,3}, \d{4}"),
    "choice": Constraint(kind="choice", text='["yes", "no", "I do not know"]'),
}
MAX_TOKENS = 60


class Row:
    """As much of a running sample as filling its mask takes."""

    def __init__(self, guide: Guide, seat: int) -> None:
        self.guide, self.seat = guide, seat
        self.finish_reason = None


def new_guide(grammar: Grammar, vocab_size: int) -> Guide:
    return Guide(grammar, None, SamplingParams(max_tokens=MAX_TOKENS), (), vocab_size)


def step(guide: Guide, rng: random.Random) -> float:
    """Draw any allowed token; the seconds that advancing took."""
    place = guide.places[0]
    if place is None:
        raise SystemExit("a guide of a grammar allows all tokens")
    bits = np.unpackbits(np.frombuffer(place, np.uint8), bitorder="little")
    token = int(rng.choice(np.flatnonzero(bits)))
    begin = time.perf_counter()
    guide.advance(token)
    return time.perf_counter() - begin


def measure_rows(
    grammar: Grammar, vocab_size: int, answers: int
) -> tuple[list[float], list[float]]:
    """Seconds to fill the mask of one row, and to advance it by a token."""
    rng, fills, steps = random.Random(0), [], []
    for _ in range(answers):
        guide = new_guide(grammar, vocab_size)
        for _ in range(MAX_TOKENS):
            steps.append(step(guide, rng))
            if guide.complete:
                break
            begin = time.perf_counter()
            guide.fill()
            fills.append(time.perf_counter() - begin)
    return fills, steps


def measure_batch(grammar: Grammar, vocab_size: int, rows: int) -> list[float]:
    """Seconds from a commit until the masks of all rows are there, per row."""
    guidance, rng, found = Guidance(None, (), vocab_size), random.Random(1), []
    running = [Row(new_guide(grammar, vocab_size), seat) for seat in range(rows)]
    guidance._guided += running  # type: ignore[arg-type]
    for _ in range(MAX_TOKENS):
        for row in running:
            step(row.guide, rng)
            if row.guide.complete:
                row.guide = new_guide(grammar, vocab_size)
        begin = time.perf_counter()
        guidance.begin(())
        while guidance.wait_for_one():
            pass
        found.append((time.perf_counter() - begin) / rows)
    guidance.close()
    return found


def micro(seconds: Sequence[float]) -> str:
    ranked = sorted(seconds)
    median, late = statistics.median(ranked), ranked[int(0.99 * (len(ranked) - 1))]
    return f"{1e6 * median:8.0f} {1e6 * late:8.0f}"


def main() -> None:
    """Print a table per tokenizer: microseconds, the median and the 99th percentile."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--tokenizer", type=Path, nargs="*", default=[BUNDLED])
    options.add_argument("--rows", type=int, default=32)
    options.add_argument("--answers", type=int, default=20)
    given = options.parse_args()
    for path in given.tokenizer:
        vocab_size = Tokenizer.from_file(str(path)).get_vocab_size(with_added_tokens=True)
        grammars = Grammars(path, vocab_size)
        begin = time.perf_counter()
        grammars.prepare(Constraint(kind="choice", text='["warm"]')).result()
        load = time.perf_counter() - begin
        print(f"{vocab_size:,} tokens ({path.parent.name}); loading them {load:.2f} s")
        head = f"{'':12} {'compile ms':>10} {'one row':>17} {f'each of {given.rows}':>17}"
        print(f"{head} {'advance':>17}   (us: median, 99 %)")
        for name, constraint in CONSTRAINTS.items():
            begin = time.perf_counter()
            grammar = grammars.prepare(constraint).result()
            compiled = 1e3 * (time.perf_counter() - begin)
            fills, steps = measure_rows(grammar, vocab_size, given.answers)
            batch = measure_batch(grammar, vocab_size, given.rows)
            print(f"{name:12} {compiled:10.1f} {micro(fills)} {micro(batch)} {micro(steps)}")
        grammars.close()


if __name__ == "__main__":
    main()
