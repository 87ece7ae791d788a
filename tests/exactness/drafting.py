"""Runs sequences by hand with drafts: how many a step verifies, and how many of them are right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from millpond.plan.sampling import SamplingParams
from millpond.plan.step import PAGE_SIZE, Emitted, Export, StepResult, VerifyRow
from millpond.runtime.propose import Live
from millpond.state.lease import Seat, SlotId
from tests.exactness.driver import Driver, Run, Saved
from tests.exactness.families import MAX_POSITION, VOCAB

Wish = tuple[Run, int, int | None]
"""A live run, how many of its drafts to verify, and where to export, if anywhere."""


class Script:
    """Proposes the true continuation up to a number of tokens, then a wrong one, then true again.

    `texts` holds by seat what the whole sequence will be; `right` says for a seat how many of its
    next drafts are to be accepted.
    """

    def __init__(self, count: int, right: Callable[[int], int]) -> None:
        self.count = count
        self.right = right
        self.texts: dict[int, Sequence[int]] = {}

    def propose(self, live: Live) -> torch.Tensor:
        """Token ids [n, K]."""
        rows = [[0] * self.count for _ in live.seats]
        for row, seat, position in zip(rows, live.seats, live.position.tolist(), strict=True):
            if seat < 0:
                continue
            coming = self.texts[seat][position + 1 : position + 1 + self.count]
            row[: len(coming)] = coming
            at = self.right(seat)
            if at < self.count:
                row[at] = (row[at] + 1) % VOCAB
        return torch.tensor(rows, device=live.position.device)


@dataclass(eq=False)
class DraftDriver(Driver):
    """A driver whose runs, once they have drawn a token, go on in verify rows.

    A run's `folded` is the end of its slot; `pending` holds by name how many tokens after it are
    accepted drafts. `counts` are (drafted, accepted) of every verify row so far, `drawn` what was
    reported of the tokens of each run.
    """

    pending: dict[str, int] = field(default_factory=dict)
    counts: list[tuple[int, int]] = field(default_factory=list)
    drawn: dict[str, list[Emitted]] = field(default_factory=dict)
    strays: list[int] = field(default_factory=list)  # slots of exports that were not reached
    _names: dict[int, str] = field(default_factory=dict)  # the run in each seat
    _verify: list[tuple[Run, VerifyRow]] = field(default_factory=list)

    @property
    def num_drafts(self) -> int:
        """K."""
        return self.executor.capabilities.num_draft_tokens

    def start(self, prompt: tuple[int, ...], params: SamplingParams, **given: Any) -> Run:
        """As a driver does."""
        run = super().start(prompt, params, **given)
        self._names[run.seat] = run.name
        self.drawn[run.name] = []
        return run

    def verify(
        self,
        wishes: Iterable[Wish],
        known: Iterable[tuple[Run, int, Sequence[int]]] = (),
    ) -> None:
        """One forward of verify rows, beside the rows of `known`, which are as in `step`."""
        for run, num_drafts, export in wishes:
            pending = self.pending.get(run.name, 0)
            fresh = run.slot is None or run.shared
            assert run.slot is not None
            row = VerifyRow(
                request=run.name,
                seat=Seat(run.seat),
                start=run.folded,
                pending=pending,
                num_drafts=num_drafts,
                state_in=SlotId(run.slot),
                state_out=SlotId(self._take_slot() if fresh else run.slot),
                export=None if export is None else Export(export, SlotId(self._take_slot())),
            )
            assert row.end == len(run.tokens)
            self._verify.append((run, row))
        self.step(known)

    def speculate(self, runs: Sequence[Run], count: int, num_drafts: int | None = None) -> None:
        """Draw until every run has `count` tokens or more."""
        k = self.num_drafts if num_drafts is None else num_drafts
        while live := [r for r in runs if len(r.text) < count]:
            self.verify((run, k, None) for run in live)

    def _execute(self, **parts: Any) -> StepResult:
        taken, self._verify = self._verify, []
        updates = [u for run, row in taken for u in self._extend(run, row.end + row.num_drafts)]
        parts["page_updates"] = (*parts["page_updates"], *updates)
        result = super()._execute(verify=tuple(row for _, row in taken), **parts)
        for emitted in result.emitted:
            self.drawn[self._names[emitted.seat]].append(emitted)
        written = {w.slot: w.end for w in result.written}
        accepted = {v.seat: v for v in result.verified}
        for run, row in taken:
            drawn = [e for e in result.emitted if e.seat == row.seat]
            counted = accepted[row.seat]
            assert counted.drafted == row.num_drafts
            assert len(drawn) == counted.accepted + 1
            assert all(e.finite for e in drawn), f"{run.name} at {row.end}"
            assert written[row.state_out] == row.end
            self.counts.append((counted.drafted, counted.accepted))
            run.tokens += [e.token for e in drawn]
            run.folded, run.slot, run.shared = row.end, row.state_out, False
            self.pending[run.name] = counted.accepted
            if row.export is None:
                continue
            if row.export.slot in written:
                assert written[row.export.slot] == row.export.end
                self.saved.append(decoded(run, row.export.end, row.export.slot))
            else:
                self.strays.append(row.export.slot)
                self._release_slot(row.export.slot)
        return result

    def _extend(self, run: Run, end: int) -> Any:
        """Room for what the step's tokens, and the drafts made in it, write."""
        return super()._extend(run, min(end + self.num_drafts + 1, MAX_POSITION))


def decoded(run: Run, end: int, slot: int) -> Saved:
    """A state of generated tokens, and the whole pages before its end."""
    return Saved(tuple(run.tokens[:end]), end, slot, run.pages[: end // PAGE_SIZE])
