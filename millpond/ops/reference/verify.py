"""Speculation on one slot: fold what was accepted, write once, then run drafts for outputs only.

Knows rings, banks and counters of `VerifyRows`; proposes and accepts nothing. A ring is one
tensor of every seat, [seats, 2, K, ...]: bank `parity` of a row's seat holds the raw inputs of
its pending drafts, entry j that of the token at position `base + j`; the other bank takes those of
this step's drafts, in order. Entries beyond are unspecified and never looked at. The arithmetic of
a token is that of `conv_decode` and `delta_decode`, in the same order, so that speculation and
plain decode fold the same tokens to the same bytes.
"""

from __future__ import annotations

import torch

from millpond.ops.batch import VerifyRows
from millpond.ops.reference.conv import convolve
from millpond.ops.reference.delta import Gate, TokenInputs
from millpond.ops.reference.slots import read_slots, write_slots


def conv_verify(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bank: torch.Tensor,
    ring: torch.Tensor,
    rows: VerifyRows,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B * (K + 1), C], weight [C, W], bank [S, C, W - 1], ring [seats, 2, K, C].

    -> y of the pending drafts [B, K, C] and of the row's own tokens [B * (K + 1), C], in the dtype
    of `x`; fp32 inside. The window as of `base + pending + 1` goes to `state_out`, those of exports
    likewise; the drafts' raw inputs go to the ring. Outputs of places without a token are
    unspecified.
    """
    count, most = rows.num_rows, rows.width - 1
    history = weight.shape[1] - 1
    own = x.unflatten(0, (count, rows.width))
    window = read_slots(bank, rows.state_in).transpose(1, 2).to(x.dtype)  # [B, W - 1, C]
    replayed = read_ring(ring, rows).to(x.dtype)

    # Tokens of a row without a gap: its pending drafts, then its own; the last one repeats.
    step = torch.arange(most + rows.width, device=x.device)
    pending = rows.pending[:, None]
    source = torch.where(step < pending, step, most + (step - pending).clamp(0, most))
    tokens = _take(torch.cat((replayed, own), 1), source)
    series = torch.cat((window, tokens), 1)  # what the token at `step` sees begins at `step`
    spans = (series[:, tap : tap + len(step)] for tap in range(history + 1))
    y = convolve(spans, weight).to(x.dtype)

    row, folded, slot = verify_targets(rows)
    last = folded[:, None] + torch.arange(history, device=x.device)
    write_slots(bank, slot, _take(series[row], last).transpose(1, 2))
    write_ring(ring, own[:, 1:], rows)
    rows.written.record(slot, folded)
    return y[:, :most], _take(y, pending + step[: rows.width]).flatten(0, 1)


def delta_verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    pending: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    gate: Gate,
    bank: torch.Tensor,
    ring_decay: torch.Tensor,
    ring_beta: torch.Tensor,
    rows: VerifyRows,
) -> torch.Tensor:
    """As `delta_decode` for verify rows; with K = 0 it is just that.

    Of the row's own tokens, T = B * (K + 1): q, k [T, Hk, K]; v [T, H, V]; decay, raw, [T, H] or
    [T, H, K]; beta, raw, [T, H]. `pending`: q, k, v of the pending drafts, [B, K, heads, size] each
    (from `conv_verify`); their decay and beta come from the rings, [seats, 2, K, H(, K)] and
    [seats, 2, K, H]. bank [S, H, V, K] fp32 -> o [T, H, V] in the dtype of `v`, zero where there is
    no token.
    """
    count, most = rows.num_rows, rows.width - 1

    def joined(replayed: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Pending drafts, then the row's own tokens, row by row: [B * (2 K + 1), ...]."""
        own = own.unflatten(0, (count, rows.width))
        return torch.cat((replayed.to(own.dtype), own), 1).flatten(0, 1)

    old_q, old_k, old_v = pending
    tokens = TokenInputs.of(
        joined(old_q, q),
        joined(old_k, k),
        joined(old_v, v),
        joined(read_ring(ring_decay, rows), decay),
        joined(read_ring(ring_beta, rows), beta),
        gate,
    )
    start = torch.arange(count, device=v.device) * (most + rows.width)

    state = read_slots(bank, rows.state_in)
    _, folded, slot = verify_targets(rows)
    exports = folded[count:]
    for step in range(most):
        live = step < rows.pending
        state = torch.where(live[:, None, None, None], tokens.at(start + step).fold(state), state)
        write_slots(bank, torch.where((exports == step + 1) & live, slot[count:], -1), state)
    first = tokens.at(start + most)
    state = first.fold(state)
    write_slots(bank, rows.state_out, state)
    write_slots(bank, torch.where(exports == rows.pending + 1, slot[count:], -1), state)

    outputs = [first.read(state)]
    for step in range(most + 1, most + rows.width):
        draft = tokens.at(start + step)
        state = draft.fold(state)
        outputs.append(draft.read(state))
    o = torch.stack(outputs, 1)
    for ring, raw in ((ring_decay, decay), (ring_beta, beta)):
        write_ring(ring, raw.unflatten(0, (count, rows.width))[:, 1:], rows)
    rows.written.record(slot, folded)
    return o.masked_fill(~rows.filled[..., None, None], 0.0).flatten(0, 1).to(v.dtype)


