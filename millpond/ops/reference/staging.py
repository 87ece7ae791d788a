"""The numbers of live rows: from counters and page tables to a step's tokens, and back again.

Knows the tables of all seats as tensors: counters [5 + K, C] int64, rows base, pending, first,
num_drafts, parity and K drafts, one column a seat and two more (the last but one takes what no seat
writes, the last is zero); pages [seats, Q] int64, negative where there is none. A negative seat
means none. Whole numbers only: every backend gives the same ones.
"""

from __future__ import annotations

import torch

from millpond.ops.batch import LiveTokens, Sampled, Settled, SingleTokens, VerifyRows
from millpond.ops.reference.sampling import count_accepted

COUNTERS = 5
"""Rows of the table of counters before the drafts."""

PAGE = 64
"""Positions of a page."""

NONE = -1


def stage_live(
    numbers: torch.Tensor, counters: torch.Tensor, pages: torch.Tensor, *, most: int
) -> LiveTokens:
    """Tokens and rows of live seats: numbers [6, B] int64, of each row its seat, input and output
    slot, drafts to verify, end and slot of its export. All of a row ends within `most` pages.

    Padding stands where the row's last token does; it has no page.
    """
    seats, _, _, wanted, _, _ = numbers.unbind()
    columns = counters.index_select(1, torch.where(seats < 0, counters.shape[1] - 1, seats))
    base, pending, first, made, parity = columns[:COUNTERS].unbind()
    drafts = torch.minimum(wanted, made)
    start = base + pending
    end = start + (1 + drafts) * (seats >= 0)
    token = torch.cat((first[None], columns[COUNTERS:])).T  # [B, K + 1]
    width = token.shape[1]
    place = torch.arange(width, device=seats.device)
    position = start[:, None] + torch.minimum(place, drafts[:, None])
    page = torch.where(place <= drafts[:, None], page_at(pages, seats[:, None], position), NONE)
    row = torch.arange(len(seats), device=seats.device)
    return LiveTokens(
        token_ids=token.flatten(),
        positions=position.flatten(),
        token_row=row[:, None].expand(-1, width).flatten(),
        token_page=page.flatten(),
        token_offset=(position % PAGE).flatten(),
        row_start=start,
        row_end=end,
        base=base,
        pending=pending,
        num_drafts=drafts,
        parity=parity,
        page_table=visible(pages, seats, end, most),
    )


def stage_singles(
    seats: torch.Tensor, positions: torch.Tensor, pages: torch.Tensor, *, most: int
) -> SingleTokens:
    """One token a row at positions [n]: where it is stored, and what its row sees of its pages.

    A position beyond the table has no page, and is told as the table's last.
    """
    page = page_at(pages, seats, positions)
    positions = positions.clamp(max=pages.shape[1] * PAGE - 1)
    end = positions + 1
    return SingleTokens(
        positions=positions,
        token_page=page,
        token_offset=positions % PAGE,
        row_end=end,
        page_table=visible(pages, seats, end, most),
    )


def settle(sampled: Sampled, tokens: torch.Tensor, rows: VerifyRows) -> Settled:
    """What becomes of rows that drew at all their places: `sampled` [B * (K + 1)], and tokens, as
    many, that stood there. A run of accepted drafts ends where logits are not finite.
    """
    places = sampled.token.view(-1, rows.width)
    sound = sampled.finite.view(-1, rows.width).long().cumprod(1).sum(1)
    drafts = tokens.view(-1, rows.width)[:, 1:]
    accepted = count_accepted(places, drafts, torch.minimum(rows.num_drafts, sound))
    base = rows.base + rows.pending + 1
    row = torch.arange(rows.num_rows, device=base.device)
    return Settled(
        accepted=accepted,
        token=places.gather(1, accepted[:, None]).squeeze(1),
        position=base + accepted,
        source=row * rows.width + accepted,
        base=base,
        parity=1 - rows.parity,
    )


def keep_counters(
    counters: torch.Tensor,
    seats: torch.Tensor,
    *,
    base: torch.Tensor,
    pending: torch.Tensor,
    first: torch.Tensor,
    num_drafts: torch.Tensor,
    parity: torch.Tensor,
    drafts: torch.Tensor,
) -> None:
    """Write the counters of `seats` [n], each at most once: [n] each, drafts [n, K]."""
    at = torch.where(seats < 0, counters.shape[1] - 2, seats)
    numbers = torch.stack((base, pending, first, num_drafts, parity))
    counters.index_copy_(1, at, torch.cat((numbers, drafts.T)))


def page_at(pages: torch.Tensor, seats: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The page of each position; none of no seat, and none beyond the table."""
    entry, last = positions // PAGE, pages.shape[1] - 1
    page = pages[seats.clamp(min=0), entry.clamp(max=last)]
    return torch.where((seats >= 0) & (entry <= last), page, NONE)


def visible(
    pages: torch.Tensor, seats: torch.Tensor, ends: torch.Tensor, most: int
) -> torch.Tensor:
    """Each row's first `most` pages up to its end; a seat may hold more, which no row may see."""
    table = pages[:, :most].index_select(0, seats.clamp(min=0))
    first_token = torch.arange(most, device=pages.device) * PAGE
    hidden = (first_token >= ends[:, None]) | (seats < 0)[:, None]
    return table.masked_fill(hidden, NONE)
