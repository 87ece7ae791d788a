"""One case of an op: compared with the reference, then timed, with another library as its peer.

A case that differs from the reference, or takes too long, has no time.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

import torch
import triton

from bench.ops import cases, layers, peers
from millpond.ops.reference.backend import BACKEND as REFERENCE
from millpond.ops.triton.backend import BACKEND as TRITON

Case = cases.Case | layers.Case

TRIALS, REPEATS, TRIAL_SECONDS = 7, 20, 0.02
"""How often a time is taken; a trial has fewer repeats where it would take longer than this."""

WITHIN = {
    # Sums in another order; three TF32 products for one of fp32.
    torch.float32: 2e-5,
    # Operands and outputs rounded to bf16, 2^-9 each, a few times over; near ties go elsewhere.
    torch.bfloat16: 1.5e-2,
}
"""Root mean square of the difference over that of the reference; of integers the share that
differs."""


ANY = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError,
    TypeError, ValueError, triton.TritonError,
)  # fmt: skip
"""What a peer may raise: it is another library, of any version."""


class TooLongError(Exception):
    """A case, or its peer, did not end in the time it was given."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `TooLongError` in the block after so many seconds, once no C code runs there.

    Blocks may be nested; the limit of the outer one holds.
    """
    if seconds == float("inf"):
        yield
        return
    began = time.monotonic()
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    before = signal.getsignal(signal.SIGALRM)

    def ring(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise TooLongError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, min(seconds, left or seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3))


@dataclass(frozen=True, slots=True)
class Times:
    """Of one case, in microseconds; None: it cannot be captured, or has no peer."""

    graph: float | None
    launch: float
    peer: float | None = None
    peer_error: float | None = None
    peer_note: str = ""

    @property
    def best(self) -> float:
        """As an engine would run it."""
        return self.launch if self.graph is None else self.graph


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device does at best, a second: bytes copied (read and written), and flops."""

    copy: float
    product: float

    def floor(self, case: Case) -> float:
        """Microseconds that a case takes at least."""
        return 1e6 * max(case.least_bytes / self.copy, case.least_flops / self.product)


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
    """How the kernels differ from the reference, or why they cannot be compared, or None."""
    name = f"{case.shape.name} {case.op} ({case.label})"
    try:
        expected = outcome(case, REFERENCE.ops[case.op])
        found = outcome(case, serving(case.op))
    except (RuntimeError, triton.TritonError) as error:
        return f"{name}: {type(error).__name__}: {error}"
    worst = max((difference(a, b) for a, b in zip(found, expected, strict=True)), default=0.0)
    return None if worst <= WITHIN[dtype] else f"{name} differs by {worst:.1e}"


def microseconds(call: Callable[[], object]) -> float:
    """Median over trials of one call, the device idle before and waited for after."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    repeats = int(min(max(TRIAL_SECONDS / first, 1), REPEATS))
    trials = []
    for _ in range(TRIALS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
        trials.append((time.perf_counter() - begin) / repeats * 1e6)
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


def timed(case: Case, peer_seconds: float) -> Times:
    """Both times of a case, and the better of both for its peer, if that is ready by then."""
    op = serving(case.op)

    def call() -> object:
        return case.call(op)

    call()
    launch = microseconds(call)
    replay = captured(call)
    graph = microseconds(replay) if replay else None
    if not isinstance(case, cases.Case):
        return Times(graph, launch)
    try:
        with at_most(peer_seconds):  # tuning included
            if (other := peers.peer(case)) is None:
                return Times(graph, launch)
            error = difference(other(), outcome(case, op)[0])
            peer = microseconds(other)
            replay = captured(other)
            peer = min(peer, microseconds(replay)) if replay else peer
    except TooLongError:
        return Times(graph, launch, peer_note=f"more than {peer_seconds:.0f} s to tune")
    except ANY as failure:  # another's code, of any version
        return Times(graph, launch, peer_note=type(failure).__name__)
    note = "" if replay else "launched from Python"
    return Times(graph, launch, peer, error, note)


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