def hidden_before_verify(
    x: torch.Tensor, *, bank: torch.Tensor, ring: torch.Tensor, rows: VerifyRows
) -> torch.Tensor:
    """The final hidden vector of the token before each token: x [B * (K + 1), C] -> the same shape.

    Before `first` lies the last pending draft, whose vector is in the ring [seats, 2, K, C], or
    else the slot's own end: bank [S, C]. Call before `boundary_verify`, which may write that slot.
    """
    own = x.unflatten(0, (rows.num_rows, rows.width))
    before = read_slots(bank, rows.state_in).to(x.dtype)[:, None]
    before = torch.cat((before, read_ring(ring, rows).to(x.dtype)), 1)
    return torch.cat((_take(before, rows.pending[:, None]), own[:, :-1]), 1).flatten(0, 1)


def boundary_verify(
    x: torch.Tensor, *, bank: torch.Tensor, ring: torch.Tensor, rows: VerifyRows
) -> None:
    """Write the vector of the last folded token of every row and export, and the drafts' to the
    ring: x [B * (K + 1), C], bank [S, C], ring [seats, 2, K, C].
    """
    own = x.unflatten(0, (rows.num_rows, rows.width))
    row, folded, slot = verify_targets(rows)
    pending = rows.pending[row]
    source = torch.where(folded <= pending, folded - 1, rows.width - 1).clamp(min=0)
    tokens = torch.cat((read_ring(ring, rows).to(x.dtype), own[:, :1]), 1)
    write_slots(bank, slot, _take(tokens[row], source[:, None]).squeeze(1))
    write_ring(ring, own[:, 1:], rows)
    rows.written.record(slot, folded)


def verify_targets(rows: VerifyRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All writes these rows ask for: row [2 B], tokens folded [2 B], slot [2 B].

    The rows' own ends come first, then their exports; one that its row does not reach, or has
    passed before, has no slot.
    """
    own = rows.pending + 1
    offset = rows.export_end - rows.base
    reached = (offset >= 1) & (offset <= own)
    return (
        torch.arange(rows.num_rows, device=own.device).repeat(2),
        torch.cat((own, torch.where(reached, offset, 0))),
        torch.cat((rows.state_out, torch.where(reached, rows.export_slot, -1))),
    )


def read_ring(ring: torch.Tensor, rows: VerifyRows) -> torch.Tensor:
    """What each row's pending drafts left: [B, K, ...], zero beyond them and without a seat."""
    held = torch.arange(ring.shape[2], device=ring.device) < rows.pending[:, None]
    held = held & (rows.seats >= 0)[:, None]
    values = ring[rows.seats.clamp(min=0), rows.parity]
    return values.masked_fill(~held.view(*held.shape, *[1] * (ring.ndim - 3)), 0.0)


def write_ring(ring: torch.Tensor, values: torch.Tensor, rows: VerifyRows) -> None:
    """Leave the values of the K places after `first`, [B, K, ...], in each row's other bank."""
    some = rows.seats >= 0
    ring[rows.seats[some], 1 - rows.parity[some]] = values[some].to(ring.dtype)


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x [n, L, C] at index [n, l] of each row: [n, l, C]."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))
