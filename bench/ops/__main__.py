"""Every op at the shapes of real models: against its least bytes and arithmetic, and fla-core.

python -m bench.ops [--shapes kda,gdn,q4,g8] [--only mix,prefill,...] [--first N] [--check-only]
                    [--limit S] [--each S] [--peer S] [--out FILE]

Case by case: outputs and what a call writes are compared with the reference's, then the case is
timed; one that differs is named and has no time. Of every kind of case the most telling comes
first, and no kind has its second before all had their first: cut short, a run has shown most of
what there is. --limit is of all of it, --each of a case, --peer of fla-core's tuning and times of a
case. --out keeps every line as it comes; what is there already is not run again.

Two times a case: replays of a CUDA graph (what a decode step sees) and launches from Python. Rates
are of the bytes that must move or of the arithmetic that must be done, whichever takes longer at
the rates of a copy and of a large product measured in the same run. Beside a verify step stands how
much longer it takes than decoding as many rows. --check-only compares and times nothing: it needs
no GPU with TRITON_INTERPRET=1 and --shapes small-kda,small-gdn,small-q4,small-g8.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path

import torch
import triton

from bench.ops import cases, layers, peers
from bench.ops.measure import (
    WITHIN,
    Case,
    Rates,
    Times,
    TooLongError,
    at_most,
    copy_rate,
    product_rate,
    red,
    timed,
)
from millpond.ops.triton.backend import BACKEND as TRITON

FAMILIES = ("mix", "prefill", "export", "conv", *layers.FAMILIES)

LIMITS = """
What this does not show: a whole model's step (other ops, launches between them), more than one GPU,
batches of mixed lengths, states colder than a benchmark's. fla-core's functions are timed without
the copies of states out of slots and back that they need. One machine, one run."""

Make = partial[Case]
"""How to make a case; its first argument is a shape."""


def built(
    shape: cases.Shape, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, str, Make]]:
    """As `layers.built`: a layer's decode, verify and prompt rows."""
    where = (shape, device, dtype)
    small = shape.name.startswith("small")
    rows = (3, 1) if small else (64, 256, 16, 128, 1)
    for count in rows:
        yield "mix", "decode", partial(cases.mix_decode, *where, [1] * count, [])
    for most in (3, 5, 1, 0):
        for count in rows[:1] if small else rows[:4]:
            verify = partial(cases.mix_verify, *where, count, most, round(0.7 * most))
            yield "mix", f"verify, K {most}", verify
    for lengths in ([70, 64],) if small else ([8192], [512] * 16, [2048], [8192] * 2, [512]):
        yield "prefill", "", partial(cases.prefill, *where, lengths, [])
        yield "conv", "", partial(cases.conv, *where, lengths, [])
    for count in (1,) if small else (8, 1, 32):
        exports = [(0, 64 * (n + 1)) for n in range(count)]
        yield "export", "", partial(cases.prefill, *where, [128 if small else 8192], exports)


def wanted(
    names: str, only: str, device: torch.device, dtype: torch.dtype, first: int | None = None
) -> list[Make]:
    """Makers of the cases of these shapes and families, in the order in which they are run.

    Kinds take turns, and of each kind the most telling case comes first.
    """
    families = only.split(",")
    kinds: dict[tuple[str, str, str], list[Make]] = {}
    for name in names.split(","):
        if name in cases.SHAPES:
            some = built(cases.SHAPES[name], device, dtype)
        else:
            some = layers.built(layers.SHAPES[name], device, dtype)
        for family, kind, make in some:
            if family in families:
                kinds.setdefault((family, kind, name), []).append(make)
    in_order = sorted(kinds.items(), key=lambda item: families.index(item[0][0]))
    turns = zip_longest(*(makes for _, makes in in_order))
    return [make for turn in islice(turns, first) for make in turn if make is not None]


def check(
    makes: Sequence[Make], dtype: torch.dtype, until: float = float("inf")
) -> tuple[int, int]:
    """Compare cases with the reference and print those that differ; how many do, of how many.

    None is begun after `until` on `time.monotonic()`.
    """
    bad = 0
    for done, make in enumerate(makes):
        if time.monotonic() > until:
            return bad, done
        if (why := red(make(), dtype)) is not None:
            bad += 1
            print(f"ops: {why}", flush=True)
    return bad, len(makes)


