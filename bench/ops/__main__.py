"""Every op at the shapes of real models: against its least bytes and arithmetic, and fla-core.

python -m bench.ops [--shapes kda,gdn,q4,g8] [--only decode,verify,prefill,...] [--check-only]

Before anything is timed, outputs and what a call writes are compared with the reference's; every
case that differs is named, and then no time is shown at all. Two times a case: replays of a CUDA
graph (what a decode step sees) and launches from Python. Rates are of the bytes that must move or
of the arithmetic that must be done, whichever takes longer at the rates of a copy and of a large
product measured in the same run. --check-only compares and times nothing: it needs no GPU with
TRITON_INTERPRET=1 and --shapes small-kda,small-gdn,small-q4,small-g8.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import triton

from bench.ops import cases, layers, peers
from millpond.ops.reference.backend import BACKEND as REFERENCE
from millpond.ops.triton.backend import BACKEND as TRITON

FAMILIES = ("mix", "decode", "verify", "prefill", "export", "conv", *layers.FAMILIES)
TRIALS, REPEATS = 7, 20
WITHIN = {
    # Sums in another order; three TF32 products for one of fp32.
    torch.float32: 2e-5,
    # Operands and outputs rounded to bf16, 2^-9 each, a few times over; near ties go elsewhere.
    torch.bfloat16: 1.5e-2,
}
"""Root mean square of the difference over that of the reference; of integers the share that
differs."""

LIMITS = """
What this does not show: a whole model's step (other ops, launches between them), more than one GPU,
batches of mixed lengths, states colder than a benchmark's. fla-core's functions are timed without
the copies of states out of slots and back that they need. One machine, one run."""

Case = cases.Case | layers.Case


@dataclass(frozen=True, slots=True)
class Line:
    """One case, in microseconds; None: it cannot be captured, or has no peer."""

    case: Case
    graph: float | None
    launch: float
    peer: float | None
    peer_error: float | None


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device does at best, a second: bytes copied (read and written), and flops."""

    copy: float
    product: float

    def floor(self, case: Case) -> float:
        """Microseconds that a case takes at least."""
        return 1e6 * max(case.least_bytes / self.copy, case.least_flops / self.product)


def built(shape: cases.Shape, device: torch.device, dtype: torch.dtype) -> Iterator[tuple]:
    """Every case of a shape as (family, how to make it): one at a time, they are large."""
    where = (shape, device, dtype)
    small = shape.name.startswith("small")
    for rows in (1, 3) if small else (1, 16, 64, 128, 256):
        one = [1] * rows
        yield "mix", lambda one=one: cases.mix_decode(*where, one)
        yield "decode", lambda one=one: cases.prefill(*where, one, [], op="delta_decode")
        yield "conv", lambda one=one: cases.conv(*where, one, [], op="conv_decode")
    for rows in (2,) if small else (16, 64, 128):
        for most in (0, 1, 3, 5):
            pending = round(0.7 * most)
            more = (rows, most, pending)
            yield "mix", lambda more=more: cases.mix_verify(*where, *more)
            yield "verify", lambda more=more: cases.verify(*where, *more)
            yield "conv", lambda more=more: cases.conv_verify(*where, *more)
    prompts = ([70, 64],) if small else ([2048], [8192], [512] * 16, [8192] * 2)
    for lengths in prompts:
        yield "prefill", lambda lengths=lengths: cases.prefill(*where, lengths, [])
        yield "conv", lambda lengths=lengths: cases.conv(*where, lengths, [], op="conv_prefill")
    for count in (1,) if small else (1, 8, 32):
        tokens = 128 if small else 8192
        exports = [(0, 64 * (n + 1)) for n in range(count)]
        yield "export", lambda t=tokens, e=exports: cases.prefill(*where, [t], e)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Root mean square of a - b over that of b, infinite where one is not finite; of whole numbers
    the share that differs.
    """
    if not b.is_floating_point():
        return float((a != b).double().mean())
    a, b = a.double(), b.double()
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return float("inf")
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-30))


def serving(name: str) -> Callable[..., object]:
    """The op as an engine on a GPU has it: the reference's where there is no kernel."""
    return TRITON.ops[name] if name in TRITON.ops else REFERENCE.ops[name]


def outcome(case: Case, op: Callable[..., object]) -> list[torch.Tensor]:
    """What a call returns, and what it leaves where it writes; the case itself keeps its own."""
    changed = {name: case.named[name].clone() for name in case.changed}
    found = replace(case, named=case.named | changed).call(op)
    outputs = found if isinstance(found, tuple) else _fields(found)
    return [x for x in (*outputs, *changed.values()) if isinstance(x, torch.Tensor) and x.numel()]


def _fields(found: object) -> Sequence[object]:
    names = getattr(found, "__dataclass_fields__", None)
    return [found] if names is None else [getattr(found, name) for name in names]


def red(case: Case, dtype: torch.dtype) -> str | None:
    """How the kernels differ from the reference, or None."""
    expected = outcome(case, REFERENCE.ops[case.op])
    found = outcome(case, serving(case.op))
    if case.op == "conv_verify":  # places of no token are anything
        rows = case.named["rows"]
        live = torch.arange(rows.width - 1, device=found[0].device) < rows.pending[:, None]
        if rows.width > 1:
            found[0], expected[0] = found[0][live], expected[0][live]
    worst = max((difference(a, b) for a, b in zip(found, expected, strict=True)), default=0.0)
    if worst <= WITHIN[dtype]:
        return None
    return f"{case.shape.name} {case.op} ({case.label}) differs by {worst:.1e}"


