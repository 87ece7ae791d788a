"""Which checkpoints to keep: eviction policies on a trace, through the real scheduler.

    python -m bench.policy [--trace FILE] [--slots 32 64 ...] [--out FOLDER]

Without a trace one is made from a seed: conversations, agents on shared system prompts, and noise.
No model runs and time is simulated, so the numbers are the same on every machine, but for the
requests per second of the replay itself.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import subprocess
from pathlib import Path

from bench.policy.replay import POLICIES, Replay, Scale
from bench.policy.report import table, write
from bench.policy.trace import load, synthesize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="JSON lines with hash_ids of 512-token blocks")
    parser.add_argument("--seed", type=int, default=1, help="of the trace that is made")
    parser.add_argument("--requests", type=int, default=4000, help="how many are made, or read")
    parser.add_argument("--slots", type=int, nargs="+", default=[32, 64, 128, 256, 512, 1024])
    parser.add_argument("--pages", type=int, help="KV pages; all that the trace needs if not given")
    parser.add_argument("--block-tokens", type=int, default=64, help="replayed for each 512")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    args = parser.parse_args()
    if args.trace is None:
        name = f"made from seed {args.seed}"
        prompts = synthesize(args.seed, args.requests)
    else:
        name = args.trace.name
        prompts = load(args.trace)[: args.requests]
    commit = _commit()  # now: the tree may move on while this runs
    replay = Replay(prompts, Scale(block_tokens=args.block_tokens, pages=args.pages))
    results = []
    for budget in args.slots:
        for policy in POLICIES:
            results.append(replay.run(policy, budget))
            print(table(results[-1:]).splitlines()[-1], flush=True)
    header = {
        "trace": f"{name}, {len(prompts)} requests, {results[0].prompt_tokens:,} prompt tokens",
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "commit": commit,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "scale": f"{args.block_tokens} replayed tokens for a block of 512",
    }
    print("\n" + "\n".join(f"{key}: {value}" for key, value in header.items()) + "\n")
    print(table(results))
    for path in write(results, header, args.out):
        print(path)
    print("What this does not show: latency, and answers that come back in the next turn.")


def _commit() -> str:
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
