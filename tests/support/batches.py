"""Runs a model directly, without an engine: arenas full of NaN, pages, seats and slots by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from millpond.memory.arena import Arenas
from millpond.memory.layout import ModelLayout
from millpond.models.base import Model
from millpond.nn.batch import Staging
from millpond.nn.counters import Counters
from millpond.ops.batch import ForwardBatch
from millpond.plan.step import PAGE_SIZE, Export, PageUpdate, Row, StepPlan, VerifyRow


class Bench:
    """One model with memory of its own. Pages are scattered, and given to seats as needed."""

    def __init__(
        self,
        model: Model,
        layout: ModelLayout,
        *,
        num_slots: int = 12,
        num_pages: int = 40,
        num_seats: int = 4,
        num_drafts: int = 0,
    ) -> None:
        device = torch.device("cpu")
        self.model = model
        self.arenas = Arenas.allocate(
            layout, num_slots=num_slots, num_pages=num_pages, num_seats=num_seats, device=device
        )
        for arena in (self.arenas.slots, self.arenas.pages, self.arenas.seats):
            arena.fill_nan(range(arena.count))
        self.staging = Staging(num_seats, num_pages, device, num_drafts)
        scattered = torch.randperm(num_pages, generator=torch.Generator().manual_seed(3))
        self._free = scattered.tolist()
        self.pages: dict[int, list[int]] = {seat: [] for seat in range(num_seats)}
        self.last: ForwardBatch | None = None

    def row(
        self,
        seat: int,
        start: int,
        tokens: Sequence[int],
        state_in: int | None,
        state_out: int,
        exports: Sequence[tuple[int, int]] = (),
    ) -> Row:
        """Exports are (end, slot), absolute."""
        return Row(
            request=f"seat {seat}",
            seat=seat,
            start=start,
            tokens=tuple(int(t) for t in tokens),
            state_in=state_in,
            state_out=state_out,
            exports=tuple(Export(end, slot) for end, slot in exports),
        )

    def verify_row(
        self,
        seat: int,
        base: int,
        pending: int,
        tokens: Sequence[int],
        state_in: int,
        state_out: int,
        *,
        parity: int = 0,
        export: tuple[int, int] | None = None,
    ) -> VerifyRow:
        """A live seat's row: `tokens` are the certain one and its drafts. A negative seat: none."""
        first, *drafts = (int(t) for t in tokens)
        most = self.staging.num_drafts
        columns = (base, pending, first, len(drafts), parity)
        numbers = [torch.tensor([value]) for value in columns]
        names = ("base", "pending", "first", "num_drafts", "parity")
        self.staging.counters.put(
            torch.tensor([seat]),
            Counters(
                **dict(zip(names, numbers, strict=True)),
                drafts=torch.tensor([drafts + [0] * (most - len(drafts))], dtype=torch.int64),
            ),
        )
        return VerifyRow(
            request=f"seat {seat}",
            seat=seat,
            start=base,
            pending=pending,
            num_drafts=len(drafts),
            state_in=state_in,
            state_out=state_out,
            export=None if export is None else Export(*export),
        )

    def share_pages(self, source: int, target: int, end: int) -> None:
        """The target seat's first pages become the source's whole pages up to `end`."""
        self.pages[target] = self.pages[source][: end // PAGE_SIZE]
        self.staging.empty([target])
        self.staging.update([PageUpdate(target, 0, tuple(self.pages[target]))])

    def hidden(
        self,
        prefill: Sequence[Row] = (),
        decode: Sequence[Row] = (),
        verify: Sequence[VerifyRow] = (),
    ) -> tuple[torch.Tensor, ...]:
        """One forward: the final hidden of every row [tokens, hidden], in the order of the plan.

        Of a verify row that is its certain token and its drafts.
        """
        for row in (*prefill, *decode):
            self.provide(row.seat, row.end)
        for row in verify:
            self.provide(row.seat, row.end + row.num_drafts)
        plan = StepPlan(step=0, prefill=tuple(prefill), decode=tuple(decode), verify=tuple(verify))
        with torch.inference_mode():
            self.last = self.staging.batch(plan, [])
            out = self.model.forward(self.last, self.arenas)
        lengths = [len(row.tokens) for row in (*prefill, *decode)]
        places = [self.staging.num_drafts + 1] * len(verify)
        parts = out.split(lengths + places)
        of_verify = [
            part[: 1 + row.num_drafts]
            for part, row in zip(parts[len(lengths) :], verify, strict=True)
        ]
        return (*parts[: len(lengths)], *of_verify)

    def logits(
        self,
        prefill: Sequence[Row] = (),
        decode: Sequence[Row] = (),
        verify: Sequence[VerifyRow] = (),
    ) -> tuple[torch.Tensor, ...]:
        """One forward: logits of every token of every row."""
        with torch.inference_mode():
            return tuple(self.model.logits(h) for h in self.hidden(prefill, decode, verify))

    def provide(self, seat: int, end: int) -> None:
        """Give a seat the pages of positions up to `end`."""
        if seat < 0:
            return
        held = len(self.pages[seat])
        fresh = [self._free.pop() for _ in range(-(-end // PAGE_SIZE) - held)]
        self.pages[seat] += fresh
        self.staging.update([PageUpdate(seat, held, tuple(fresh))])

    def draft(
        self,
        seats: Sequence[int],
        positions: Sequence[int],
        tokens: Sequence[int],
        hidden: torch.Tensor,
        selected: torch.Tensor | None = None,
        *,
        ahead: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One step of chains: the draft layer on one entry a row. `ahead`: steps still to come."""
        ends = [position + 1 + ahead for position in positions]
        for seat, end in zip(seats, ends, strict=True):
            self.provide(seat, end)
        numbers = (torch.tensor(x, dtype=torch.int64) for x in (seats, tokens, positions))
        with torch.inference_mode():
            batch = self.staging.singles(*numbers, ends)
            return self.model.draft(batch, hidden, self.arenas, selected)

    def entries(self, layer: int, name: str, seat: int, end: int) -> torch.Tensor:
        """What the pages of a seat hold of positions 0 .. end - 1, [end, ...] (pooled: by pool)."""
        pages = self.arenas.pages.view(layer, name)[self.pages[seat]]
        if pages.ndim == 4:
            pages = pages.transpose(1, 2)  # heads before positions
        per_page = pages.shape[1]
        return pages.flatten(0, 1)[: end * per_page // PAGE_SIZE].clone()
