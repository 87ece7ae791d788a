"""KDA prompt rows through FlashKDA's `fwd`: packed sequences, and one checkpoint of each a call.

Knows the library's operator and no more of it. That operator takes states by value and exports one
interior state of each sequence. So states are copied out of and into slots, and a row that wants
more is run in pieces: each piece exports one state inside and one at its end, where the next
begins. All pieces begin and end on the grid of 64 tokens, whole steps of the library's own 16, so
that cutting changes no bytes. The library carries states in bf16 between its steps (seen in its
source, never measured here), however they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from millpond.errors import Refused
from millpond.ops.batch import RowSlots
from millpond.ops.reference.delta import CHUNK, Gate
from millpond.ops.reference.slots import read_slots, write_slots

HEAD_DIM = 128
LOWEST_BOUND = -5.0


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a row: its tokens, the exports at its end, and those at one place inside."""

    row: int
    begin: int
    end: int
    at_end: tuple[int, ...] = ()
    inside: int = 0  # tokens from `begin`; 0: nowhere
    at_inside: tuple[int, ...] = ()


_pieces: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By the exports of a batch, which all layers share: they are read from the device once."""


def refusal(
    dtype: torch.dtype, key_heads: int, heads: int, k_dim: int, v_dim: int, gate: Gate
) -> str | None:
    """Why FlashKDA cannot compute a layer, or None."""
    if dtype != torch.bfloat16:
        return f"FlashKDA needs bfloat16, the model computes in {str(dtype).split('.')[-1]}"
    if not k_dim == v_dim == HEAD_DIM:
        return f"FlashKDA needs heads of {HEAD_DIM}, the model's have {k_dim} and {v_dim}"
    if key_heads != heads:
        return f"FlashKDA needs as many key as value heads, not {key_heads} and {heads}"
    if gate.lower_bound is None or not LOWEST_BOUND <= gate.lower_bound <= 0:
        return f"FlashKDA needs a log decay bounded by {LOWEST_BOUND}..0, not {gate.lower_bound}"
    return None


def delta_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    gate: Gate,
    bank: torch.Tensor,
    rows: RowSlots,
) -> torch.Tensor:
    """As the reference, for KDA in bf16 with heads of 128. Raises `Refused` for anything else."""
    reason = refusal(v.dtype, k.shape[1], v.shape[1], k.shape[2], v.shape[2], gate)
    if reason is not None:
        raise Refused(reason)
    if rows.export_row not in _pieces:
        _pieces[rows.export_row] = pieces(
            rows.lengths, rows.export_row.tolist(), rows.export_offset.tolist()
        )
    rounds: Sequence[Sequence[Piece]] = _pieces[rows.export_row]
    inputs = tuple(x.contiguous() for x in (q, k, v, decay, beta))
    state = read_slots(bank, rows.state_in)
    begins = (0, *accumulate(rows.lengths))
    o = torch.empty_like(inputs[2])
    written = torch.full_like(rows.export_slot, -1)
    for some in rounds:
        whole = [(p.row, p.begin, p.end) for p in some] == [
            (r, 0, n) for r, n in enumerate(rows.lengths)
        ]
        place = None if whole else _places(some, begins, v.device)
        parts = inputs if place is None else tuple(x[place] for x in inputs)
        of_row = torch.tensor([p.row for p in some], device=v.device)
        out, last, inside = _forward(parts, some, state[of_row], gate)
        if place is None:
            o = out
        else:
            o[place] = out
        state[of_row] = last
        for values, wanted in (
            (last, [(i, e) for i, p in enumerate(some) for e in p.at_end]),
            (inside, [(i, e) for i, p in enumerate(some) for e in p.at_inside]),
        ):
            if wanted and values is not None:
                index, export = torch.tensor(wanted, device=v.device).unbind(1)
                write_slots(bank, rows.export_slot[export], values[index])
                written[export] = rows.export_slot[export]
    write_slots(bank, rows.state_out, state)
    lengths = rows.cu_seqlens[1:] - rows.cu_seqlens[:-1]
    rows.written.record(
        torch.cat((rows.state_out, written)), torch.cat((lengths, rows.export_offset))
    )
    return o


def pieces(
    lengths: Sequence[int], export_row: Sequence[int], export_offset: Sequence[int]
) -> tuple[tuple[Piece, ...], ...]:
    """The calls to make, each with at most one piece of every row; exports by index.

    An export off the grid that is not its row's end is left out.
    """
    rounds: list[list[Piece]] = []
    for row, length in enumerate(lengths):
        wanted: dict[int, list[int]] = {length: []} if length else {}
        for export, (of, offset) in enumerate(zip(export_row, export_offset, strict=True)):
            if of == row and 0 < offset <= length and (offset % CHUNK == 0 or offset == length):
                wanted.setdefault(offset, []).append(export)
        stops, begin = sorted(wanted), 0
        for number, first in enumerate(range(0, len(stops), 2)):
            inside, end = (stops[first : first + 2] * 2)[:2]
            if number == len(rounds):
                rounds.append([])
            if inside == end:
                piece = Piece(row, begin, end, tuple(wanted[end]))
            else:
                ends, within = tuple(wanted[end]), tuple(wanted[inside])
                piece = Piece(row, begin, end, ends, inside - begin, within)
            rounds[number].append(piece)
            begin = end
    return tuple(map(tuple, rounds))


def _places(some: Sequence[Piece], begins: Sequence[int], device: torch.device) -> torch.Tensor:
    """Where the pieces' tokens lie among the packed ones."""
    spans = [torch.arange(begins[p.row] + p.begin, begins[p.row] + p.end) for p in some]
    return torch.cat(spans).to(device)


def _forward(
    parts: tuple[torch.Tensor, ...], some: Sequence[Piece], state: torch.Tensor, gate: Gate
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """One call of the library: outputs [T, H, V], states after and, if any is wanted, inside."""
    q, k, v, decay, beta = (x[None] for x in parts)
    tokens, heads, k_dim = parts[1].shape
    device = state.device
    ops = torch.ops.flash_kda
    size = ops.get_workspace_size(tokens, heads, len(some))
    out, last = torch.empty_like(v), torch.empty_like(state)
    cu_seqlens = torch.tensor((0, *accumulate(p.end - p.begin for p in some)), device=device)
    inside = offsets = None
    if any(p.inside for p in some):
        inside = torch.empty_like(state)
        offsets = torch.tensor([p.inside for p in some], device=device)
    ops.fwd(
        q, k, v, decay, beta, k_dim**-0.5, out,
        torch.empty(size, dtype=torch.uint8, device=device),
        gate.a_log, gate.dt_bias.view(heads, k_dim), gate.lower_bound,
        state.contiguous(), last, cu_seqlens, inside, offsets,
    )  # fmt: skip
    return out[0], last, inside
