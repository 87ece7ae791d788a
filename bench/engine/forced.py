"""Drafts that are accepted as often as one says, whatever the weights.

With its embedding made large, a model of random weights says its newest token for ever: the
residual stream is that token's row, and the same rows are the head. So what the target will draw is
known, and a proposer that says it, or something else, decides which drafts are accepted. The
target, the draft layer and the verification compute all they otherwise would.
"""

from __future__ import annotations

import torch

from millpond.models.base import Model
from millpond.runtime.propose import DraftModel, Live

LOUDER = 1e4
"""Layers of random weights add values of about one; a row of the embedding is one as a whole."""

MIXED = 1 << 20


def repeat_newest(model: Model) -> None:
    """Change the weights in place, at their addresses."""
    embedding = model.embedding  # type: ignore[attr-defined]  # both families have one
    embedding.table.mul_(LOUDER)
    if embedding.head is not embedding.table:
        embedding.head.copy_(embedding.table)


class Forced(DraftModel):
    """Runs the draft layer, and says something else.

    A draft is right with the given chance, by its seat and position alone; `chance` is read on the
    device, so that a recorded step follows it when it is set anew.
    """

    def __init__(self, inner: DraftModel, vocab: int, device: torch.device) -> None:
        super().__init__(inner._model, inner._arenas, inner._staging, inner._seats)
        self._vocab = vocab
        self._chance = torch.ones((), dtype=torch.float32, device=device)

    def expect(self, chance: float) -> None:
        """Of a draft, given that those before it were right."""
        self._chance.fill_(chance)

    def propose(self, live: Live) -> torch.Tensor:
        """Token ids [n, K] int64."""
        return self._said(live, super().propose(live))

    def propose_plain(self, live: Live, most: int) -> torch.Tensor:
        """As `propose`, of seats that the host need not name."""
        return self._said(live, super().propose_plain(live, most))

    def _said(self, live: Live, drafts: torch.Tensor) -> torch.Tensor:
        place = torch.arange(drafts.shape[1], device=drafts.device)
        position = live.position[:, None] + place
        mixed = (position * 7919 + live.seat[:, None] * 104729 + 12345) * 1103515245
        share = ((mixed >> 8) % MIXED).float() / MIXED
        right = live.token[:, None].expand_as(drafts)
        return torch.where(share < self._chance, right, (right + 1) % self._vocab)
