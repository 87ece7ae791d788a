"""The numbers of live rows, one launch each where torch needs dozens.

Contract: `millpond.ops.reference.staging`, number for number. A program is one row, or some pages
of its table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millpond.ops.batch import LiveTokens, Sampled, Settled, SingleTokens, VerifyRows
from millpond.ops.reference.staging import COUNTERS, PAGE
from millpond.ops.triton.launch import quick
from millpond.ops.triton.shared import LAUNCH, power_of_two

LISTED = 1024
"""Entries of a page table that a program looks at."""

FIELDS = tl.constexpr(COUNTERS)
SIZE = tl.constexpr(PAGE)


def _jit(fn):
    """Nothing of these arguments is known before a step: neither values nor alignment."""
    arguments = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    names = [name for name in arguments if name not in fn.__annotations__]
    return quick(triton.jit(fn, do_not_specialize=names, do_not_specialize_on_alignment=names))


def stage_live(
    numbers: torch.Tensor, counters: torch.Tensor, pages: torch.Tensor, *, most: int
) -> LiveTokens:
    """As the reference."""
    rows, width = numbers.shape[1], counters.shape[0] - COUNTERS + 1
    of_token = torch.empty((5, rows * width), dtype=torch.int64, device=numbers.device)
    of_row = torch.empty((6, rows), dtype=torch.int64, device=numbers.device)
    table = torch.empty((rows, most), dtype=torch.int64, device=numbers.device)
    if rows:
        _live[(rows, max(1, triton.cdiv(most, LISTED)))](
            numbers, counters, pages, of_token, of_row, table,
            rows, counters.shape[1], pages.stride(0), pages.shape[1], most,
            WIDTH=width, PLACES=power_of_two(width), BLOCK=LISTED, num_warps=4, **LAUNCH,
        )  # fmt: skip
    tokens, positions, token_row, page, offset = of_token.unbind()
    start, end, base, pending, drafts, parity = of_row.unbind()
    return LiveTokens(
        token_ids=tokens,
        positions=positions,
        token_row=token_row,
        token_page=page,
        token_offset=offset,
        row_start=start,
        row_end=end,
        base=base,
        pending=pending,
        num_drafts=drafts,
        parity=parity,
        page_table=table,
    )


def stage_singles(
    seats: torch.Tensor, positions: torch.Tensor, pages: torch.Tensor, *, most: int
) -> SingleTokens:
    """As the reference."""
    rows = seats.shape[0]
    of_row = torch.empty((4, rows), dtype=torch.int64, device=seats.device)
    table = torch.empty((rows, most), dtype=torch.int64, device=seats.device)
    if rows:
        _singles[(rows, max(1, triton.cdiv(most, LISTED)))](
            seats.contiguous(), positions.contiguous(), pages, of_row, table,
            rows, pages.stride(0), pages.shape[1], most,
            BLOCK=LISTED, num_warps=4, **LAUNCH,
        )  # fmt: skip
    at, page, offset, end = of_row.unbind()
    return SingleTokens(
        positions=at, token_page=page, token_offset=offset, row_end=end, page_table=table
    )


def settle(sampled: Sampled, tokens: torch.Tensor, rows: VerifyRows) -> Settled:
    """As the reference."""
    count = rows.num_rows
    out = torch.empty((6, count), dtype=torch.int64, device=rows.base.device)
    if count:
        _settle[(count,)](
            sampled.token.contiguous(), sampled.finite.contiguous().view(torch.uint8),
            tokens.contiguous(), rows.base, rows.pending, rows.num_drafts, rows.parity, out, count,
            WIDTH=rows.width, num_warps=1, **LAUNCH,
        )  # fmt: skip
    accepted, token, position, source, base, parity = out.unbind()
    return Settled(
        accepted=accepted,
        token=token,
        position=position,
        source=source,
        base=base,
        parity=parity,
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
    """As the reference, but that of no seat nothing is written at all."""
    count, most = seats.shape[0], drafts.shape[1]
    if count:
        _keep[(count,)](
            counters, seats.contiguous(), base.contiguous(), pending.contiguous(),
            first.contiguous(), num_drafts.contiguous(), parity.contiguous(), drafts,
            counters.shape[1], drafts.stride(0), drafts.stride(1),
            MOST=most, PLACES=max(1, power_of_two(max(1, most))), num_warps=1, **LAUNCH,
        )  # fmt: skip


@triton.jit
def _show(pages, table, seat, row, end, page_stride, most, BLOCK: tl.constexpr):
    """Some of a row's pages up to its end, the others -1."""
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = tl.minimum(tl.where(seat >= 0, (end + (SIZE - 1)) // SIZE, 0), most)
    page = tl.load(pages + tl.maximum(seat, 0) * page_stride + entry, mask=entry < held, other=-1)
    tl.store(table + row * most + entry, page, mask=entry < most)


@triton.jit
def _page_of(pages, seat, position, page_stride, num_pages):
    """The page of positions of one seat; -1 of no seat and beyond the table."""
    entry = position // SIZE
    there = entry < tl.where(seat >= 0, num_pages, 0)
    return tl.load(pages + tl.maximum(seat, 0) * page_stride + entry, mask=there, other=-1)


@_jit
def _live(
    numbers, counters, pages, of_token, of_row, table,
    rows, columns, page_stride, num_pages, most,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, or some of its pages."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.cast(columns, tl.int64)
    rows = tl.cast(rows, tl.int64)
    seat = tl.load(numbers + row)
    wanted = tl.load(numbers + 3 * rows + row)
    column = tl.where(seat < 0, columns - 1, seat)
    base = tl.load(counters + column)
    pending = tl.load(counters + columns + column)
    made = tl.load(counters + 3 * columns + column)
    drafts = tl.minimum(wanted, made)
    start = base + pending
    end = tl.where(seat >= 0, start + 1 + drafts, start)
    _show(pages, table, seat, row, end, page_stride, tl.cast(most, tl.int64), BLOCK)
    if tl.program_id(1) == 0:
        place = tl.arange(0, PLACES)
        inside = place < WIDTH
        # `first` is the third row, the drafts begin at the sixth.
        source = tl.where(place == 0, 2, place + (FIELDS - 1)).to(tl.int64)
        token = tl.load(counters + source * columns + column, mask=inside, other=0)
        position = start + tl.minimum(place, drafts)
        filled = place <= drafts
        page = _page_of(pages, seat, position, page_stride, num_pages)
        at = of_token + row * WIDTH + place
        count = rows * WIDTH
        tl.store(at, token, mask=inside)
        tl.store(at + count, position, mask=inside)
        tl.store(at + 2 * count, place * 0 + row, mask=inside)
        tl.store(at + 3 * count, tl.where(filled, page, -1), mask=inside)
        tl.store(at + 4 * count, position % SIZE, mask=inside)
        tl.store(of_row + row, start)
        tl.store(of_row + rows + row, end)
        tl.store(of_row + 2 * rows + row, base)
        tl.store(of_row + 3 * rows + row, pending)
        tl.store(of_row + 4 * rows + row, drafts)
        tl.store(of_row + 5 * rows + row, tl.load(counters + 4 * columns + column))


@_jit
def _singles(
    seats, positions, pages, of_row, table, rows, page_stride, num_pages, most,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of one token, or some of its pages."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.cast(rows, tl.int64)
    seat = tl.load(seats + row)
    asked = tl.load(positions + row)
    position = tl.minimum(asked, tl.cast(num_pages, tl.int64) * SIZE - 1)
    _show(pages, table, seat, row, position + 1, page_stride, tl.cast(most, tl.int64), BLOCK)
    if tl.program_id(1) == 0:
        tl.store(of_row + row, position)
        tl.store(of_row + rows + row, _page_of(pages, seat, asked, page_stride, num_pages))
        tl.store(of_row + 2 * rows + row, position % SIZE)
        tl.store(of_row + 3 * rows + row, position + 1)


@_jit
def _settle(
    drawn, finite, tokens, base, pending, num_drafts, parity, out, count, WIDTH: tl.constexpr
):  # fmt: skip
    """One row: drafts are accepted while each is what was drawn in its place."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.cast(count, tl.int64)
    first = row * WIDTH
    drafts = tl.load(num_drafts + row)
    accepted = drafts * 0
    newest = tl.load(drawn + first)
    goes_on = tl.load(finite + first) != 0
    for place in tl.static_range(1, WIDTH):
        here = tl.load(tokens + first + place) == tl.load(drawn + first + place - 1)
        goes_on = goes_on & here & (place <= drafts)
        accepted += goes_on.to(tl.int64)
        newest = tl.where(goes_on, tl.load(drawn + first + place), newest)
        goes_on = goes_on & (tl.load(finite + first + place) != 0)
    end = tl.load(base + row) + tl.load(pending + row) + 1
    tl.store(out + row, accepted)
    tl.store(out + count + row, newest)
    tl.store(out + 2 * count + row, end + accepted)
    tl.store(out + 3 * count + row, first + accepted)
    tl.store(out + 4 * count + row, end)
    tl.store(out + 5 * count + row, 1 - tl.load(parity + row))


@_jit
def _keep(
    counters, seats, base, pending, first, num_drafts, parity, drafts,
    columns, row_stride, draft_stride, MOST: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """The counters of one seat."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.cast(columns, tl.int64)
    seat = tl.load(seats + row)
    if seat >= 0:
        at = counters + seat
        tl.store(at, tl.load(base + row))
        tl.store(at + columns, tl.load(pending + row))
        tl.store(at + 2 * columns, tl.load(first + row))
        tl.store(at + 3 * columns, tl.load(num_drafts + row))
        tl.store(at + 4 * columns, tl.load(parity + row))
        if MOST > 0:
            draft = tl.arange(0, PLACES).to(tl.int64)
            token = tl.load(
                drafts + row * row_stride + draft * draft_stride, mask=draft < MOST, other=0
            )
            tl.store(at + (FIELDS + draft) * columns, token, mask=draft < MOST)
