"""Staging: what a plan looks like on the device."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest
import torch

from millpond.errors import Broken
from millpond.nn.batch import Staging, pack_live
from millpond.nn.counters import Counters, SeatCounters
from millpond.plan.step import Export, PageUpdate, Row, StepPlan, VerifyRow
from millpond.state.lease import PageId, Seat, SlotId


def pages(*ids: int) -> tuple[PageId, ...]:
    return tuple(PageId(i) for i in ids)


def staging() -> Staging:
    made = Staging(num_seats=4, max_pages=4, device=torch.device("cpu"))
    made.update(
        (
            PageUpdate(Seat(2), 0, pages(7, 3)),
            PageUpdate(Seat(0), 0, pages(5)),
            PageUpdate(Seat(3), 0, pages(9, 1, 4)),
        )
    )
    return made


PLAN = StepPlan(
    step=1,
    prefill=(
        Row(
            request="a",
            seat=Seat(2),
            start=0,
            tokens=tuple(range(100, 228)),
            state_in=None,
            state_out=SlotId(4),
            exports=(Export(64, SlotId(6)), Export(128, SlotId(8))),
        ),
        Row(
            request="b",
            seat=Seat(3),
            start=128,
            tokens=(11, 12, 13),
            state_in=SlotId(1),
            state_out=SlotId(2),
        ),
    ),
    decode=(
        Row(
            request="c",
            seat=Seat(0),
            start=30,
            tokens=(21, 22),
            state_in=SlotId(0),
            state_out=SlotId(0),
        ),
    ),
)


def test_rows_are_packed_prefill_first_with_absolute_positions_and_their_pages() -> None:
    batch = staging().batch(PLAN, logits_at=(127, 132))
    assert batch.token_ids.tolist() == [*range(100, 228), 11, 12, 13, 21, 22]
    assert batch.positions.tolist() == [*range(128), 128, 129, 130, 30, 31]
    assert batch.token_row.tolist() == [0] * 128 + [1] * 3 + [2] * 2
    assert batch.token_page.tolist() == [7] * 64 + [3] * 64 + [4] * 3 + [5] * 2
    assert batch.token_offset.tolist() == [*range(64), *range(64), 0, 1, 2, 30, 31]
    assert batch.seats.tolist() == [2, 3, 0]
    assert (batch.starts, batch.ends) == ((0, 128, 30), (128, 131, 32))
    assert batch.row_start.tolist() == [0, 128, 30]
    assert batch.row_end.tolist() == [128, 131, 32]
    assert batch.page_table.tolist() == [[7, 3, -1], [9, 1, 4], [5, -1, -1]]
    assert batch.logits_at.tolist() == [127, 132]


def test_no_slot_is_negative_and_exports_name_row_and_tokens_folded() -> None:
    batch = staging().batch(PLAN, logits_at=())
    assert batch.prefill.lengths == (128, 3)
    assert batch.prefill.cu_seqlens.tolist() == [0, 128, 131]
    assert batch.prefill.state_in.tolist() == [-1, 1]
    assert batch.prefill.state_out.tolist() == [4, 2]
    assert batch.prefill.export_row.tolist() == [0, 0]
    assert batch.prefill.export_offset.tolist() == [64, 128]
    assert batch.prefill.export_slot.tolist() == [6, 8]
    assert batch.decode.lengths == (2,)
    assert batch.decode.cu_seqlens.tolist() == [0, 2]
    assert batch.decode.export_slot.numel() == 0


def test_a_row_sees_no_page_beyond_its_end() -> None:
    made = staging()
    short = StepPlan(
        step=1,
        decode=(
            Row(
                request="b",
                seat=Seat(3),
                start=63,
                tokens=(1,),
                state_in=SlotId(1),
                state_out=SlotId(1),
            ),
            Row(
                request="a",
                seat=Seat(2),
                start=100,
                tokens=(1,),
                state_in=SlotId(2),
                state_out=SlotId(2),
            ),
        ),
    )
    assert made.batch(short, ()).page_table.tolist() == [[9, -1], [7, 3]]


def test_a_seat_that_was_emptied_lets_no_row_read_its_old_pages() -> None:
    made = staging()
    made.empty((Seat(2),))
    assert made.page_table[2].tolist() == [-1, -1, -1, -1]
    with pytest.raises(Broken, match="holds 0 pages"):
        made.batch(PLAN, ())


def test_a_page_update_may_append_and_replace_but_leave_no_gap() -> None:
    made = staging()
    made.update((PageUpdate(Seat(2), 1, pages(6, 8)),))
    assert made.page_table[2].tolist() == [7, 6, 8, -1]
    for update in (PageUpdate(Seat(0), 2, pages(1)), PageUpdate(Seat(3), 3, pages(1, 2))):
        with pytest.raises(Broken):
            made.update((update,))


def live(seat: int, *, num_drafts: int, **given: int) -> VerifyRow:
    numbers = {"start": 0, "pending": 0, "state_in": 1, "state_out": 1, **given}
    export = numbers.pop("export", None)
    return VerifyRow(
        request="v",
        seat=Seat(seat),
        num_drafts=num_drafts,
        export=None if export is None else Export(export, SlotId(9)),
        start=numbers["start"],
        pending=numbers["pending"],
        state_in=SlotId(numbers["state_in"]),
        state_out=SlotId(numbers["state_out"]),
    )


def speculating() -> Staging:
    """As `staging`, with two drafts; seats 2 and 3 are live."""
    made = Staging(num_seats=4, max_pages=4, device=torch.device("cpu"), num_drafts=2)
    made.update(
        (
            PageUpdate(Seat(0), 0, pages(8)),
            PageUpdate(Seat(2), 0, pages(7, 3)),
            PageUpdate(Seat(3), 0, pages(9, 1, 4)),
        )
    )
    made.counters.put(
        torch.tensor([2, 3]),
        Counters(
            base=torch.tensor([61, 130]),
            pending=torch.tensor([1, 0]),
            first=torch.tensor([40, 50]),
            num_drafts=torch.tensor([2, 2]),
            parity=torch.tensor([1, 0]),
            drafts=torch.tensor([[41, 42], [51, 52]]),
        ),
    )
    return made


def test_verify_rows_are_made_of_the_seats_counters_and_come_last() -> None:
    verify = (
        live(2, num_drafts=2, start=61, pending=1, state_in=3, state_out=5, export=62),
        live(-1, num_drafts=2, state_in=-1, state_out=-1),
        live(3, num_drafts=1, start=130, state_in=6, state_out=6),
    )
    decode = Row(
        request="d",
        seat=Seat(3),
        start=7,
        tokens=(8, 9),
        state_in=SlotId(0),
        state_out=SlotId(0),
    )
    batch = speculating().batch(StepPlan(step=1, decode=(decode,), verify=verify), (0,))
    rows = batch.verify
    assert rows is not None
    assert batch.first_verify_token == 2
    assert batch.token_row.tolist() == [0, 0, *[1] * 3, *[2] * 3, *[3] * 3]
    filled = rows.filled.flatten().tolist()
    assert filled == [True] * 3 + [False] * 3 + [True] * 2 + [False]
    there = [i + 2 for i, f in enumerate(filled) if f]
    assert batch.token_ids[there].tolist() == [40, 41, 42, 50, 51]
    assert batch.positions[there].tolist() == [62, 63, 64, 130, 131]
    assert batch.token_page.tolist() == [9, 9, 7, 7, 3, -1, -1, -1, 4, 4, -1]
    assert batch.token_offset[there].tolist() == [62, 63, 0, 2, 3]
    assert batch.row_start.tolist() == [7, 62, 0, 130]
    assert batch.row_end.tolist() == [9, 65, 0, 132]
    assert batch.page_table.tolist() == [[9, -1, -1], [7, 3, -1], [-1] * 3, [9, 1, 4]]
    assert (rows.base.tolist(), rows.pending.tolist()) == ([61, 0, 130], [1, 0, 0])
    assert (rows.num_drafts.tolist(), rows.parity.tolist()) == ([2, 0, 1], [1, 0, 0])
    assert (rows.state_in.tolist(), rows.state_out.tolist()) == ([3, -1, 6], [5, -1, 6])
    exports = (rows.export_end, rows.export_slot)
    assert [x.tolist() for x in exports] == [[62, -1, -1], [9, -1, -1]]


def test_of_verify_rows_the_host_tells_bounds() -> None:
    rows = (live(3, num_drafts=2, start=128, pending=2),)
    batch = speculating().batch(StepPlan(step=1, verify=rows), ())
    assert (batch.starts, batch.ends) == ((128,), (133,))
    assert batch.row_start.tolist() == [130]


def test_no_plan_without_verify_rows_has_any() -> None:
    assert speculating().batch(StepPlan(step=1), ()).verify is None


def test_a_verify_row_beyond_its_seats_pages_is_broken() -> None:
    rows = (live(2, num_drafts=2, start=124, pending=2),)
    with pytest.raises(Broken, match="ends at 129"):
        speculating().batch(StepPlan(step=1, verify=rows), ())


def test_a_seat_that_was_emptied_has_no_drafts() -> None:
    made = speculating()
    made.empty((Seat(2),))
    seats = torch.tensor([2, 3])
    assert made.counters.of(seats).num_drafts.tolist() == [0, 2]
    assert made.counters.of(seats).position.tolist() == [0, 130]


def test_what_no_seat_writes_nobody_reads() -> None:
    counters = SeatCounters(3, 1, torch.device("cpu"))
    ones = torch.ones(2, dtype=torch.int64)
    put = Counters(
        base=ones, pending=ones, first=ones, num_drafts=ones, parity=ones, drafts=ones[:, None]
    )
    counters.put(torch.tensor([-1, 1]), put)
    assert counters.of(torch.tensor([-1, 0, 1, 2])).base.tolist() == [0, 0, 1, 0]


def test_single_tokens_stand_where_the_device_says_and_have_no_slot() -> None:
    seats, tokens = torch.tensor([3, -1, 2]), torch.tensor([5, 6, 7])
    batch = speculating().singles(seats, tokens, torch.tensor([191, 3, 128]), (200, 200, 140))
    assert batch.token_ids.tolist() == [5, 6, 7]
    assert batch.token_page.tolist() == [4, -1, -1]  # seat 2 has no third page
    assert batch.row_end.tolist() == [192, 4, 129]
    assert batch.page_table.tolist() == [[9, 1, 4, -1], [-1] * 4, [7, 3, -1, -1]]
    assert batch.decode.lengths == (1, 1, 1)
    assert batch.decode.state_in.tolist() == batch.decode.state_out.tolist() == [-1] * 3
    beyond = speculating().singles(seats[:1], tokens[:1], torch.tensor([256]), (270,))
    assert (beyond.token_page.tolist(), beyond.ends) == ([-1], (256,))
    assert beyond.positions.tolist() == [255]


def strided(made: object) -> list[str]:
    """Fields of a batch, and of its rows, that are no plain run of numbers."""
    found = []
    for field in fields(made):  # type: ignore[arg-type]
        value = getattr(made, field.name)
        if isinstance(value, torch.Tensor) and not value.is_contiguous():
            found.append(field.name)
        if is_dataclass(value):
            found += [f"{field.name}.{name}" for name in strided(value)]
    return found


def test_what_kernels_read_by_row_or_token_is_contiguous() -> None:
    """They are told addresses, and that of one number leads to the next."""
    made = speculating()
    rows = (live(2, num_drafts=2, start=61, pending=1), live(3, num_drafts=1, start=130))
    known = PLAN.decode[:1]
    for batch in (
        made.batch(StepPlan(step=1, decode=known, verify=rows), (0,)),
        made.batch(StepPlan(step=1, verify=rows), ()),
        staging().batch(PLAN, (3, 4)),
        made.live(torch.from_numpy(pack_live(rows, 4)), 4),
        made.singles(
            torch.tensor([2, 3]), torch.tensor([5, 6]), torch.tensor([63, 131]), (64, 140)
        ),
    ):
        assert strided(batch) == []


def test_live_rows_by_themselves_are_those_of_a_plan_and_others_have_no_seat() -> None:
    rows = (
        live(2, num_drafts=2, start=61, pending=1, state_in=3, state_out=5, export=62),
        live(3, num_drafts=1, start=130, state_in=6, state_out=6),
    )
    made = speculating()
    numbers = torch.from_numpy(pack_live(rows, 4))
    batch, planned = made.live(numbers, 4), made.batch(StepPlan(step=1, verify=rows), range(6))
    assert batch.verify is not None
    assert planned.verify is not None
    for field in fields(batch.verify):
        value = getattr(batch.verify, field.name)
        if isinstance(value, torch.Tensor):
            assert value[:2].tolist() == getattr(planned.verify, field.name).tolist()
    for name in ("token_ids", "positions", "token_row", "token_page", "token_offset"):
        assert getattr(batch, name)[:6].tolist() == getattr(planned, name).tolist()
    assert batch.page_table[:2, :3].tolist() == planned.page_table.tolist()
    assert batch.verify.seats[2:].tolist() == [-1, -1]
    assert not batch.verify.filled[2:].any()
    for name in ("state_in", "state_out", "export_end", "export_slot"):
        assert getattr(batch.verify, name)[2:].tolist() == [-1, -1]
    assert batch.token_page[6:].tolist() == [-1] * 6
    assert batch.page_table[2:].eq(-1).all()
    assert batch.row_end[2:].tolist() == [0, 0]
    assert set(batch.ends) == {4 * 64}
