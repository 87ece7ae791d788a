"""Drafts are drawn as the target will draw in their place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from millpond.memory.arena import Arenas
from millpond.memory.layout import EntrySpec, ModelLayout
from millpond.nn.batch import Staging
from millpond.ops.batch import ForwardBatch
from millpond.ops.bind import bind
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import PageUpdate, SeatLoad
from millpond.runtime.propose import DraftModel, Live
from millpond.runtime.seats import SeatSampling
from millpond.runtime.verify import Draw, Verifier
from millpond.state.lease import PageId, Seat

CPU = torch.device("cpu")
VOCAB = 40
OPS = bind(CPU)
NONE = EntrySpec(())


@dataclass
class Echo:
    """A draft layer whose logits depend on the token alone; notes what it was given."""

    batches: list[ForwardBatch] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    selected: list[object] = field(default_factory=list)

    def draft(
        self, batch: ForwardBatch, hidden: torch.Tensor, arenas: Arenas, selected: Any = None
    ) -> tuple[torch.Tensor, Any]:
        """n [B, 1]: the token."""
        del arenas
        self.batches.append(batch)
        self.hidden.append(hidden)
        self.selected.append(selected)
        return batch.token_ids[:, None].float(), selected or "selected by the first"

    def draft_logits(self, n: torch.Tensor) -> torch.Tensor:
        """[M, VOCAB]."""
        return torch.cat([target_logits(int(token)) for token in n[:, 0]])


def target_logits(token: int) -> torch.Tensor:
    """What the target would say after `token`, and the draft layer says too: [1, VOCAB].

    Always likely are tokens 20 to 22, which penalties must make less so.
    """
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(token))
    logits[:, 20:23] += 4.0
    return logits


def load(seat: int, **params: Any) -> SeatLoad:
    return SeatLoad(
        seat=Seat(seat),
        request=f"r{seat}",
        sample_index=seat % 2,
        params=SamplingParams(**{"max_tokens": 9, "temperature": 0.0, **params}),
        tokens=(1, 2, 3),
        prompt_len=3,
    )


LOADS = (
    load(0),
    load(1, temperature=1.0, top_k=5, seed=7),
    load(2, frequency_penalty=2.0, repetition_penalty=1.5),
    load(3, temperature=0.7, logit_bias=((4, 9.0),), min_tokens=3, stop_token_ids=(4, 5), seed=9),
)


def test_a_draft_layer_that_agrees_with_the_target_is_always_right() -> None:
    seats = SeatSampling(4, VOCAB, CPU, OPS)
    seats.load(LOADS)
    verifier = Verifier(seats, OPS)
    staging = Staging(4, 3, CPU, num_drafts=4)
    staging.update([PageUpdate(Seat(s), 0, (PageId(s),)) for s in range(4)])
    # Each seat draws its first token, from position 3 on.
    first = verifier.draw(
        [Draw(Seat(s), s, 3) for s in range(4)],
        torch.cat([target_logits(VOCAB + s) for s in range(4)]),
        None,
    )
    model = Echo()
    arenas = Arenas.allocate(
        ModelLayout(NONE, NONE, NONE), num_slots=1, num_pages=4, num_seats=4, device=CPU
    )
    proposer = DraftModel(model, arenas, staging, seats)  # type: ignore[arg-type]
    hidden = torch.full((4, 1), -1.0)
    drafts = proposer.propose(
        Live(
            seats=(0, 1, 2, 3),
            seat=torch.arange(4),
            token=first.token,
            position=torch.full((4,), 3),
            hidden=hidden,
            ends=(4,) * 4,
        )
    )
    tokens = first.token
    for step in range(4):
        logits = torch.cat([target_logits(int(token)) for token in tokens])
        drawn = verifier.draw([Draw(Seat(s), s, 4 + step) for s in range(4)], logits, None)
        assert drafts[:, step].tolist() == drawn.token.tolist()
        assert model.batches[step].token_ids.tolist() == tokens.tolist()
        assert model.batches[step].positions.tolist() == [3 + step] * 4
        tokens = drawn.token
    # Every step of a chain is given the vector of the step before, and what the first selected.
    assert torch.equal(model.hidden[0], hidden)
    assert [h[:, 0].long().tolist() for h in model.hidden[1:]] == [
        batch.token_ids.tolist() for batch in model.batches[:-1]
    ]
    assert model.selected == [None, *["selected by the first"] * 3]
    # All steps see as many pages: what is selected once is selected for the whole chain.
    assert len({batch.page_table.shape for batch in model.batches}) == 1


def test_making_drafts_counts_nothing() -> None:
    seats = SeatSampling(4, VOCAB, CPU, OPS)
    seats.load(LOADS)
    staging = Staging(4, 3, CPU, num_drafts=4)
    arenas = Arenas.allocate(
        ModelLayout(NONE, NONE, NONE), num_slots=1, num_pages=1, num_seats=4, device=CPU
    )
    proposer = DraftModel(Echo(), arenas, staging, seats)  # type: ignore[arg-type]
    live = Live(
        seats=(2, -1),
        seat=torch.tensor([2, -1]),
        token=torch.tensor([6, 6]),
        position=torch.tensor([3, 3]),
        hidden=torch.zeros(2, 1),
        ends=(4, 4),
    )
    drafts = proposer.propose(live)
    assert drafts.shape == (2, 4)
    assert seats.generated(torch.arange(4)).eq(0).all()
    assert torch.equal(proposer.propose(live), drafts)
