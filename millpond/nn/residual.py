"""All that happens to the residual stream between mixers: norms, hyper-connections, its end.

Knows the boundary hidden of a slot: the model's final hidden vector at the slot's end - 1, from
which the draft layer makes its entry for the token that follows.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from millpond.memory.arena import Arenas
from millpond.memory.layout import TensorSpec
from millpond.nn.linear import TensorSource
from millpond.ops.batch import ForwardBatch
from millpond.ops.bind import Bound

BOUNDARY_LAYER = -1
BOUNDARY_NAME = "boundary_hidden"
RING_NAME = "ring_hidden"


def boundary_tensors(
    hidden: int, *, num_drafts: int, dtype: torch.dtype
) -> tuple[TensorSpec, tuple[TensorSpec, ...]]:
    """What the end of the stream keeps in a slot, and in a seat of the drafts it verifies."""
    ring = TensorSpec(BOUNDARY_LAYER, RING_NAME, (2, num_drafts, hidden), dtype)
    return (
        TensorSpec(BOUNDARY_LAYER, BOUNDARY_NAME, (hidden,), dtype),
        (ring,),
    )


class RMSNorm:
    """x [..., size]: normalised in fp32, rounded, then times the weight."""

    zero_centred: ClassVar[bool] = False

    def __init__(self, weights: TensorSource, name: str, size: int, eps: float, ops: Bound) -> None:
        self.weight = weights.take(name, (size,))
        self.eps = eps
        self.ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: torch.Tensor, y: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x + y [T, size] (or x) normalised, and the sum."""
        return self.ops.add_norm(x, y, self.weight, eps=self.eps, zero_centred=self.zero_centred)


class ZeroCentredRMSNorm(RMSNorm):
    """x [..., size]: normalised and times 1 + weight in fp32, rounded once."""

    zero_centred: ClassVar[bool] = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.zero_centred_rms_norm(x, self.weight, self.eps)


class HyperConnection:
    """Several residual streams around one sub-layer (mHC): collapse before it, spread after it.

    Tensors `key_fn` [(2 + n) n, n hidden], `key_base` [(2 + n) n], `key_scale` [3], kept in fp32.
    """

    def __init__(
        self,
        weights: TensorSource,
        key: str,
        *,
        streams: int,
        hidden: int,
        iterations: int,
        hyper_eps: float,
        norm_eps: float,
        ops: Bound,
    ) -> None:
        rows = (2 + streams) * streams
        self.fn = weights.take(f"{key}_fn", (rows, streams * hidden), dtype=torch.float32)
        self.base = weights.take(f"{key}_base", (rows,), dtype=torch.float32)
        self.scale = weights.take(f"{key}_scale", (3,), dtype=torch.float32)
        self.iterations = iterations
        self.hyper_eps = hyper_eps
        self.norm_eps = norm_eps
        self.ops = ops

    def collapse(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """streams [T, n, hidden] -> the sub-layer's input [T, hidden], and what `spread` needs."""
        post, mix, x = self.ops.hyper_pre(
            streams,
            self.fn,
            self.base,
            self.scale,
            iterations=self.iterations,
            hyper_eps=self.hyper_eps,
            norm_eps=self.norm_eps,
        )
        return x, post, mix

    def spread(
        self, y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
    ) -> torch.Tensor:
        """The sub-layer's output [T, hidden] into the mixed streams [T, n, hidden]."""
        return self.ops.hyper_post(y, streams, post, mix)


def hidden_before(
    hidden: torch.Tensor, batch: ForwardBatch, arenas: Arenas, ops: Bound
) -> torch.Tensor:
    """The final hidden vector of the token before each token: hidden [T, H] -> [T, H].

    A row's first token has it from the slot the row resumes from, or from the last draft that the
    row replays; at position 0 it is zero. Call before `store_boundary`: a row that runs in place
    reads and writes one slot.
    """
    bank = arenas.slots.view(BOUNDARY_LAYER, BOUNDARY_NAME)
    middle, rows = batch.first_verify_token, batch.verify
    if rows is None or not rows.num_rows:
        return _before_known(hidden, bank, batch)
    ring = arenas.seats.view(BOUNDARY_LAYER, RING_NAME)
    of_verify = ops.hidden_before_verify(hidden[middle:], bank=bank, ring=ring, rows=rows)
    if not middle:
        return of_verify
    return torch.cat((_before_known(hidden[:middle], bank, batch), of_verify))


def _before_known(hidden: torch.Tensor, bank: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    """As `hidden_before`, of prefill and decode rows: hidden [T, H] of their tokens alone."""
    slots = torch.cat((batch.prefill.state_in, batch.decode.state_in))
    some = (slots >= 0)[:, None]
    resumed = torch.where(some, bank.index_select(0, slots.clamp(min=0)), 0.0)
    first = torch.cat(
        (
            batch.prefill.cu_seqlens[:-1],
            batch.decode.cu_seqlens[:-1] + batch.num_prefill_tokens,
        )
    )
    previous = torch.cat((hidden.new_zeros((1, hidden.shape[1])), hidden))[:-1]
    previous[first] = resumed.to(hidden.dtype)
    return previous


def store_boundary(hidden: torch.Tensor, batch: ForwardBatch, arenas: Arenas, ops: Bound) -> None:
    """Every slot this forward writes gets the final hidden [T, H] of its last folded token."""
    bank = arenas.slots.view(BOUNDARY_LAYER, BOUNDARY_NAME)
    middle, end = batch.num_prefill_tokens, batch.first_verify_token
    for part, rows in ((hidden[:middle], batch.prefill), (hidden[middle:end], batch.decode)):
        if rows.num_rows:
            ops.boundary_store(part, bank=bank, rows=rows)
    if batch.verify is not None and batch.verify.num_rows:
        ring = arenas.seats.view(BOUNDARY_LAYER, RING_NAME)
        ops.boundary_verify(hidden[end:], bank=bank, ring=ring, rows=batch.verify)
