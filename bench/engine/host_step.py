"""Host time to schedule and commit one step of decoding rows, with a device that does nothing.

    python bench/engine/host_step.py [--rows 256] [--steps 300] [--drafts 0] [--ahead]

With drafts, every second one of a row is accepted. With `--ahead` every step is planned and
launched while the one before is in flight. `--anchors` keeps a state every so many tokens of each
answer.

Prints median and spread of the time on the clock and of processor time, per step. Streams have no
reader, as if their consumers were slower than the engine.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

from millpond.engine.loop import Engine, EngineSettings
from millpond.engine.types import EngineRequest
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import (
    Capabilities,
    Emitted,
    Ended,
    Launched,
    StepPlan,
    StepResult,
    Verified,
    Written,
)


class NullExecutor:
    """Claims to have written and drawn whatever was planned; remembers how long it took itself."""

    def __init__(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self.clock = self.processor = 0.0  # seconds spent in here by the last step
        self.rows = 0
        self._pending: dict[int, int] = {}  # by seat: drafts accepted last time

    def launch(self, plan: StepPlan) -> Launched:
        begin = time.perf_counter(), time.thread_time()
        rows = plan.prefill + plan.decode
        self.rows = len(plan.decode) + len(plan.verify)
        emitted = [Emitted(seat=seat, token=1) for row in rows for seat in row.emit_seats]
        written = [Written(row.state_out, row.end) for row in rows]
        written += [Written(e.slot, e.end) for row in rows for e in row.exports]
        for load in plan.seat_loads:
            self._pending[load.seat] = 0
        for live in plan.verify:
            end = live.start + self._pending[live.seat] + 1
            written.append(Written(live.state_out, end))
            if live.export is not None and live.export.end <= end:
                written.append(Written(live.export.slot, live.export.end))
            self._pending[live.seat] = live.num_drafts // 2
            emitted += [Emitted(seat=live.seat, token=1)] * (live.num_drafts // 2 + 1)
        result = StepResult(
            step=plan.step,
            emitted=tuple(emitted),
            verified=tuple(Verified(r.seat, r.num_drafts, r.num_drafts // 2) for r in plan.verify),
            written=tuple(written),
        )
        self.clock = time.perf_counter() - begin[0]
        self.processor = time.thread_time() - begin[1]
        return Ended(result)

    def close(self) -> None:
        pass


def measure(
    rows: int, steps: int, prompt: int, drafts: int, *, ahead: bool = False, anchors: int = 0
) -> tuple[list[float], list[float]]:
    """Seconds of `steps` steps of `rows` decoding rows each: on the clock, and of the processor."""
    executor = NullExecutor(
        Capabilities(
            num_slots=(2 * rows if anchors else rows) + 16,
            num_pages=rows * (-(-(prompt + (steps + 12) * (drafts // 2 + 1) + 16) // 64) + 1),
            num_seats=rows,
            export_granularity=64,
            vocab_size=1000,
            max_position=1 << 20,
            num_draft_tokens=drafts,
            runs_ahead=ahead,
        )
    )
    settings = EngineSettings(
        max_batch_size=rows,
        max_prefill_tokens=rows * prompt,
        session_len=1 << 20,
        decode_checkpoint_interval=anchors,
    )
    engine = Engine(settings, executor)
    for i in range(rows):
        tokens = tuple((i + j) % 1000 for j in range(prompt))
        params = SamplingParams(max_tokens=8 * (steps + 1000), ignore_eos=True, seed=i)
        engine.submit(EngineRequest(request_id=f"request-{i}", tokens=tokens, params=params))
    while executor.rows < rows:
        engine.step()
    for _ in range(10):
        engine.step()
    gc.collect()
    clock, processor = [], []
    for _ in range(steps):
        begin = time.perf_counter(), time.thread_time()
        engine.step()
        clock.append(time.perf_counter() - begin[0] - executor.clock)
        processor.append(time.thread_time() - begin[1] - executor.processor)
    engine.close(drain=False)
    return clock, processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompt", type=int, default=300, help="tokens")
    parser.add_argument("--drafts", type=int, default=0, help="tokens a row, 0 to 7")
    parser.add_argument("--ahead", action="store_true", help="two steps in flight")
    parser.add_argument("--anchors", type=int, default=0, help="tokens between kept states")
    args = parser.parse_args()
    with_drafts = f" with {args.drafts} drafts" if args.drafts else ""
    with_drafts += ", ahead" if args.ahead else ""
    print(f"{args.rows} decoding rows{with_drafts}, {args.steps} steps, milliseconds per step")
    names = ("on the clock", "of processor")
    found = measure(
        args.rows, args.steps, args.prompt, args.drafts, ahead=args.ahead, anchors=args.anchors
    )
    for name, seconds in zip(names, found, strict=True):
        times = sorted(1e3 * t for t in seconds)
        p90 = times[len(times) * 9 // 10]
        print(
            f"{name:<14} median {statistics.median(times):.3f}  best {times[0]:.3f}  p90 {p90:.3f}"
        )
    print("What this does not show: staging on the device, and readers that wake for every token.")


if __name__ == "__main__":
    main()
