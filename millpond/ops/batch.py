"""One forward as device tensors: what every op and layer reads, and what sampling
returns; knows no plan and no model.

Shape letters: T packed tokens (prefill rows first, then decode rows, then verify rows), N rows in
that same order, E exports, M positions whose logits are wanted, P pages of the longest row; of
verify rows: B rows, K drafts at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

BLANKS = 16
"""Entries of a log that are allocated at a time."""


class WriteLog:
    """What the ops of one forward wrote to slots: one entry a call, in the order of the calls.

    An entry is a pair of int64 tensors [n], or one [2, n]: the slots, and how many tokens of its
    row each state folds beyond the row's start. All calls name the same n targets in the same
    order: the ends of the rows, then exports. Nothing is copied to the host until `agreed` is asked
    for.
    """

    __slots__ = ("_blanks", "entries")

    def __init__(self) -> None:
        self.entries: list[tuple[torch.Tensor, torch.Tensor] | torch.Tensor] = []
        self._blanks: list[torch.Tensor] = []

    def record(self, slots: torch.Tensor, folded: torch.Tensor) -> None:
        """One call wrote `slots` [n] (negative ids: skipped, and not reported)."""
        self.entries.append((slots, folded))

    def blank(self, targets: int, device: torch.device) -> torch.Tensor:
        """A new entry [2, targets] int64, all -1, for one call to fill in; see `record_report`.

        `BLANKS` are allocated at a time, since each layer of a step needs one or two.
        """
        if not self._blanks:
            many = torch.full((BLANKS, 2, targets), -1, dtype=torch.int64, device=device)
            self._blanks += many.unbind()
        return self._blanks.pop()

    def record_report(self, report: torch.Tensor) -> None:
        """Add an entry [2, n] that one call fills in: slots, then tokens folded."""
        self.entries.append(report)

    def common(self) -> torch.Tensor:
        """By target, the slot and the tokens folded that every call wrote: [2, n] int64, on the
        device; slot -1 where they differ, or nobody wrote. [2, 0] without a call.
        """
        if not self.entries:
            return torch.zeros((2, 0), dtype=torch.int64)
        columns = list[torch.Tensor]()
        for entry in self.entries:
            columns += (entry.view(-1),) if isinstance(entry, torch.Tensor) else entry
        calls = torch.cat(columns).view(len(self.entries), 2, -1)
        same = (calls == calls[0]).flatten(0, 1).all(0)
        return torch.where(same & (calls[0, 0] >= 0), calls[0], -1)

    def agreed(self) -> frozenset[tuple[int, int]]:
        """The (slot, folded) pairs that every recorded call wrote; waits for the device."""
        slots, folded = self.common().tolist()
        return frozenset(pair for pair in zip(slots, folded, strict=True) if pair[0] >= 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSlots:
    """Packed rows of one form, and the slots each reads and writes.

    `lengths` repeats `cu_seqlens` on the host, so that shapes need no device read. A negative slot
    means none: reading it is the zero state, writing it is skipped. Every op that writes slots
    records in `written` what it wrote.
    """

    lengths: tuple[int, ...]  # tokens of each row
    cu_seqlens: torch.Tensor  # [N + 1] int64, offsets into this form's tokens
    state_in: torch.Tensor  # [N] int64
    state_out: torch.Tensor  # [N] int64
    export_row: torch.Tensor  # [E] int64, index of the row (of this form)
    export_offset: torch.Tensor  # [E] int64, tokens of the row folded before the export, >= 1
    export_slot: torch.Tensor  # [E] int64
    written: WriteLog = field(default_factory=WriteLog, compare=False)

    @property
    def num_rows(self) -> int:
        """Rows of this form."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Packed tokens of this form."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRows:
    """Rows that fold what was accepted last time and one certain token, then verify drafts.

    Row b folds the `pending[b]` drafts whose raw inputs its seat's ring holds in bank `parity[b]`,
    then `first`, the certain token: the slot that ends at `base` becomes one that ends at `base +
    pending + 1`, written once. Its drafts follow for outputs only; their raw inputs go to the
    ring's other bank. The packed tokens are `width` = K + 1 places a row: `first` (at position
    `base + pending`), `num_drafts` drafts, padding. Replayed tokens have no place among them.

    Counters are read on the device alone: shapes come from B and K. Negative slots and seats mean
    none; a row of no seat has no token at all. A row has one conditional export or none: the state
    as of `export_end`, if this step passes it. What is written is told as `[2 B]` entries, the
    rows' own ends first, then their exports; `written` counts tokens from `base`.
    """

    width: int  # K + 1
    state_in: torch.Tensor  # [B] int64, may be shared between rows
    state_out: torch.Tensor  # [B] int64
    base: torch.Tensor  # [B] int64, end of `state_in`
    pending: torch.Tensor  # [B] int64, 0 .. K
    num_drafts: torch.Tensor  # [B] int64, 0 .. K
    parity: torch.Tensor  # [B] int64, 0 or 1
    seats: torch.Tensor  # [B] int64
    export_end: torch.Tensor  # [B] int64, absolute; written if base < end <= base + pending + 1
    export_slot: torch.Tensor  # [B] int64
    written: WriteLog = field(default_factory=WriteLog, compare=False)

    @property
    def num_rows(self) -> int:
        """B."""
        return self.state_in.shape[0]

    @property
    def num_tokens(self) -> int:
        """Packed tokens of this form, padding included."""
        return self.num_rows * self.width

    @property
    def filled(self) -> torch.Tensor:
        """Which places hold a token, the others are padding: [B, K + 1] bool."""
        place = torch.arange(self.width, device=self.seats.device)
        return (place <= self.num_drafts[:, None]) & (self.seats >= 0)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """Everything a model needs to know about one forward.

    Of verify rows the host knows bounds only: `starts` from below, `ends` from above. Their padding
    has page -1, any token id and any position; `row_end` does not count it.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, absolute
    token_row: torch.Tensor  # [T] int64, index into the N rows
    token_page: torch.Tensor  # [T] int64, page a token's KV goes to
    token_offset: torch.Tensor  # [T] int64, its place within that page
    prefill: RowSlots  # the first `prefill.num_tokens` tokens, chunk form
    decode: RowSlots  # the next `decode.num_tokens`, per-token form
    row_start: torch.Tensor  # [N] int64, position of each row's first token
    row_end: torch.Tensor  # [N] int64, position after its last
    starts: tuple[int, ...]  # row_start on the host
    ends: tuple[int, ...]  # row_end on the host
    seats: torch.Tensor  # [N] int64
    page_table: torch.Tensor  # [N, P] int64, negative beyond a row's pages
    logits_at: torch.Tensor  # [M] int64, indices into the T tokens
    verify: VerifyRows | None = None  # the last `verify.num_tokens`

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens in chunk form; they come first."""
        return self.prefill.num_tokens

    @property
    def first_verify_token(self) -> int:
        """Tokens before those of the verify rows."""
        return self.prefill.num_tokens + self.decode.num_tokens


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row. Where `finite` is False the model's logits were not: ignore the token."""

    token: torch.Tensor  # [M] int64
    finite: torch.Tensor  # [M] bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTokens:
    """The tokens of B live rows, K + 1 places each, and the rows' counters; all int64.

    As the fields of `ForwardBatch` and `VerifyRows` of those names.
    """

    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    token_row: torch.Tensor  # [T]
    token_page: torch.Tensor  # [T]
    token_offset: torch.Tensor  # [T]
    row_start: torch.Tensor  # [B]
    row_end: torch.Tensor  # [B]
    base: torch.Tensor  # [B]
    pending: torch.Tensor  # [B]
    num_drafts: torch.Tensor  # [B]
    parity: torch.Tensor  # [B]
    page_table: torch.Tensor  # [B, P]


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleTokens:
    """n rows of one token; all int64. As the fields of `ForwardBatch` of those names."""

    positions: torch.Tensor  # [n]
    token_page: torch.Tensor  # [n]
    token_offset: torch.Tensor  # [n]
    row_end: torch.Tensor  # [n]
    page_table: torch.Tensor  # [n, P]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What verify rows have come to, [B] int64 each: from where their next step goes on."""

    accepted: torch.Tensor  # drafts that were drawn in their places
    token: torch.Tensor  # the newest token
    position: torch.Tensor  # where it stands
    source: torch.Tensor  # the row's place that it was drawn from, among all places
    base: torch.Tensor  # end of the output slot
    parity: torch.Tensor  # the ring bank that holds the accepted drafts' inputs