def microseconds(call: Callable[[], object]) -> float:
    """Median over trials of one call, the device idle before and waited for after."""
    trials = []
    for _ in range(TRIALS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(REPEATS):
            call()
        torch.cuda.synchronize()
        trials.append((time.perf_counter() - begin) / REPEATS * 1e6)
    return statistics.median(trials)


def captured(call: Callable[[], object]) -> Callable[[], object] | None:
    """The call as a CUDA graph; None when it waits for the device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def timed(case: Case) -> Line:
    """Both times of a case, and the better of them for its peer."""
    op = serving(case.op)

    def call() -> object:
        return case.call(op)

    other = peers.peer(case) if isinstance(case, cases.Case) else None
    peer_time = error = None
    if other is not None:
        out, _ = other()
        error = difference(out[0], outcome(case, op)[0])
        peer_time = microseconds(other)
    call()
    launched = microseconds(call)
    replay = captured(call)
    return Line(case, microseconds(replay) if replay else None, launched, peer_time, error)


def copy_rate() -> float:
    """Bytes a second of a large copy, read and written."""
    source = torch.empty(2**30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds(lambda: target.copy_(source)) * 1e6


def product_rate(dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large product."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in "ab")
    return 2 * size**3 / microseconds(lambda: a @ b) * 1e6


def wanted(
    names: str, only: str, device: torch.device, dtype: torch.dtype
) -> Iterator[Callable[[], Case]]:
    """How to make the cases of these shapes and families."""
    families = only.split(",")
    for name in names.split(","):
        linear = built(cases.SHAPES[name], device, dtype) if name in cases.SHAPES else ()
        others = layers.built(layers.SHAPES[name], device, dtype) if name in layers.SHAPES else ()
        for family, make in chain(linear, others):
            if family in families:
                yield make


def check(
    makes: Sequence[Callable[[], Case]], dtype: torch.dtype, until: float = float("inf")
) -> tuple[int, int]:
    """Compare cases, naming those that differ or cannot be run at once: how many do, of how many.

    None is begun after `until` on the clock.
    """
    bad = 0
    for done, make in enumerate(makes):
        if time.monotonic() > until:
            return bad, done
        case = make()
        try:
            why = red(case, dtype)
        except (RuntimeError, triton.TritonError) as error:
            why = f"{case.shape.name} {case.op} ({case.label}): {type(error).__name__}: {error}"
        if why is not None:
            bad += 1
            print(f"ops: {why}", flush=True)
    return bad, len(makes)


def show(line: Line, rates: Rates) -> None:
    """One row of the table."""
    case, floor = line.case, rates.floor(line.case)
    best = line.launch if line.graph is None else line.graph
    other = ("", "") if line.peer is None else (f"{line.peer:.0f}", f"{line.peer / best:.2f}")
    graph = "-" if line.graph is None else f"{line.graph:.1f}"
    print(
        f"| {case.op} | {case.shape.name} | {case.label} | {graph} | {line.launch:.1f}"
        f" | {floor:.1f} | {floor / best:.0%} | {other[0]} | {other[1]} |",
        flush=True,
    )


def main(arguments: list[str]) -> int:
    """Exit 1 when a comparison failed, or when there is no GPU to time on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", default="kda,gdn,q4,g8")
    parser.add_argument("--only", default=",".join(FAMILIES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds, for all of it")
    chosen = parser.parse_args(arguments)
    dtype = getattr(torch, chosen.dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (reason := TRITON.unusable(device)) is not None:
        print(f"ops: not run, because the Triton backend {reason}")
        return 1
    if device.type == "cpu" and not chosen.check_only:
        print("ops: not run, because there is no GPU to time on; --check-only compares")
        return 1
    makes = list(wanted(chosen.shapes, chosen.only, device, dtype))
    began, whole = time.monotonic(), chosen.limit
    bad, done = check(makes, dtype, began + (whole if chosen.check_only else 0.6 * whole))
    if done < len(makes):
        print(f"ops: out of time; {len(makes) - done} of {len(makes)} cases are left out")
    makes = makes[:done]
    if bad:
        print(f"ops: {bad} of {len(makes)} cases are wrong; no times are shown")
        return 1
    print(f"{len(makes)} cases equal the reference within {WITHIN[dtype]:.1e} ({chosen.dtype})")
    if chosen.check_only:
        return 0
    rates = Rates(copy_rate(), product_rate(dtype))
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__},"
        f" fla-core {peers.installed() or 'not installed'}, copy {rates.copy / 1e12:.2f} TB/s,"
        f" product {rates.product / 1e12:.0f} TFLOP/s"
    )
    print("\n| op | shape | case | graph us | launch us | floor us | of it | fla us | fla / ours |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|")
    errors = []
    for make in makes:
        if time.monotonic() > began + whole:
            print("| out of time |")
            break
        line = timed(make())
        show(line, rates)
        errors += [] if line.peer_error is None else [line.peer_error]
    if errors:
        print(f"\nfla-core's outputs differ from ours by at most {max(errors):.1e} (rms).")
    print(LIMITS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
