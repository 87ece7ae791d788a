"""Who guesses the tokens that the next step verifies.

Knows seats that just drew a token, and the draft layer; does not know what becomes of a guess. Any
guess is right: it can cost time, and never change a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from millpond.memory.arena import Arenas
from millpond.models.base import Model
from millpond.nn.batch import Staging
from millpond.ops.reference.sampling import SamplingRows
from millpond.plan.step import PAGE_SIZE
from millpond.runtime.seats import SeatSampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The seats that drew a token in this step, n of them; a negative seat means none."""

    seats: tuple[int, ...]  # `seat` on the host
    seat: torch.Tensor  # [n] int64
    token: torch.Tensor  # [n] int64, the newest token
    position: torch.Tensor  # [n] int64, where it stands
    hidden: torch.Tensor  # [n, hidden], the target's final hidden of the token before
    ends: tuple[int, ...]  # bounds of `position + 1` from above, on the host


class Proposer(Protocol):
    """Makes drafts. One that is handed to a runner decides how often drafts are accepted."""

    def propose(self, live: Live) -> torch.Tensor:
        """Token ids [n, K] int64 for the K positions after `live.position`."""


class DraftModel:
    """The model's own draft layer, chained: each draft is made from the one before.

    Drafts are drawn as the target will draw in their place: with the noise of that position, the
    same filters, and penalties that count the drafts before. So both agree wherever their
    distributions are close, also at high temperatures.
    """

    def __init__(self, model: Model, arenas: Arenas, staging: Staging, seats: SeatSampling) -> None:
        self._model = model
        self._arenas = arenas
        self._staging = staging
        self._seats = seats

    def propose(self, live: Live) -> torch.Tensor:
        """Token ids [n, K] int64; writes the draft layer's entries of `live.position` and on."""
        rows = self._seats.rows(live.seats, live.seat)
        generated = self._seats.generated(live.seat) if self._seats.counting(live.seats) else None
        ends = tuple(end + self._staging.num_drafts for end in live.ends)
        return self._chain(live, rows, generated, ends)

    def propose_plain(self, live: Live, most: int) -> torch.Tensor:
        """As `propose`, for seats that draw by noise and filters alone and that the host need not
        name: `live.seats` and `live.ends` are not looked at. All of it ends within `most` pages.
        """
        ends = (most * PAGE_SIZE,) * len(live.seat)
        return self._chain(live, self._seats.plain_rows(live.seat), None, ends)

    def _chain(
        self,
        live: Live,
        rows: SamplingRows,
        generated: torch.Tensor | None,
        ends: tuple[int, ...],
    ) -> torch.Tensor:
        token, hidden, selected = live.token, live.hidden, None
        drafts = []
        for step in range(self._staging.num_drafts):
            position = live.position + step
            batch = self._staging.singles(live.seat, token, position, ends)
            hidden, selected = self._model.draft(batch, hidden, self._arenas, selected)
            logits = self._model.draft_logits(hidden)
            token = self._seats.choose(logits, rows, position + 1, generated).token
            if generated is not None:
                generated.scatter_add_(1, token[:, None], generated.new_ones((len(token), 1)))
            drafts.append(token)
        return torch.stack(drafts, 1)
