"""What other engines reached on the workloads of `bench.engine`, and the bars we set ourselves.

Measured on one NVIDIA H200 (driver 580.159.04, torch 2.11.0+cu130, Triton 3.6.0), best repetition,
with random weights of the same shape as `q4`, bfloat16, recurrent state in float32, at most 64
sequences and 8192 prompt tokens a step. They stand beside our numbers only where the model is the
same and the GPU is one of those.
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "q4"
GPU = "H200"


@dataclass(frozen=True, slots=True)
class Peers:
    """Output tokens per second, and mean time to the first token in seconds; None: not measured."""

    lmdeploy: float | None = None
    vllm: float | None = None
    lmdeploy_ttft: float | None = None
    vllm_ttft: float | None = None


NAMES = ("LMDeploy 0.18.0", "vLLM 0.26.0")

MEASURED: dict[tuple[str, str], Peers] = {
    ("A", ""): Peers(248.1, 257.7, 0.066, 0.082),
    ("B", ""): Peers(7507, 7417, 0.88, 0.65),
    ("C", "off"): Peers(843, 837, 4.38, 4.53),
    ("C", "on"): Peers(851, 1329, 4.45, 2.81),
    ("C", "on, warm"): Peers(851, 1363, 4.44, 2.70),
    ("D", "off"): Peers(796, 810, 0.601, 0.580),
    ("D", "on"): Peers(1548, 1453, 0.321, 0.357),
}


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure has to be: at least, or with `most` at most, `limit`."""

    measure: str
    limit: float
    why: str
    most: bool = False

    def met(self, value: float) -> bool:
        """Whether it is."""
        return value <= self.limit if self.most else value >= self.limit


FLOOR_MS = 8.41e9 / 4.28e12 * 1e3
"""One pass over the weights of `q4` (without its draft layer) at the rate of a copy there."""

BARS: dict[tuple[str, str], tuple[Bar, ...]] = {
    ("A", ""): (
        Bar("ms_per_token_at_the_end", FLOOR_MS / 0.85, "85 % of the bandwidth", most=True),
    ),
    ("B", ""): (
        Bar("output_tokens_per_s", 8169, "LMDeploy with its state in bfloat16"),
        Bar("idle_when_steady", 0.03, "the device waits at most 3 %", most=True),
    ),
    ("C", "off"): (Bar("output_tokens_per_s", 843, "the best peer"),),
    ("C", "on"): (Bar("output_tokens_per_s", 1.3 * 1329, "1.3 times the best peer"),),
    ("C", "on, warm"): (Bar("output_tokens_per_s", 1.3 * 1363, "1.3 times the best peer"),),
    ("D", "off"): (Bar("output_tokens_per_s", 810, "the best peer"),),
    ("D", "on"): (Bar("ttft_mean_s", 0.21, "two thirds of the best peer", most=True),),
}

FLOORS_MS: dict[tuple[str, str], float] = {("A", ""): 1.99, ("B", ""): 4.14}
"""Milliseconds a token: weights, states (read and written), keys and values once, at that rate."""

VERIFY_TIMES = {3: 1.4, 5: 1.8}
"""By drafts: how many times as long as when decoding the delta rule may take when verifying."""

DELTA = "delta rule"

SLOTS_A_SEQUENCE = {3: 1.1, 5: 1.16, 7: 1.22}
"""By drafts: a state and its seat may take at most so much of a state."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """What a variant has to be against another of the same run: at least `least` times as good.

    Times to the first token are better the smaller they are.
    """

    measure: str
    key: tuple[str, str]
    beside: tuple[str, str]
    least: float
    why: str

    def of(self, mine: float, theirs: float) -> float:
        """How many times as good."""
        return theirs / mine if self.measure.startswith("ttft") else mine / theirs


def _interior(prompt: int, budget: int) -> Ratio:
    name = f"{prompt}, budget {budget}"
    gains = (prompt, budget) == (32320, 4096)  # one forward less of nine
    return Ratio(
        "ttft_mean_s",
        ("E", f"{name}, interior"),
        ("E", f"{name}, split"),
        1.0375 if gains else 0.995,
        "inside a forward against cut for it",
    )


def _matrix(shape: str, batch: str) -> tuple[Ratio, Ratio]:
    on, off = (("I", f"{shape}, {batch}, {name}") for name in ("on", "off"))
    return (
        Ratio("output_tokens_per_s", on, off, 1.006, "caching against none"),
        Ratio(
            "ttft_cold_p99_s",
            on,
            off,
            0.95,
            "p99 to the first token of prompts that share nothing, likewise",
        ),
    )


RATIOS = (
    Ratio("output_tokens_per_s", ("C", "on, no hits"), ("C", "off"), 0.99, "caching without hits"),
    Ratio("output_tokens_per_s", ("G", "burst, on"), ("G", "burst, off"), 1.0, "a burst cached"),
    *(
        ratio
        for shape in ("long in", "long out")
        for batch in ("batch 64, 5 drafts", "batch 256, 0 drafts")
        for ratio in _matrix(shape, batch)
    ),
    *(_interior(prompt, budget) for prompt in (32320, 32770) for budget in (4096, 16384)),
)
