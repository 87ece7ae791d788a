"""How often two ways to run a bundled model say the same, and where they first do not.

python -m tests.gpu.agreement [--device cuda] [--model NAME] [--cases N] [--seconds LIMIT]

One line a comparison, each model in fp32 and bf16: replies that are equal token by token, the
places of the first different tokens, the largest difference of a log probability before them. Every
state that a step leaves, exports among them, is looked at: a last line says how many were finite.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from millpond.config import PytorchEngineConfig, SpeculativeConfig
from millpond.evaluate import Case, Dialect, Mode, compare, run
from millpond.evaluate.running import Outcome, Ran
from millpond.front.directory import BUNDLED
from tests.gpu.finite import States, states_looked_at

MODELS = ("millpond-tiny-glm", "millpond-tiny-qwen")
TASKS = ("ledger", "recall", "copy", "arithmetic", "speech", "tools")
DTYPES = ("float32", "bfloat16")
SHOWN = 12
"""First differences that a line shows at most."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """`places`: of every pair of replies that differ, the first token that does."""

    total: int
    places: tuple[int, ...]
    drift: float

    @property
    def equal(self) -> int:
        """Pairs that are equal token by token."""
        return self.total - len(self.places)

    def __str__(self) -> str:
        said = f"{self.equal} of {self.total} equal, drift {self.drift:.1e}"
        if self.places:
            more = " ..." if len(self.places) > SHOWN else ""
            said += f", first apart at {' '.join(map(str, self.places[:SHOWN]))}{more}"
        return said


def agreement(one: Ran, two: Ran) -> Agreement:
    """Of two runs of the same cases. Raises `ValueError` if a request failed."""
    pairs = [
        pair
        for task in one.outcomes
        for pair in zip(one.outcomes[task], two.outcomes[task], strict=True)
    ]
    failed = [o.error for pair in pairs for o in pair if o.error is not None]
    if failed:
        raise ValueError(f"{len(failed)} requests failed, the first: {failed[0]}")
    places = sorted(first_apart(a, b) for a, b in pairs if a.tokens != b.tokens)
    return Agreement(len(pairs), tuple(places), max(compare(a, b)[0] for a, b in pairs))


def first_apart(one: Outcome, two: Outcome) -> int:
    """The index of the first token that differs; where one reply only goes on, its end."""
    for index, (a, b) in enumerate(zip(one.tokens, two.tokens, strict=False)):
        if a != b:
            return index
    return min(len(one.tokens), len(two.tokens))


def mode(device: str, dtype: str, *, drafts: int = 0, warm: bool = False, **changed: Any) -> Mode:
    """Cold and without drafts, 64 requests at once, unless it says otherwise."""
    given = dict(
        device=device, dtype=dtype, max_batch_size=64, session_len=1024, num_kv_pages=1100,
        num_state_slots=400, enable_prefix_caching=warm, debug_poison=True,
    )  # fmt: skip
    if warm:
        given |= dict(checkpoint_interval=64, prefix_cache_state_budget=256)
    speculative = SpeculativeConfig(num_speculative_tokens=drafts) if drafts else None
    return Mode(PytorchEngineConfig(**{**given, **changed}), speculative)


def comparisons(device: str, dtype: str) -> Iterator[tuple[str, Mode, Mode]]:
    """What is compared with what: a name, and the two ways."""
    make = partial(mode, device, dtype)
    plain, warm = make(), make(warm=True)
    yield "cold / warm", plain, warm
    yield "interior / split", warm, make(warm=True, checkpoint_mode="split")
    yield "no drafts / 3 drafts", plain, make(drafts=3)
    if device != "cpu":
        yield f"{device} / CPU", plain, mode("cpu", dtype)
        yield f"{device} in {dtype} / CPU in float32", plain, mode("cpu", "float32")
    yield "64 at once / one by one", plain, make(max_batch_size=1)
    yield "3 drafts cold / warm", make(drafts=3), make(drafts=3, warm=True)
    for drafts in (1, 5):
        yield f"no drafts / {drafts} drafts", plain, make(drafts=drafts)


def cases_of(model: str, count: int) -> list[Case]:
    """`count` held-out dialogues of each task."""
    dialect = Dialect(BUNDLED / model)
    return [dialect.case(task, seed) for task in TASKS for seed in range(count)]


def report(
    model: str,
    device: str,
    dtype: str,
    cases: list[Case],
    say: Callable[[str], None],
    until: float = float("inf"),
) -> tuple[dict[str, Agreement], States]:
    """Run all comparisons that begin before `until` (`time.monotonic`), a line each."""
    done: dict[str, Ran] = {}
    found: dict[str, Agreement] = {}
    with states_looked_at() as states:
        for name, *ways in comparisons(device, dtype):
            if time.monotonic() > until:
                say(f"{model} {dtype}: {name}: no time left")
                continue
            for way in ways:
                key = repr(way)
                if key not in done:
                    done[key] = run(BUNDLED / model, way, cases)
            one, two = (done[repr(way)] for way in ways)
            found[name] = agreement(one, two)
            say(f"{model} {dtype}: {name}: {found[name]}")
    broken = "all finite" if not states.broken else f"NOT FINITE: {states.broken[:3]}"
    say(f"{model} {dtype}: {states.count} states, {states.exports} of them exports, {broken}")
    return found, states


def main(argv: list[str]) -> int:
    """Print the lines of all models asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--cases", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    asked = parser.parse_args(argv)
    until = time.monotonic() + asked.seconds
    for model in asked.model or MODELS:
        cases = cases_of(model, asked.cases)
        for dtype in asked.dtype or DTYPES:
            report(model, asked.device, dtype, cases, partial(print, flush=True), until)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
