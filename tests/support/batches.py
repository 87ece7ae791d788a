"""Runs a model directly, without an engine: arenas full of NaN, pages, seats and slots by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from millpond.memory.arena import Arenas
from millpond.memory.layout import ModelLayout
from millpond.models.base import Model
from millpond.nn.batch import Staging
from millpond.ops.batch import ForwardBatch
from millpond.plan.step import PAGE_SIZE, Export, PageUpdate, Row, StepPlan


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
    ) -> None:
        device = torch.device("cpu")
        self.model = model
        self.arenas = Arenas.allocate(
            layout, num_slots=num_slots, num_pages=num_pages, num_seats=num_seats, device=device
        )
        for arena in (self.arenas.slots, self.arenas.pages, self.arenas.seats):
            arena.fill_nan(range(arena.count))
        self.staging = Staging(num_seats, num_pages, device)
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

    def share_pages(self, source: int, target: int, end: int) -> None:
        """The target seat's first pages become the source's whole pages up to `end`."""
        self.pages[target] = self.pages[source][: end // PAGE_SIZE]
        self.staging.empty([target])
        self.staging.update([PageUpdate(target, 0, tuple(self.pages[target]))])

    def hidden(
        self, prefill: Sequence[Row] = (), decode: Sequence[Row] = ()
    ) -> tuple[torch.Tensor, ...]:
        """One forward: the final hidden of every row [tokens, hidden], prefill rows first."""
        rows = (*prefill, *decode)
        for row in rows:
            held = len(self.pages[row.seat])
            fresh = [self._free.pop() for _ in range(-(-row.end // PAGE_SIZE) - held)]
            self.pages[row.seat] += fresh
            self.staging.update([PageUpdate(row.seat, held, tuple(fresh))])
        plan = StepPlan(step=0, prefill=tuple(prefill), decode=tuple(decode))
        with torch.inference_mode():
            self.last = self.staging.batch(plan, [])
            out = self.model.forward(self.last, self.arenas)
        return out.split([len(row.tokens) for row in rows])

    def logits(
        self, prefill: Sequence[Row] = (), decode: Sequence[Row] = ()
    ) -> tuple[torch.Tensor, ...]:
        """One forward: logits of every token of every row."""
        with torch.inference_mode():
            return tuple(self.model.logits(h) for h in self.hidden(prefill, decode))

    def entries(self, layer: int, name: str, seat: int, end: int) -> torch.Tensor:
        """What the pages of a seat hold of positions 0 .. end - 1, [end, ...] (pooled: by pool)."""
        pages = self.arenas.pages.view(layer, name)[self.pages[seat]]
        if pages.ndim == 4:
            pages = pages.transpose(1, 2)  # heads before positions
        per_page = pages.shape[1]
        return pages.flatten(0, 1)[: end * per_page // PAGE_SIZE].clone()
