"""The numbers of live rows: kernels give the reference's, every one of them."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from millpond.ops.batch import Sampled, VerifyRows
from millpond.ops.reference import staging
from millpond.ops.triton.backend import BACKEND
from tests.ops.batches import ints

SEATS, PAGES = 7, 40


def tables(most: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Counters and pages of all seats; rows end within the pages each has."""
    draw = torch.Generator().manual_seed(seed)

    def numbers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=draw)

    counters = numbers(1000, 5 + most, SEATS + 2)
    counters[0] = numbers(64 * (PAGES - 2), SEATS + 2)
    counters[1] = numbers(most + 1, SEATS + 2)
    counters[3] = numbers(most + 1, SEATS + 2)
    counters[4] = numbers(2, SEATS + 2)
    counters[:, -1] = 0
    pages = torch.randperm(1000, generator=draw)[: SEATS * PAGES].view(SEATS, PAGES)
    held = numbers(PAGES, SEATS)[:, None]
    return counters, pages.masked_fill(torch.arange(PAGES) > held, -1)


def equal(found: object, expected: object) -> None:
    for field in fields(expected):  # type: ignore[arg-type]
        mine, theirs = (getattr(x, field.name).cpu() for x in (found, expected))
        assert mine.is_contiguous(), field.name
        assert torch.equal(mine, theirs.contiguous()), field.name


@pytest.mark.parametrize("most", [0, 1, 3, 4])
@pytest.mark.parametrize("reach", [PAGES, 17, 1])
def test_live_rows_are_staged_as_the_reference_does(
    most: int, reach: int, device: torch.device
) -> None:
    counters, pages = tables(most, seed=most)
    seats = ints([3, -1, 0, 6, -1])
    numbers = torch.full((6, 5), -1)
    numbers[0] = seats
    numbers[3] = ints([most, 0, min(1, most), 9, 0])
    found = BACKEND.ops["stage_live"](
        *(x.to(device) for x in (numbers, counters, pages)), most=reach
    )
    equal(found, staging.stage_live(numbers, counters, pages, most=reach))


@pytest.mark.parametrize("reach", [PAGES, 1])
def test_single_tokens_are_staged_as_the_reference_does(reach: int, device: torch.device) -> None:
    _, pages = tables(0, seed=9)
    seats = ints([3, -1, 0, 6, 2])
    positions = ints([64 * PAGES - 1, 5, 64 * PAGES, 70, 64 * PAGES + 200])
    found = BACKEND.ops["stage_singles"](
        *(x.to(device) for x in (seats, positions, pages)), most=reach
    )
    equal(found, staging.stage_singles(seats, positions, pages, most=reach))


def verify_rows(most: int, count: int, seed: int) -> VerifyRows:
    draw = torch.Generator().manual_seed(seed)
    base, pending, drafts, parity = (
        torch.randint(0, high, (count,), generator=draw) for high in (99, most + 1, most + 1, 2)
    )
    none = torch.full((count,), -1)
    return VerifyRows(
        width=most + 1,
        state_in=none,
        state_out=none,
        base=base,
        pending=pending,
        num_drafts=drafts,
        parity=parity,
        seats=torch.arange(count),
        export_end=none,
        export_slot=none,
    )


@pytest.mark.parametrize("most", [0, 1, 3, 4])
def test_drafts_are_accepted_as_by_the_reference(most: int, device: torch.device) -> None:
    """Of tokens that are few, so that runs of every length come up; some are of no numbers."""
    count = 200
    rows = verify_rows(most, count, seed=most)
    draw = torch.Generator().manual_seed(most)
    size = count * (most + 1)
    token = torch.randint(0, 2, (size,), generator=draw)
    tokens = torch.randint(0, 2, (size,), generator=draw)
    finite = torch.rand(size, generator=draw) < 0.9
    expected = staging.settle(Sampled(token, finite), tokens, rows)
    assert len(set(expected.accepted.tolist())) == most + 1
    there = VerifyRows(
        width=rows.width,
        **{
            field.name: getattr(rows, field.name).to(device)
            for field in fields(rows)
            if isinstance(getattr(rows, field.name), torch.Tensor)
        },
    )
    found = BACKEND.ops["settle"](
        Sampled(token.to(device), finite.to(device)), tokens.to(device), there
    )
    equal(found, expected)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_counters_are_kept_by_seat_and_of_no_seat_nothing_is(
    most: int, device: torch.device
) -> None:
    counters, _ = tables(most, seed=4)
    seats = ints([5, -1, 2, -1, 0])
    draw = torch.Generator().manual_seed(1)
    named = {
        name: torch.randint(0, 50, (5,), generator=draw)
        for name in ("base", "pending", "first", "num_drafts", "parity")
    }
    named["drafts"] = torch.randint(0, 50, (most, 5), generator=draw).T
    expected, there = counters.clone(), counters.to(device, copy=True)
    staging.keep_counters(expected, seats, **named)
    BACKEND.ops["keep_counters"](
        there, seats.to(device), **{name: value.to(device) for name, value in named.items()}
    )
    kept = [*range(SEATS), SEATS + 1]  # the one between takes what no seat writes
    assert torch.equal(there.cpu()[:, kept], expected[:, kept])
