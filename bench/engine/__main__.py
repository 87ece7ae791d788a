"""The engine on workloads A to G and I, offline: token ids in, token ids out, random weights.

python -m bench.engine [--model q4] [--workloads A,B,C,D] [--out out/engine.jsonl] [--trials 3]
    [--variants PATTERN] [--scale 1] [--shrink 1] [--limit 60] [--seconds 600] [--brief]
    [--profile [PATTERN]] [--device auto]

Every repetition is appended to --out as it ends, so that a run cut short still counts;
`python -m bench.report FILE` makes a table and a plot of it. Variants of a workload take turns.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from bench.engine.models import CONFIGS
from bench.engine.tower import Need, build, give_back
from bench.engine.trials import Lines, Lost, Trials
from bench.engine.workloads import WORKLOADS, Scale, Variant, groups
from bench.header import header

Pairs = list[tuple[Variant, Variant]]


def scales_of(work: str, prompt: str, letters: Iterable[str]) -> dict[str, Scale]:
    """How much smaller each workload is. `ValueError` for what is neither N nor LETTER=N.

    A number is for all, `LETTER=number` for one of them: `0.5,I=0.0625`.
    """

    def numbers(text: str) -> dict[str, float]:
        parts = [part.rpartition("=") for part in text.split(",")]
        return {letter.strip(): float(number) for letter, _, number in parts}

    works, prompts = numbers(work), numbers(prompt)
    return {
        letter: Scale(*(given.get(letter, given.get("", 1.0)) for given in (works, prompts)))
        for letter in letters
    }


def chosen(scales: Mapping[str, Scale]) -> Iterator[tuple[Variant, Variant]]:
    """Every variant with what warms it up: a quarter of the work."""
    for letter, scale in scales.items():
        small = Scale(scale.work / 4, scale.prompt)
        yield from zip(WORKLOADS[letter](scale), WORKLOADS[letter](small), strict=True)


def serve(need: Need, pairs: Pairs, given: argparse.Namespace, trials: Trials) -> None:
    """One tower, and all its workloads. Raises `Lost`."""
    forced = any(one.chance is not None for one, _ in pairs)
    tower = build(given.model, need, device=given.device, forced=forced)
    known = header() | ({"commit": given.commit} if given.commit else {})
    trials.lines.add("tower", **known, forced=forced, **tower.facts)
    facts = (f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in tower.facts.items())
    print("tower: " + ", ".join(facts), flush=True)
    for letter in dict.fromkeys(one.workload for one, _ in pairs):
        mine = [pair for pair in pairs if pair[0].workload == letter]
        trials.guarded(letter, partial(trials.workload, tower, mine))
    trials.by_kernel(tower, [one for one, _ in pairs])


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
    parser.add_argument("--variants", default="", help="only those whose label has this pattern")
    parser.add_argument("--out", type=Path, default=Path("out/engine.jsonl"))
    parser.add_argument("--trials", type=int, default=3, help="beside the one to warm up")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a variant")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of all together")
    parser.add_argument("--brief", action="store_true", help="warm up the first variants alone")
    whole = "1" if large else "0.1"
    parser.add_argument(
        "--scale", default=whole, help="requests or answers, times it; 0.5,I=0.1 for one of them"
    )
    parser.add_argument("--shrink", default=whole, help="prompts, times it; likewise")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", help="for the record, where this is no git checkout")
    parser.add_argument(
        "--profile",
        nargs="?",
        const="",
        metavar="PATTERN",
        help="one more repetition of these variants (none named: of all): which kernels",
    )
    given = parser.parse_args(arguments)
    trials = Trials(
        Lines(given.out),
        given.trials,
        given.limit,
        until=time.perf_counter() + given.seconds,
        brief=given.brief,
        profiled=given.profile,
    )
    scales = scales_of(given.scale, given.shrink, given.workloads.split(","))
    trials.full = frozenset(letter for letter, scale in scales.items() if scale == Scale())
    wanted = re.compile(given.variants)
    pairs = [pair for pair in chosen(scales) if wanted.search(pair[0].label)]
    smaller = {id(one): small for one, small in pairs}
    try:
        for need, ones in groups([one for one, _ in pairs]):
            if trials.too_late:
                break
            mine = [(one, smaller[id(one)]) for one in ones]
            names = ",".join(dict.fromkeys(one.workload for one in ones))
            trials.guarded(names, partial(serve, need, mine, given, trials))
            give_back()
    except Lost as why:
        print(f"the device is lost: {why}")
    print(f"written to {given.out}; python -m bench.report {given.out}")
    return 1 if trials.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