class Table:
    """Prints the row of each case and appends it to a file, from which a later run goes on."""

    def __init__(self, path: Path | None, dtype: str) -> None:
        self.path = path
        self.dtype = dtype
        self.decode: dict[tuple[str, int], float] = {}
        self.wrong: list[str] = []
        self.known: dict[str, dict[str, object]] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                kept = json.loads(line)
                self.known[kept["case"]] = kept
                self.note(kept["op"], kept["shape"], kept["rows"], kept["best"])

    def name(self, case: Case) -> str:
        """The name of a case in the file."""
        return f"{case.shape.name} {case.op} {case.label} {self.dtype}"

    def note(self, op: str, shape: str, rows: int | None, best: float) -> None:
        """Remember a decode time, which verifying as many rows is compared with."""
        if op == "mix_decode" and rows is not None:
            self.decode[shape, rows] = best

    def show(self, case: Case, times: Times, rates: Rates) -> None:
        """Print and keep the row of a case."""
        rows = getattr(case.named.get("rows"), "num_rows", None)
        self.note(case.op, case.shape.name, rows, times.best)
        floor, plain = rates.floor(case), self.decode.get((case.shape.name, rows))
        of_decode = "" if case.op != "mix_verify" or plain is None else f"{times.best / plain:.2f}"
        graph = "-" if times.graph is None else f"{times.graph:.1f}"
        peer, ahead = times.peer_note, ""
        if times.peer is not None:
            peer = f"{times.peer:.0f}" + (f" ({peer})" if peer else "")
            ahead = f"{times.peer / times.best:.2f}"
        print(
            f"| {case.op} | {case.shape.name} | {case.label} | {graph} | {times.launch:.1f}"
            f" | {floor:.1f} | {floor / times.best:.0%} | {of_decode} | {peer} | {ahead} |",
            flush=True,
        )
        if self.path is not None:
            kept = {
                "case": self.name(case), "op": case.op, "shape": case.shape.name, "rows": rows,
                "best": times.best, "floor": floor, **asdict(times),
            }  # fmt: skip
            with self.path.open("a") as file:
                file.write(json.dumps(kept) + "\n")


def measured(
    make: Make, dtype: torch.dtype, rates: Rates, table: Table, peer_seconds: float
) -> Times | None:
    """Compare a case, time it and show it; None: it differs, or there is a line of it already."""
    case = make()
    if table.name(case) in table.known:
        return None
    if (why := red(case, dtype)) is not None:
        table.wrong.append(why)
        print(f"ops: {why}", flush=True)
        return None
    times = timed(case, peer_seconds)
    table.show(case, times, rates)
    return times


def called(make: Make) -> str:
    """A case that need not be there."""
    return f"{make.args[0].name} {make.func.__name__}"


def measure(
    makes: Sequence[Make],
    dtype: torch.dtype,
    rates: Rates,
    table: Table,
    chosen: argparse.Namespace,
) -> list[float]:
    """Compare and time cases one by one: how far peers are from ours."""
    until, errors = time.monotonic() + chosen.limit, []
    for done, make in enumerate(makes):
        left = until - time.monotonic()
        if left <= 0:
            print(f"ops: out of time; {len(makes) - done} of {len(makes)} cases are left out")
            break
        try:
            with at_most(min(chosen.each, left)):
                times = measured(make, dtype, rates, table, chosen.peer)
        except TooLongError:
            print(f"ops: {called(make)}, case {done + 1}, took too long", flush=True)
            continue
        except (RuntimeError, triton.TritonError) as error:
            why = f"{called(make)}, case {done + 1}: {type(error).__name__}: {error}"
            table.wrong.append(why)
            print(f"ops: {why}", flush=True)
            continue
        if times is not None and times.peer_error is not None:
            errors.append(times.peer_error)
    return errors


def main(arguments: list[str]) -> int:
    """Exit 1 when a comparison failed, or when there is no GPU to time on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    endless = float("inf")
    parser.add_argument("--shapes", default="kda,gdn,q4,g8")
    parser.add_argument("--only", default=",".join(FAMILIES), help="in this order")
    parser.add_argument("--first", type=int, help="only so many cases of a kind")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--limit", type=float, default=endless, help="seconds, for all of it")
    parser.add_argument("--each", type=float, default=endless, help="seconds, for one case")
    parser.add_argument("--peer", type=float, default=endless, help="seconds, for one peer")
    parser.add_argument("--out", type=Path, help="lines of JSON, one a case")
    chosen = parser.parse_args(arguments)
    dtype = getattr(torch, chosen.dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (reason := TRITON.unusable(device)) is not None:
        print(f"ops: not run, because the Triton backend {reason}")
        return 1
    if device.type == "cpu" and not chosen.check_only:
        print("ops: not run, because there is no GPU to time on; --check-only compares")
        return 1
    makes = wanted(chosen.shapes, chosen.only, device, dtype, chosen.first)
    if chosen.check_only:
        bad, done = check(makes, dtype, time.monotonic() + chosen.limit)
        print(
            f"{done - bad} of {len(makes)} cases equal the reference within {WITHIN[dtype]:.1e}"
            f" ({chosen.dtype}), {bad} do not"
        )
        return 1 if bad else 0
    rates = Rates(copy_rate(), product_rate(dtype))
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__},"
        f" fla-core {peers.installed() or 'not installed'}, copy {rates.copy / 1e12:.2f} TB/s,"
        f" product {rates.product / 1e12:.0f} TFLOP/s; {chosen.dtype}, each case first within"
        f" {WITHIN[dtype]:.1e} of the reference"
    )
    print(
        "\n| op | shape | case | graph us | launch us | floor us | of it | of decode | fla us"
        " | fla / ours |"
    )
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---:|")
    table = Table(chosen.out, chosen.dtype)
    errors = measure(makes, dtype, rates, table, chosen)
    if errors:
        print(f"\nfla-core's outputs differ from ours by at most {max(errors):.1e} (rms).")
    print(LIMITS)
    return 1 if table.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
