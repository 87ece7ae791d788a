"""Damages state or KV at a hand-off and prints the share of replies that stay right.

    python -m training.sensitivity --cases 40

Runs the engine's own worker on a model directory, on the CPU, in float32. The faults are those the
tests plant; `tests/support/sensitivity.py` says what they are and where they strike.
"""

import argparse
from pathlib import Path

from millpond.front.directory import locate
from tests.support.sensitivity import GATES, TASKS, markdown, measure


def main() -> int:
    """Print the table; 1 when a share is above its gate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--place", choices=("body", "value", "question", "reply"))
    args = parser.parse_args()
    table = measure(locate(args.model), args.tasks, args.cases, place=args.place)
    print(markdown(table, args.place))
    return int(any(table[name].get(task, 0.0) > limit for name, task, limit in GATES))


if __name__ == "__main__":
    raise SystemExit(main())
