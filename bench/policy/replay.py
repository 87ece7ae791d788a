"""Replays a trace through the real engine, on a device that computes nothing, in simulated time.

Everything that decides is the engine's own: admission, scheduling, checkpoints, eviction, commit.
The device claims to have written and drawn whatever was planned, and says how long that would have
taken. So results are the same on every machine, whatever the time the replay itself takes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.policy.trace import TRACE_BLOCK, VOCAB, Prompt
from millpond.engine.loop import Engine, EngineSettings
from millpond.engine.types import EngineRequest
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import (
    PAGE_SIZE,
    Capabilities,
    Emitted,
    Ended,
    Executor,
    Launched,
    StepPlan,
    StepResult,
    Written,
)
from millpond.state.value import EvictionPolicy


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds a device of the real size would take: per prompt token, decode step, decoding row."""

    token: float = 1e-5
    step: float = 4e-3
    row: float = 2e-5

    def of(self, plan: StepPlan, scale: float) -> float:
        """A step in which every token stands for `scale` of them."""
        folded = sum(len(row.tokens) for row in plan.prefill)
        decoded = sum(len(row.tokens) for row in plan.decode)
        seconds = folded * self.token
        if decoded:
            seconds += self.step + decoded * self.row
        return seconds * scale


class IdleDevice:
    """Claims to have written and drawn whatever was planned."""

    def __init__(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities

    def launch(self, plan: StepPlan) -> Launched:
        rows = plan.prefill + plan.decode
        result = StepResult(
            step=plan.step,
            emitted=tuple(Emitted(seat=seat, token=1) for row in rows for seat in row.emit_seats),
            written=tuple(
                Written(slot, end)
                for row in rows
                for slot, end in ((row.state_out, row.end), *((e.slot, e.end) for e in row.exports))
            ),
        )
        return Ended(result)

    def close(self) -> None:
        pass


class ClockedDevice:
    """A device, and the time its steps would have taken."""

    def __init__(self, device: Executor, costs: Costs, scale: float) -> None:
        self.capabilities = device.capabilities
        self.now = 0.0
        self.folded = 0  # prompt tokens
        self._device = device
        self._costs = costs
        self._scale = scale

    def launch(self, plan: StepPlan) -> Launched:
        self.now += self._costs.of(plan, self._scale)
        self.folded += sum(len(row.tokens) for row in plan.prefill)
        return self._device.launch(plan)

    def close(self) -> None:
        self._device.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is compared: a name, and the settings that make it."""

    name: str
    eviction_policy: EvictionPolicy
    ladder: bool


POLICIES = (
    Policy(name="value", eviction_policy="value", ladder=True),
    Policy(name="lru", eviction_policy="lru", ladder=True),
    Policy(name="lru, no ladder", eviction_policy="lru", ladder=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What all replays of a comparison share. Numbers are of the real size, in tokens.

    Every block of a trace is replayed as `block_tokens` tokens and everything else is scaled alike;
    `pages` are those of the replay, None has room for the whole trace, so that slots alone are
    short.
    """

    block_tokens: int = PAGE_SIZE
    batch: int = 64
    prefill: int = 8192
    interval: int = 4096
    pages: int | None = None
    costs: Costs = field(default_factory=Costs)

    @property
    def factor(self) -> float:
        """Tokens of the trace that one replayed token stands for."""
        return TRACE_BLOCK / self.block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one replay came to. Tokens are those of the trace."""

    policy: str
    budget: int  # slots for checkpoints
    requests: int
    prompt_tokens: int
    hit_tokens: int  # not computed, because a checkpoint was there
    recomputed_tokens: int  # computed though an earlier prompt of the trace had computed them
    hits: dict[str, int]  # by anchor kind
    evicted: dict[str, int]
    preemptions: int
    simulated_s: float  # until the last request ended
    replay_s: float  # of processor time: the only number that depends on the machine


class Replay:
    """A trace made ready, to be sent through one engine after another."""

    def __init__(self, prompts: Sequence[Prompt], scale: Scale) -> None:
        size = scale.block_tokens
        self._scale = scale
        self._arrivals = [prompt.arrival for prompt in prompts]
        self._requests = [
            EngineRequest(
                request_id=str(number),
                tokens=prompt.tokens(size),
                params=SamplingParams(
                    max_tokens=prompt.answer_tokens(size), ignore_eos=True, seed=number
                ),
            )
            for number, prompt in enumerate(prompts)
        ]
        self._blocks = len({one for prompt in prompts for one in prompt.blocks})
        self._new = _new_tokens(prompts, size)

    def run(
        self,
        policy: Policy,
        budget: int,
        device: Callable[[Capabilities], Executor] = IdleDevice,
    ) -> Result:
        """Send every prompt at its time, run to the end, and count."""
        scale = self._scale
        clock = ClockedDevice(device(self._capabilities(budget)), scale.costs, scale.factor)
        settings = EngineSettings(
            max_batch_size=scale.batch,
            max_prefill_tokens=round(scale.prefill / scale.factor),
            session_len=clock.capabilities.max_position,
            checkpoint_interval=round(scale.interval / scale.factor) if policy.ladder else 0,
            checkpoint_budget=budget,
            eviction_policy=policy.eviction_policy,
        )
        engine = Engine(settings, clock, clock=lambda: clock.now)
        gc.collect()
        gc.disable()  # it would look through the whole trace again and again
        began = time.thread_time()  # of the processor: the machine may be busy with other work
        try:
            self._send(engine, clock)
        finally:
            took = time.thread_time() - began
            gc.enable()
        stats = engine.stats()
        index = engine._ledger.index
        result = Result(
            policy=policy.name,
            budget=budget,
            requests=len(self._requests),
            prompt_tokens=round(stats.prompt_tokens * scale.factor),
            hit_tokens=round(stats.prefix_tokens.get("hit", 0) * scale.factor),
            recomputed_tokens=round((clock.folded - self._new) * scale.factor),
            hits={kind.value: times for kind, times in index.hits.items()},
            evicted={kind.value: times for kind, times in index.evicted.items() if times},
            preemptions=stats.preemptions,
            simulated_s=clock.now,
            replay_s=took,
        )
        engine.close(drain=False)
        return result

    def _send(self, engine: Engine, clock: ClockedDevice) -> None:
        """Open loop: a prompt comes when its time has come, however busy the engine is."""
        for arrival, request in zip(self._arrivals, self._requests, strict=True):
            while clock.now < arrival:
                if not engine.step():
                    clock.now = arrival
            engine.submit(request)
        while engine.step():
            pass

    def _capabilities(self, budget: int) -> Capabilities:
        scale = self._scale
        longest = max(len(one.tokens) + one.params.max_tokens for one in self._requests) + 1
        running = scale.batch * (-(-longest // PAGE_SIZE) + 1)
        whole = self._blocks * -(-scale.block_tokens // PAGE_SIZE)
        return Capabilities(
            num_slots=budget + 2 * scale.batch,
            num_pages=whole + running if scale.pages is None else scale.pages,
            num_seats=scale.batch,
            export_granularity=PAGE_SIZE,
            vocab_size=VOCAB,
            max_position=longest,
        )


def _new_tokens(prompts: Sequence[Prompt], size: int) -> int:
    """Tokens that no earlier prompt had in the same place after the same tokens, block by block.

    One token of each prompt is always new: its logits are wanted.
    """
    known: set[int] = set()
    new = 0
    for prompt in prompts:
        length = len(prompt.tokens(size))
        path, shared, seen = 0, 0, True
        for depth, one in enumerate(prompt.blocks, 1):
            path = hash((path, one))
            seen = seen and path in known and depth * size < length
            shared += seen
            known.add(path)
        new += length - shared * size
    return new
