"""The engine on workloads A to G and I, offline: token ids in, token ids out, random weights.

python -m bench.engine [--model q4] [--workloads A,B,C,D] [--out out/engine.jsonl] [--trials 3]
    [--scale 1] [--limit 60] [--profile] [--device auto]

Every repetition is appended to --out as it ends, so that a run cut short still counts;
`python -m bench.report FILE` makes a table and a plot of it. Variants of a workload take turns.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from bench.engine.models import CONFIGS
from bench.engine.tower import Need, build
from bench.engine.trials import Lines, Lost, Trials
from bench.engine.workloads import WORKLOADS, Scale, Variant, groups
from bench.header import header

Pairs = list[tuple[Variant, Variant]]


def chosen(letters: list[str], scale: Scale) -> Iterator[tuple[Variant, Variant]]:
    """Every variant with what warms it up: a quarter of the work."""
    small = Scale(scale.work / 4, scale.prompt)
    for letter in letters:
        yield from zip(WORKLOADS[letter](scale), WORKLOADS[letter](small), strict=True)


def serve(need: Need, pairs: Pairs, given: argparse.Namespace, trials: Trials) -> None:
    """One tower, and all its workloads. Raises `Lost`."""
    forced = any(one.chance is not None for one, _ in pairs)
    tower = build(given.model, need, device=given.device, forced=forced)
    known = header() | ({"commit": given.commit} if given.commit else {})
    full = given.scale == given.shrink == 1.0
    trials.lines.add("tower", **known, full=full, forced=forced, **tower.facts)
    facts = (f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in tower.facts.items())
    print("tower: " + ", ".join(facts), flush=True)
    for letter in dict.fromkeys(one.workload for one, _ in pairs):
        mine = [pair for pair in pairs if pair[0].workload == letter]
        trials.guarded(letter, partial(trials.workload, tower, mine))


def main(arguments: list[str]) -> int:
    """Exit 1 when a workload failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    large = torch.cuda.is_available()
    parser.add_argument(
        "--model",
        default="q4" if large else "tiny-q4",
        help=f"{', '.join(CONFIGS)}; or a directory. Without a GPU all is tiny",
    )
    parser.add_argument("--workloads", default="A,B,C,D", help=f"of {','.join(WORKLOADS)}")
    parser.add_argument("--variants", default="", help="only those whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("out/engine.jsonl"))
    parser.add_argument("--trials", type=int, default=3, help="beside the one to warm up")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a variant")
    whole = 1.0 if large else 0.1
    parser.add_argument("--scale", type=float, default=whole, help="requests or answers, times it")
    parser.add_argument("--shrink", type=float, default=whole, help="prompts, times it")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", help="for the record, where this is no git checkout")
    parser.add_argument("--profile", action="store_true", help="one more trial: which kernels")
    given = parser.parse_args(arguments)
    trials = Trials(Lines(given.out), given.trials, given.limit, given.profile)
    scale = Scale(given.scale, given.shrink)
    pairs = [p for p in chosen(given.workloads.split(","), scale) if given.variants in p[0].name]
    smaller = {id(one): small for one, small in pairs}
    try:
        for need, ones in groups([one for one, _ in pairs]):
            mine = [(one, smaller[id(one)]) for one in ones]
            names = ",".join(dict.fromkeys(one.workload for one in ones))
            trials.guarded(names, partial(serve, need, mine, given, trials))
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    except Lost as why:
        print(f"the device is lost: {why}")
    print(f"written to {given.out}; python -m bench.report {given.out}")
    return 1 if trials.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
