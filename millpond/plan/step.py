"""The contract between the host tower and the device tower: one frozen plan in, one report out.

Everything here is plain data (ints, strings, tuples), so that a plan can cross a process boundary as
it is. On the host "no slot" is None; the device stages it as a negative id.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from millpond.plan.sampling import SamplingParams
from millpond.state.lease import PageId, Seat, SlotId

PAGE_SIZE = 64
"""Tokens per page, and the absolute grid on which prefill chunks lie."""


class Export(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Write the state after token `end - 1` of the row into `slot` (absolute position)."""

    end: int
    slot: SlotId


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One sequence's share of a forward: tokens `start .. start + len(tokens) - 1` are folded.

    `state_in` is None exactly when `start` is 0 (the zero state). In a plan's `prefill` the row is
    folded in chunk form and starts on the page grid; in `decode` it is folded in per-token form and
    holds one token, or several known ones when generated tokens are recomputed after a preemption.
    `emit_seats` lists the seats that draw a token from the logits after the row's last token: none,
    the row's own seat, or all seats of a fan-out. `prompt_logprobs` asks for log probabilities of
    the row's own successors: tokens `start + 1 ..`, then `next_token` where it is known.
    """

    request: str
    seat: Seat
    start: int
    tokens: tuple[int, ...]
    state_in: SlotId | None
    state_out: SlotId
    exports: tuple[Export, ...] = ()
    emit_seats: tuple[Seat, ...] = ()
    prompt_logprobs: int | None = None
    next_token: int | None = None

    @property
    def end(self) -> int:
        """The end of the state the row leaves in `state_out`."""
        return self.start + len(self.tokens)


class SeatLoad(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request takes a seat: its sampling data is installed, its page table emptied, tails cleared.

    `tokens` are all tokens known so far (prompt, then what it generated before a preemption), of
    which the first `prompt_len` are the prompt: the sampler counts them for penalties.
    """

    seat: Seat
    request: str
    sample_index: int
    params: SamplingParams
    tokens: tuple[int, ...]
    prompt_len: int


class PageUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Entries `first ..` of a seat's page table become `pages`."""

    seat: Seat
    first: int
    pages: tuple[PageId, ...]


class FanOut(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """After the forward, give `target` seat what `source` seat holds outside whole pages.

    The source's pool tail goes to the target; `source_page` (its partial page) is copied to
    `target_page`, both None where the prompt ends on the page grid.
    """

    source: Seat
    target: Seat
    source_page: PageId | None
    target_page: PageId | None


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One forward. Order on the device: poison, seat loads, page updates, forward, sample, fan out."""

    step: int
    prefill: tuple[Row, ...] = ()
    decode: tuple[Row, ...] = ()
    seat_loads: tuple[SeatLoad, ...] = ()
    page_updates: tuple[PageUpdate, ...] = ()
    fan_outs: tuple[FanOut, ...] = ()
    poison_slots: tuple[SlotId, ...] = ()
    poison_pages: tuple[PageId, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens folded by the forward."""
        return sum(len(r.tokens) for r in self.prefill) + sum(len(r.tokens) for r in self.decode)


class Emitted(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One drawn token. `logprob` and `top` (id, logprob) are set when asked for.

    `finite` is False when the logits held a NaN or an infinity that no filter put there; then
    `token` is meaningless and nothing of the request may be published.
    """

    seat: Seat
    token: int
    finite: bool = True
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The log probability of a known token at its position, with the most likely alternatives."""

    position: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RowLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt log probabilities of one row, by position."""

    request: str
    entries: tuple[TokenLogprob, ...]


class Written(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Every layer reports that `slot` now holds the state with this `end`."""

    slot: SlotId
    end: int


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step really did: the tokens drawn and the (slot, end) pairs all layers wrote."""

    step: int
    emitted: tuple[Emitted, ...] = ()
    written: tuple[Written, ...] = ()
    prompt_logprobs: tuple[RowLogprobs, ...] = ()


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What the device tower offers, fixed once it is built."""

    num_slots: int
    num_pages: int
    num_seats: int
    export_granularity: int  # an export is possible at absolute multiples of this
    vocab_size: int
    max_position: int  # tokens a sequence may hold


class Executor(Protocol):
    """Runs plans, one at a time, in order."""

    @property
    def capabilities(self) -> Capabilities:
        """Fixed facts about the device tower."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan to its end. Raises `StepFailed`: then nothing of it may be relied on."""

    def close(self) -> None:
        """Give back the device."""
