"""Staging: what a plan looks like on the device."""

from __future__ import annotations

import pytest
import torch

from millpond.errors import Broken
from millpond.nn.batch import Staging
from millpond.plan.step import Export, PageUpdate, Row, StepPlan
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
