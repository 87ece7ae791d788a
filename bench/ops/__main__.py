"""Every linear-attention op at the shapes of real models: against its least bytes and fla-core.

python -m bench.ops [--shapes kda,gdn] [--only decode,verify,prefill,export,conv] [--check-only]

Before a case is timed its outputs and slots are compared with the reference's; nothing at all is
printed of a run in which one comparison failed. Two times a case: replays of a CUDA graph (what a
decode step sees) and launches from Python. Rates are of the bytes that must move, as a share of a
copy measured in the same run. --check-only compares and times nothing: it needs no GPU with
TRITON_INTERPRET=1 and --shapes small-kda,small-gdn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import triton

from bench.ops import cases, peers
from millpond.ops.reference.backend import BACKEND as REFERENCE
from millpond.ops.triton.backend import BACKEND as TRITON

FAMILIES = ("decode", "verify", "prefill", "export", "conv")
TRIALS, REPEATS = 7, 20
WITHIN = {
    # Sums in another order; three TF32 products for one of fp32.
    torch.float32: 2e-5,
    # Operands and outputs rounded to bf16, 2^-9 each, a few times over.
    torch.bfloat16: 1.5e-2,
}
"""Root mean square of the difference over that of the reference."""

LIMITS = """
What this does not show: a whole model's step (other ops, launches between them), more than one GPU,
batches of mixed lengths, states colder than a benchmark's. fla-core's functions are timed without
the copies of states out of slots and back that they need. One machine, one run."""


@dataclass(frozen=True, slots=True)
class Line:
    """One case, in microseconds."""

    case: cases.Case
    graph: float
    launch: float
    peer: float | None
    peer_error: float | None


def built(shape: cases.Shape, device: torch.device, dtype: torch.dtype) -> Iterator[tuple]:
    """Every case of a shape as (family, how to make it): one at a time, they are large."""
    where = (shape, device, dtype)
    small = shape.name.startswith("small")
    for rows in (1, 3) if small else (1, 16, 64, 128, 256):
        one = [1] * rows
        yield "decode", lambda one=one: cases.prefill(*where, one, [], op="delta_decode")
        yield "conv", lambda one=one: cases.conv(*where, one, [], op="conv_decode")
    for rows in (2,) if small else (16, 64, 128):
        for most in (0, 1, 3, 5):
            pending = round(0.7 * most)
            more = (rows, most, pending)
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
    """Root mean square of a - b over that of b; infinite where one is not finite."""
    a, b = a.double(), b.double()
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return float("inf")
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-30))


def outcome(case: cases.Case, op: Callable[..., object]) -> list[torch.Tensor]:
    """What a call returns, and the banks and rings it leaves; the case itself keeps its own."""
    changed = {
        name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in case.named.items()
    }
    copy = cases.Case(case.op, case.label, case.shape, case.args, changed, case.least_bytes)
    found = copy.call(op)
    outputs = list(found) if isinstance(found, tuple) else [found]
    banks = [x for x in changed.values() if isinstance(x, torch.Tensor)]
    return [x for x in (*outputs, *banks) if isinstance(x, torch.Tensor) and x.numel()]


def red(case: cases.Case, dtype: torch.dtype) -> str | None:
    """How the kernels differ from the reference, or None."""
    expected = outcome(case, REFERENCE.ops[case.op])
    found = outcome(case, TRITON.ops[case.op])
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


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def timed(case: cases.Case) -> Line:
    """Both times of a case, and the better of them for its peer."""

    def call() -> object:
        return case.call(TRITON.ops[case.op])

    other = peers.peer(case)
    peer_time = error = None
    if other is not None:
        out, _ = other()
        error = difference(out[0], outcome(case, TRITON.ops[case.op])[0])
        peer_time = microseconds(other)
    call()
    return Line(case, microseconds(captured(call)), microseconds(call), peer_time, error)


def copy_rate() -> float:
    """Bytes a second of a large copy, read and written."""
    source = torch.empty(2**30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds(lambda: target.copy_(source)) * 1e6


def main(arguments: list[str]) -> int:
    """Exit 1 when a comparison failed, or when there is no GPU to time on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", default="kda,gdn")
    parser.add_argument("--only", default=",".join(FAMILIES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--check-only", action="store_true")
    chosen = parser.parse_args(arguments)
    dtype = getattr(torch, chosen.dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (reason := TRITON.unusable(device)) is not None:
        print(f"ops: not run, because the Triton backend {reason}")
        return 1
    if device.type == "cpu" and not chosen.check_only:
        print("ops: not run, because there is no GPU to time on; --check-only compares")
        return 1
    rate = 0.0 if chosen.check_only else copy_rate()
    lines: list[Line] = []
    checked = 0
    for name in chosen.shapes.split(","):
        for family, make in built(cases.SHAPES[name], device, dtype):
            if family not in chosen.only.split(","):
                continue
            case = make()
            if (difference_found := red(case, dtype)) is not None:
                print(f"ops: {difference_found}; no times are shown")
                return 1
            checked += 1
            if not chosen.check_only:
                lines.append(timed(case))
    print(f"{checked} cases equal the reference within {WITHIN[dtype]:.1e} (rms, {chosen.dtype})")
    if chosen.check_only:
        return 0
    fla = peers.installed()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__},"
        f" fla-core {fla or 'not installed'}, copy {rate / 1e12:.2f} TB/s"
    )
    print(
        "\n| op | shape | case | graph us | launch us | of the floor's rate | fla us | fla / ours |"
    )
    print("|---|---|---|---:|---:|---:|---:|---:|")
    for line in lines:
        floor = line.case.least_bytes / rate * 1e6
        other = (
            ("", "") if line.peer is None else (f"{line.peer:.0f}", f"{line.peer / line.graph:.2f}")
        )
        print(
            f"| {line.case.op} | {line.case.shape.name} | {line.case.label} | {line.graph:.1f}"
            f" | {line.launch:.1f} | {floor / line.graph:.0%} | {other[0]} | {other[1]} |"
        )
    errors = [line.peer_error for line in lines if line.peer_error is not None]
    if errors:
        print(f"\nfla-core's outputs differ from ours by at most {max(errors):.1e} (rms).")
    print(LIMITS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
