"""The contract between the host tower and the device tower: one frozen plan in, one report out.

Everything here is plain data (ints, strings, tuples), so that a plan can cross a process boundary
as it is. On the host "no slot" is None; the device stages it as a negative id.
"""

from __future__ import annotations

from collections.abc import Callable
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


class VerifyRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A live sequence's share of a forward with drafts; its tokens are on the device, by seat.

    Folds the `pending` drafts accepted last time and the certain token after them, which leaves the
    state with end `start + pending + 1` in `state_out`, then runs `num_drafts` drafts for their
    outputs only. Every token after the certain one draws; a draft is accepted when it is what was
    drawn in its place. The device's own counts decide; of the host's, `start` is exact, and
    `pending` too unless the step before is in flight: then it is the most there can be. `export` is
    conditional: in force only where the row folds token `export.end - 1`.
    """

    request: str
    seat: Seat
    start: int
    pending: int
    num_drafts: int
    state_in: SlotId
    state_out: SlotId
    export: Export | None = None

    @property
    def end(self) -> int:
        """The end of the state the row leaves in `state_out`, at most."""
        return self.start + self.pending + 1


class SeatLoad(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request takes a seat: sampling data is installed, page table emptied, tails cleared.

    The seat is live again, and may be in a verify row, once it has drawn a token in a later row.

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


class SeatMask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Which tokens a seat may draw in this step, by place; None: all.

    A known row draws at one place, a verify row at `num_drafts + 1`: after its certain token, and
    after each draft; of one that is told fewer, fewer drafts count. Bit `t % 8` of byte `t // 8`
    allows token t; `ceil(vocab_size / 32)` words of four bytes.
    """

    seat: Seat
    places: tuple[bytes | None, ...]


class Drafts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The drafts that wait at a seat for the next step to verify them."""

    seat: Seat
    tokens: tuple[int, ...]


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One forward.

    Order on the device: poison, seat loads, page updates, forward, sample, fan out, propose drafts
    for every seat that drew. Tokens are packed prefill, decode, verify. `masks` bind some of the
    seats that draw; of those in `tell_drafts`, the drafts are reported. With `draws_later` the
    forward is all that is launched: nothing is drawn until the masks are told, for they need tokens
    of the step before.
    """

    step: int
    prefill: tuple[Row, ...] = ()
    decode: tuple[Row, ...] = ()
    verify: tuple[VerifyRow, ...] = ()
    seat_loads: tuple[SeatLoad, ...] = ()
    page_updates: tuple[PageUpdate, ...] = ()
    fan_outs: tuple[FanOut, ...] = ()
    masks: tuple[SeatMask, ...] = ()
    tell_drafts: tuple[Seat, ...] = ()
    draws_later: bool = False
    poison_slots: tuple[SlotId, ...] = ()
    poison_pages: tuple[PageId, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model: known ones, and drafts."""
        known = sum(len(row.tokens) for row in self.prefill + self.decode)
        return known + sum(1 + row.num_drafts for row in self.verify)


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


class Verified(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Of `drafted` drafts of a verify row, the first `accepted` were what the model drew itself."""

    seat: Seat
    drafted: int
    accepted: int


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
    """What a step really did: the tokens drawn and the (slot, end) pairs all layers wrote.

    `emitted` holds one token for each drawing seat of the known rows, then for each verify row its
    accepted drafts and one more; `verified` follows the verify rows. Of a run of tokens only the
    last may not be finite. `drafts` are those the plan asks to be told.
    """

    step: int
    emitted: tuple[Emitted, ...] = ()
    verified: tuple[Verified, ...] = ()
    written: tuple[Written, ...] = ()
    prompt_logprobs: tuple[RowLogprobs, ...] = ()
    drafts: tuple[Drafts, ...] = ()


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What the device tower offers, fixed once it is built."""

    num_slots: int
    num_pages: int
    num_seats: int
    export_granularity: int  # an export is possible at absolute multiples of this
    vocab_size: int
    max_position: int  # tokens a sequence may hold
    num_draft_tokens: int = 0  # drafts a live sequence may verify in a step
    runs_ahead: bool = False  # live sequences verify, also no drafts: two plans may be in flight


class Launched(Protocol):
    """A plan that was handed to the device."""

    def draw(self, masks: tuple[SeatMask, ...]) -> None:
        """Launch the draws of a plan that `draws_later`, with its masks; before `result`."""

    def result(self) -> StepResult:
        """Wait for the step's end. Raises `StepFailed`: then nothing of it may be relied on."""


class Executor(Protocol):
    """Runs plans in the order in which they are launched."""

    @property
    def capabilities(self) -> Capabilities:
        """Fixed facts about the device tower."""

    def launch(self, plan: StepPlan) -> Launched:
        """Hand over a plan; what goes wrong with it is raised by its result.

        At most two are in flight, launched and not asked for their result, and the second one only
        where the device tower `runs_ahead`.
        """

    def close(self) -> None:
        """Give back the device."""


class Ended:
    """A step that has ended already: what an executor that runs plans inline has launched."""

    __slots__ = ("_outcome",)

    def __init__(self, outcome: StepResult | Exception) -> None:
        self._outcome = outcome

    @classmethod
    def inline(cls, run: Callable[[StepPlan], StepResult], plan: StepPlan) -> Ended:
        """Run a plan to its end, here and now."""
        try:
            return cls(run(plan))
        except Exception as error:  # noqa: BLE001 -- raised where the result is asked for
            return cls(error)

    @property
    def failed(self) -> bool:
        """Whether the result raises."""
        return isinstance(self._outcome, Exception)

    def draw(self, masks: tuple[SeatMask, ...]) -> None:
        """Do nothing: no draw waits for masks."""
        del masks

    def result(self) -> StepResult:
        """What the step came to. Raises what it raised."""
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome
