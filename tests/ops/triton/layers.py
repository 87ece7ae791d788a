"""What tests of layer kernels share: poisoned outputs, far-away memory, batches of all forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import pytest
import torch

from millpond.ops.batch import ForwardBatch, VerifyRows
from tests.ops.batches import PAGE, ints, make_batch

NAN = float("nan")
DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.bfloat16, id="bf16"),
]

_EMPTY, _NEW_EMPTY = torch.empty, torch.Tensor.new_empty


def _filled(x: torch.Tensor) -> torch.Tensor:
    if x.is_floating_point():
        return x.fill_(NAN)
    return x.fill_(True) if x.dtype == torch.bool else x.fill_(torch.iinfo(x.dtype).max // 3)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an op allocates and leaves unwritten is NaN, or a number far beyond any index."""
    monkeypatch.setattr(torch, "empty", lambda *a, **k: _filled(_EMPTY(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: _filled(_NEW_EMPTY(*a, **k)))


def far(entries: torch.Tensor) -> torch.Tensor:
    """The same entries so far apart that the last begins at element 2^31 or beyond.

    What lies between them is never touched, so it costs no memory where memory is given on use.
    """
    count, shape = entries.shape[0], entries.shape[1:]
    stride = -(-(2**31) // (count - 1))
    room = (count - 1) * stride + prod(shape)
    storage = _EMPTY(room, dtype=entries.dtype, device=entries.device)
    view = storage.as_strided(entries.shape, (stride, *entries[0].contiguous().stride()))
    for index in range(count):
        view[index] = entries[index]
    return view


def mixed_batch(
    prefill: Sequence[tuple[int, int]] = (),
    decode: Sequence[tuple[int, int]] = (),
    verify: Sequence[tuple[int, int]] = (),
    *,
    width: int = 3,
    tables: Sequence[Sequence[int]],
    seats: Sequence[int] | None = None,
) -> ForwardBatch:
    """As `make_batch`, then verify rows as (position of the certain token, drafts).

    Drafts -1: a row of no seat, whose table should be negative.
    """
    count = len(prefill) + len(decode)
    first = [*prefill, *decode]
    everything = [*first, *[(start, drafts + 1) for start, drafts in verify]]
    if not verify:
        return make_batch(prefill, decode, tables=tables, seats=seats)
    plain = make_batch(prefill, [*decode, *everything[count:]], tables=tables, seats=seats)
    seat = plain.seats[count:].clone()
    seat[[i for i, (_, drafts) in enumerate(verify) if drafts < 0]] = -1
    drafts = ints([max(d, 0) for _, d in verify])
    none = ints([-1] * len(verify))
    rows = VerifyRows(
        width=width, state_in=none, state_out=none, base=ints([s for s, _ in verify]),
        pending=torch.zeros_like(none), num_drafts=drafts, parity=torch.zeros_like(none),
        seats=seat, export_end=none, export_slot=none,
    )  # fmt: skip
    place = torch.arange(width)
    position = (rows.base[:, None] + torch.minimum(place, drafts[:, None])).flatten()
    row = torch.arange(count, count + len(verify)).repeat_interleave(width)
    page = plain.page_table[row, position // PAGE]
    page = torch.where(rows.filled.flatten(), page, -1)
    plain_tokens = sum(n for _, n in first)
    decode_only = make_batch(prefill, decode, tables=tables[:count]).decode if decode else None
    positions = torch.cat((plain.positions[:plain_tokens], position))
    return replace(
        plain,
        token_ids=torch.zeros_like(positions),
        positions=positions,
        token_row=torch.cat((plain.token_row[:plain_tokens], row)),
        token_page=torch.cat((plain.token_page[:plain_tokens], page)),
        token_offset=positions % PAGE,
        decode=make_batch([], [], tables=[[-1]]).decode if decode_only is None else decode_only,
        seats=torch.cat((plain.seats[:count], seat)),
        verify=rows,
    )


def to(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """The batch on another device."""

    def moved(x: object) -> object:
        if isinstance(x, torch.Tensor):
            return x.to(device)
        if hasattr(x, "__dataclass_fields__"):
            kept = {k: moved(getattr(x, k)) for k in x.__dataclass_fields__ if k != "written"}
            return replace(x, **kept)
        return x

    return moved(batch)


def view_of_wider(*shape: int, dtype: torch.dtype, made: int) -> torch.Tensor:
    """Tokens of random elements with NaN between them."""
    size = torch.Size(shape[1:]).numel()
    wide = torch.full((shape[0], size + 24), NAN, dtype=dtype)
    part = wide[:, 8 : 8 + size]
    part.copy_(torch.randn(shape[0], size, generator=torch.Generator().manual_seed(made)) * 3)
    return part.view(shape)


def on(device: torch.device, x: torch.Tensor) -> torch.Tensor:
    """A copy with gaps as x has them."""
    if device.type == "cpu":
        return x
    wide = torch.full((x.shape[0], x.stride(0)), NAN, dtype=x.dtype, device=device)
    part = wide[:, : x[0].numel()].view(x.shape)
    part.copy_(x)
    return part
