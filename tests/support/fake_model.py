"""A model of exact whole numbers on real arenas: what it read shows in its logits.

Linear layers fold tokens into a rolling checksum that starts from zero, so a state betrays which
tokens it has seen, in which order, how often. The attention layer stores token + 1 under every
position, and its checksum of what it reads back must be the same. The pool tail keeps the last four
tokens. Whatever does not fit, the hidden is not a number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from millpond.memory.arena import Arenas
from millpond.memory.layout import EntrySpec, ModelLayout, TensorSpec
from millpond.ops.batch import ForwardBatch, RowSlots

VOCAB = 64
MODULUS = 8191
POOL = 4
LINEAR_LAYERS = (0, 2)
ATTENTION_LAYER = 1


def fake_layout() -> ModelLayout:
    """Two linear layers, one indexed attention layer, boundary data."""
    slot = [
        t
        for layer in LINEAR_LAYERS
        for t in (
            TensorSpec(layer, "recurrent", (1, 1, 1), torch.float32),
            TensorSpec(layer, "conv", (1, 3), torch.float32),
        )
    ]
    slot.append(TensorSpec(-1, "boundary_hidden", (2,), torch.float32))
    return ModelLayout(
        slot=EntrySpec(tuple(slot)),
        page=EntrySpec((TensorSpec(ATTENTION_LAYER, "key", (1, 64, 1), torch.float32),)),
        seat=EntrySpec((TensorSpec(ATTENTION_LAYER, "tail", (POOL, 2, 1), torch.float32),)),
    )


def checksum(tokens: list[int]) -> int:
    """What a linear layer holds after these tokens."""
    value = 0
    for token in tokens:
        value = (value * 31 + token + 1) % MODULUS
    return value


def expected_token(tokens: list[int]) -> int:
    """The greedy token after `tokens`."""
    return checksum(tokens) % VOCAB


@dataclass
class FakeModel:
    """Follows the `Model` protocol; counts its forwards."""

    num_forwards: int = 0
    fail: BaseException | None = None
    layers_silent: set[int] = field(default_factory=set)  # layers that report no export

    def forward(self, batch: ForwardBatch, arenas: Arenas) -> torch.Tensor:
        """Hidden [T, 2]: the checksum and 0, or NaN where something read was not the row's own."""
        self.num_forwards += 1
        if self.fail is not None:
            raise self.fail
        entries = arenas.pages.view(ATTENTION_LAYER, "key")[:, 0, :, 0]
        entries[batch.token_page, batch.token_offset] = (batch.token_ids + 1).float()
        sums = [self._fold(layer, batch, arenas) for layer in LINEAR_LAYERS]
        attended = torch.tensor([self._attend(r, batch, arenas) for r in range(len(batch.seats))])
        last = torch.tensor(batch.prefill.lengths + batch.decode.lengths).cumsum(0) - 1
        good = sums[0] == sums[1]
        good[last] &= sums[0][last] == attended
        first = torch.where(good, sums[0], torch.full_like(sums[0], float("nan")))
        hidden = torch.stack((first, torch.zeros_like(first)), -1)
        done = 0
        for rows in (batch.prefill, batch.decode):
            part = hidden[done : done + rows.num_tokens]
            bank = arenas.slots.view(-1, "boundary_hidden")
            for index, folded, slot in self._targets(rows, -1):
                bank[slot] = part[int(rows.cu_seqlens[index]) + folded - 1]
            done += rows.num_tokens
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, VOCAB] fp32, highest at checksum % VOCAB."""
        top = hidden[:, :1].nan_to_num(0.0) % VOCAB
        logits = -(torch.arange(VOCAB)[None] - top).abs()
        return torch.where(hidden[:, :1].isnan(), torch.full_like(logits, float("nan")), logits)

    def _targets(self, rows: RowSlots, layer: int) -> list[tuple[int, int, int]]:
        targets = [(i, n, int(rows.state_out[i])) for i, n in enumerate(rows.lengths)]
        of_export, offset, slot = (
            x.tolist() for x in (rows.export_row, rows.export_offset, rows.export_slot)
        )
        if layer in self.layers_silent:
            slot = [-1] * len(slot)
        targets += list(zip(of_export, offset, slot, strict=True))
        rows.written.record(
            torch.tensor([t[2] for t in targets], dtype=torch.int64),
            torch.tensor([t[1] for t in targets], dtype=torch.int64),
        )
        return [t for t in targets if t[2] >= 0]

    def _fold(self, layer: int, batch: ForwardBatch, arenas: Arenas) -> torch.Tensor:
        """The checksum after every token [T]; writes states and windows of three tokens."""
        states = arenas.slots.view(layer, "recurrent")
        windows = arenas.slots.view(layer, "conv")
        out: list[float] = []
        for rows in (batch.prefill, batch.decode):
            before = [
                (float(states[s]), windows[s, 0].tolist()) if s >= 0 else (0.0, [0.0] * 3)
                for s in rows.state_in.tolist()
            ]
            after: list[list[tuple[float, list[float]]]] = []
            for row, length in enumerate(rows.lengths):
                value, window = before[row]
                steps = []
                for token in batch.token_ids[len(out) : len(out) + length].tolist():
                    value = (value * 31 + token + 1) % MODULUS
                    window = [*window[1:], float(token)]
                    steps.append((value, window))
                after.append(steps)
                out += [value for value, _ in steps]
            for row, folded, slot in self._targets(rows, layer):
                value, window = after[row][folded - 1]
                states[slot] = value
                windows[slot, 0] = torch.tensor(window)
        return torch.tensor(out)

    def _attend(self, row: int, batch: ForwardBatch, arenas: Arenas) -> float:
        """The checksum of entries 0 .. end-1 of the row's pages; NaN where the tail differs."""
        entries = arenas.pages.view(ATTENTION_LAYER, "key")[:, 0, :, 0]
        tail = arenas.seats.view(ATTENTION_LAYER, "tail")[int(batch.seats[row]), :, 0, 0]
        start, end = batch.starts[row], batch.ends[row]
        read = entries[batch.page_table[row]].reshape(-1)[:end].tolist()
        if not all(math.isfinite(x) for x in read):
            return float("nan")
        for position in range(start - start % POOL, end):
            if position >= start:
                tail[position % POOL] = read[position]
            elif float(tail[position % POOL]) != read[position]:
                return float("nan")
        return float(checksum([int(x) - 1 for x in read]))
