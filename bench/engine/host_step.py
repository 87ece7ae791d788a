"""Host time to schedule and commit one step of decoding rows, with a device that does nothing.

    python bench/engine/host_step.py [--rows 256] [--steps 300]

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
from millpond.plan.step import Capabilities, Emitted, StepPlan, StepResult, Written


class NullExecutor:
    """Claims to have written and drawn whatever was planned; remembers how long it took itself."""

    def __init__(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self.clock = self.processor = 0.0  # seconds spent in here by the last step
        self.rows = 0

    def execute(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter(), time.thread_time()
        rows = plan.prefill + plan.decode
        self.rows = len(plan.decode)
        result = StepResult(
            step=plan.step,
            emitted=tuple(Emitted(seat=seat, token=1) for row in rows for seat in row.emit_seats),
            written=tuple(
                Written(slot, end)
                for row in rows
                for slot, end in ((row.state_out, row.end), *((e.slot, e.end) for e in row.exports))
            ),
        )
        self.clock = time.perf_counter() - begin[0]
        self.processor = time.thread_time() - begin[1]
        return result

    def close(self) -> None:
        pass


def measure(rows: int, steps: int, prompt: int) -> tuple[list[float], list[float]]:
    """Seconds of `steps` steps of `rows` decoding rows each: on the clock, and of the processor."""
    executor = NullExecutor(
        Capabilities(
            num_slots=rows + 16,
            num_pages=rows * (-(-(prompt + steps + 8) // 64) + 1),
            num_seats=rows,
            export_granularity=64,
            vocab_size=1000,
            max_position=1 << 20,
        )
    )
    settings = EngineSettings(
        max_batch_size=rows, max_prefill_tokens=rows * prompt, session_len=1 << 20
    )
    engine = Engine(settings, executor)
    for i in range(rows):
        tokens = tuple((i + j) % 1000 for j in range(prompt))
        params = SamplingParams(max_tokens=steps + 1000, ignore_eos=True, seed=i)
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
    args = parser.parse_args()
    print(f"{args.rows} decoding rows, {args.steps} steps, milliseconds per step")
    names = ("on the clock", "of processor")
    for name, seconds in zip(names, measure(args.rows, args.steps, args.prompt), strict=True):
        times = sorted(1e3 * t for t in seconds)
        p90 = times[len(times) * 9 // 10]
        print(
            f"{name:<14} median {statistics.median(times):.3f}  best {times[0]:.3f}  p90 {p90:.3f}"
        )
    print("What this does not show: staging on the device, and readers that wake for every token.")


if __name__ == "__main__":
    main()
