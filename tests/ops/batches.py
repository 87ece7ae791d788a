"""Batches for op tests, built by hand: rows with chosen starts, slots, seats, scattered pages."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from millpond.ops.batch import ForwardBatch, RowSlots

PAGE = 64


def ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def make_rows(
    lengths: Sequence[int],
    state_in: Sequence[int] | None = None,
    state_out: Sequence[int] | None = None,
    exports: Sequence[tuple[int, int, int]] = (),
) -> RowSlots:
    """`exports` are (row, tokens folded, slot); slots default to none."""
    count = len(lengths)
    return RowSlots(
        lengths=tuple(lengths),
        cu_seqlens=ints([0, *lengths]).cumsum(0),
        state_in=ints([-1] * count if state_in is None else state_in),
        state_out=ints([-1] * count if state_out is None else state_out),
        export_row=ints([e[0] for e in exports]),
        export_offset=ints([e[1] for e in exports]),
        export_slot=ints([e[2] for e in exports]),
    )


def make_batch(
    prefill: Sequence[tuple[int, int]] = (),
    decode: Sequence[tuple[int, int]] = (),
    *,
    tables: Sequence[Sequence[int]],
    seats: Sequence[int] | None = None,
) -> ForwardBatch:
    """Rows as (start, tokens), prefill first; `tables` the pages of each row in that order."""
    spans = [*prefill, *decode]
    starts = tuple(start for start, _ in spans)
    ends = tuple(start + count for start, count in spans)
    positions = ints(
        [p for start, end in zip(starts, ends, strict=True) for p in range(start, end)]
    )
    token_row = ints([r for r, (_, count) in enumerate(spans) for _ in range(count)])
    width = max(len(t) for t in tables)
    table = ints([p for t in tables for p in [*t, *[-1] * (width - len(t))]]).view(-1, width)
    return ForwardBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        token_row=token_row,
        token_page=table[token_row, positions // PAGE],
        token_offset=positions % PAGE,
        prefill=make_rows([count for _, count in prefill]),
        decode=make_rows([count for _, count in decode]),
        row_start=ints(starts),
        row_end=ints(ends),
        starts=starts,
        ends=ends,
        seats=ints(range(len(spans)) if seats is None else seats),
        page_table=table,
        logits_at=ints([]),
    )


def strided_bank(
    slots: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A layer's view as an arena gives it: random values, other layers' bytes (NaN) in between."""
    size = prod(shape)
    storage = torch.full((slots, 2 * size + 24), float("nan"), dtype=dtype)
    bank = storage[:, 8 : 8 + size].view(slots, *shape)
    bank.copy_(torch.randn(slots, *shape, generator=torch.Generator().manual_seed(slots)))
    return bank
