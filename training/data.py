"""Packs samples into batches, in worker processes, as a function of (seed, step).

Knows rows, document starts and loss weights; tensors are made by the trainer.
"""

import multiprocessing
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millpond.tasks import Dialogue, make, stream
from training.batch import POOL
from training.render import Encoder, Sample

Arrays = dict[str, np.ndarray]
Focus = tuple[str, float] | None
"""A task and the share of dialogues that are drawn from it beside the mixture."""

KINDS = {"short": (512, 1), "medium": (2048, 4), "long": (4096, 8)}
"""Row length in tokens and the generator's scale."""
_CYCLE = (
    ("short",) * 6 + ("medium",) + ("short",) * 6 + ("medium", "long", "short", "short", "medium")
)
_PROMPT_WEIGHT = 0.05
_NEAR, _CLEAR = 0.95, 0.85
"""Share of ledgers with far attention hidden, of recalls with the state cleared at the question."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A batch and where each sample begins in it."""

    row: int
    arrays: Arrays
    samples: list[Sample]
    offsets: list[int]


def pack(
    samples: Sequence[Sample], row: int, tokens: int, dice: random.Random | None, pad: int
) -> Packed:
    """Lays samples in order into `tokens // row` rows, skipping those that do not fit any more.

    With `dice` the training masks and loss targets are drawn; without, none is set.
    """
    ids = np.full(tokens, pad, dtype=np.int64)
    pos = np.zeros(tokens, dtype=np.int64)
    doc = np.zeros(tokens, dtype=np.int64)
    near, reset = np.zeros(tokens, dtype=bool), np.zeros(tokens, dtype=bool)
    weight = np.zeros(tokens, dtype=np.float32)
    starts: list[int] = []
    kept: list[Sample] = []
    offsets: list[int] = []

    def begin(at: int, length: int) -> None:
        doc[at : at + length] = len(starts)
        pos[at : at + length] = np.arange(length)
        starts.append(at)

    pending = list(samples)
    for first in range(0, tokens, row):
        at = first
        while True:
            room = first + row - at
            fit = next((i for i, s in enumerate(pending) if len(s.ids) <= room), None)
            if fit is None:
                break
            sample = pending.pop(fit)
            length = len(sample.ids)
            span = -(-length // POOL) * POOL
            begin(at, span)
            ids[at : at + length] = sample.ids
            if dice is not None:
                near[at : at + span] = sample.recurrent and dice.random() < _NEAR
                if sample.cut >= 0 and dice.random() < _CLEAR:
                    reset[at + sample.cut] = True
                learned = int(sample.learn.sum())
                scale = min(2.0, max(0.4, (20 / max(learned, 1)) ** 0.5))
                weight[at + 1 : at + length] = np.where(sample.learn[1:], scale, _PROMPT_WEIGHT)
                weight[at + sample.given[0] : at + sample.given[1]] = 0.0
            kept.append(sample)
            offsets.append(at)
            at += span
        if at < first + row:
            begin(at, first + row - at)
    starts += [tokens] * (tokens // 12 + 1 - len(starts))
    arrays = {"ids": ids, "pos": pos, "doc": doc, "starts": np.array(starts, dtype=np.int32),
              "near": near, "reset": reset}  # fmt: skip
    count = tokens // 4
    order = np.argsort(-(weight + 0.01 * np.random.default_rng(tokens).random(tokens)))[:count]
    arrays |= {"target": order.astype(np.int64), "weight": weight[order]}
    return Packed(row, arrays, kept, offsets)


class Packer:
    """Endless training batches of one kind."""

    def __init__(
        self, encoder: Encoder, seed: int, kind: str, tokens: int, focus: Focus = None
    ) -> None:
        self.row, scale = KINDS[kind]
        self.tokens, self.encoder = tokens, encoder
        self.dice = random.Random(f"{seed}/{kind}")
        self.long, self.short = stream(seed, scale=scale), stream(seed + 1)
        self.focus = focus
        self.pending: list[Sample] = []

    def _draw(self) -> Dialogue:
        if self.focus is not None and self.dice.random() < self.focus[1]:
            return make(self.focus[0], self.dice.getrandbits(48), split="train")
        return next(self.short if self.dice.random() < 0.3 else self.long)

    def __call__(self) -> Packed:
        """The next batch."""
        while sum(len(s.ids) + 3 for s in self.pending) < self.tokens * 1.03 + 2 * self.row:
            sample = self.encoder(self._draw())
            if len(sample.ids) <= self.row:
                self.pending.append(sample)
        packed = pack(self.pending, self.row, self.tokens, self.dice, self.encoder.pad)
        used = {id(s) for s in packed.samples}
        self.pending = [s for s in self.pending if id(s) not in used]
        return packed


def _work(
    queue: Any,
    new: Callable[[], Encoder],
    seed: int,
    worker: int,
    workers: int,
    first: int,
    tokens: int,
    focus: Focus,
) -> None:
    encoder = new()
    base = (seed * 1_000_003 + first) * 1009 + worker
    packers = {
        kind: Packer(encoder, base * 7 + i, kind, tokens, focus) for i, kind in enumerate(KINDS)
    }
    for step in range(first + worker, 1 << 40, workers):
        packed = packers[_CYCLE[step % len(_CYCLE)]]()
        queue.put((packed.row, packed.arrays))


def batches(
    new: Callable[[], Encoder],
    seed: int,
    first: int,
    tokens: int,
    workers: int,
    focus: Focus = None,
) -> Iterator[tuple[int, Arrays]]:
    """Batches of `tokens` tokens from step `first` on, made by `workers` processes in turn.

    `new` builds an encoder in the process that uses it; `focus` adds dialogues of one task.
    """
    if workers == 0:
        encoder = new()
        packers = {
            kind: Packer(encoder, seed * 7 + i, kind, tokens, focus) for i, kind in enumerate(KINDS)
        }
        kinds = [kind for kind in _CYCLE if KINDS[kind][0] <= tokens]
        for step in range(first, 1 << 40):
            packed = packers[kinds[step % len(kinds)]]()
            yield packed.row, packed.arrays
    context = multiprocessing.get_context("spawn")
    queues = [context.Queue(maxsize=6) for _ in range(workers)]
    for worker, queue in enumerate(queues):
        arguments = (queue, new, seed, worker, workers, first, tokens, focus)
        context.Process(target=_work, args=arguments, daemon=True).start()
    for step in range(first, 1 << 40):
        yield queues[(step - first) % workers].get()
