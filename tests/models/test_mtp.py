"""Drafts against transformers: the whole draft layer at every position, and in chains."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from millpond.errors import Broken, Refused
from millpond.models.base import Family, load
from millpond.ops.bind import Bound
from tests.support.batches import Bench
from tests.support.draft_oracle import chained, hidden_of, logits_of
from tests.support.oracle import CPU, Tiny, random_ids

TOLERANCE = 1e-4
LENGTH = 140  # more than two pages, and sparse from 36 on
STARTS = (1, 3, 4, 34, 37, 64, 100, 127)  # of chains: within a page, at its edges, dense and sparse
STEPS = 5


def test_drafts_of_every_position_equal_the_oracle(tiny: Tiny) -> None:
    """Logits for token t + 2 from the hidden of t and token t + 1."""
    ids = random_ids(LENGTH, 11)
    expected = logits_of(tiny, chained(tiny, ids, hidden_of(tiny, ids)))
    bench = tiny.bench(num_drafts=1)
    (hidden,) = bench.hidden([bench.row(0, 0, ids[:1], None, 0)])
    vectors = []
    for at in range(1, LENGTH):
        n, _ = bench.draft([0], [at], ids[at : at + 1], hidden)
        vectors.append(n)
        (hidden,) = bench.hidden(decode=[bench.row(0, at, ids[at : at + 1], 0, 0)])
    close(draft_logits(tiny, torch.cat(vectors)), expected)


def test_chains_of_drafts_equal_the_oracle(tiny: Tiny) -> None:
    """Chains of several seats in one batch, each where its own prompt ends."""
    ids, follow = random_ids(LENGTH, 12), random_ids(STEPS - 1, 13)
    bench = tiny.bench(num_drafts=STEPS, num_seats=len(STARTS))
    prompts = [bench.row(seat, 0, ids[:at], None, seat) for seat, at in enumerate(STARTS)]
    hidden = torch.stack([rows[-1] for rows in bench.hidden(prompts)])
    got = torch.stack(run_chains(bench, STARTS, ids, hidden, follow), 1)
    reference = hidden_of(tiny, ids)
    for vectors, at in zip(got, STARTS, strict=True):
        expected = chained(tiny, ids[: at + 1], reference[: at + 1], follow)[at - 1 :]
        close(draft_logits(tiny, vectors), logits_of(tiny, expected))


def test_a_chain_depends_on_no_other_row(tiny: Tiny) -> None:
    """Nor on a row of no seat, which reads and writes nothing."""
    ids, follow = random_ids(LENGTH, 14), random_ids(STEPS - 1, 15)
    many = tiny.bench(num_drafts=STEPS)
    at = [100, 37, 64, 9]
    rows = [many.row(seat, 0, ids[:end], None, seat) for seat, end in enumerate(at)]
    hidden = torch.stack([part[-1] for part in many.hidden(rows)])
    nobody = torch.zeros_like(hidden[:1])
    together = run_chains(many, at, ids, torch.cat((hidden, nobody)), follow)
    for seat, end in enumerate(at):
        one = tiny.bench(num_drafts=STEPS)
        (part,) = one.hidden([one.row(seat, 0, ids[:end], None, 0)])
        alone = run_chains(one, [end], ids, part[-1:], follow, first_seat=seat)
        for ours, theirs in zip(alone, together, strict=True):
            assert torch.equal(ours[0], theirs[seat])
    assert all(step.isfinite().all() for step in together)


def test_entry_0_is_never_attended_to(tiny: Tiny) -> None:
    """Whatever the pages hold of it, a draft is the same; another entry does show."""
    layer, names = (6, ("latent",)) if tiny.kind.startswith("glm") else (4, ("key", "value"))
    ids = random_ids(100, 16)
    bench = tiny.bench(num_drafts=1)
    hidden = bench.hidden([bench.row(0, 0, ids[:99], None, 0)])[0][-1:]

    def shifted(entry: int) -> torch.Tensor:
        for name in names:
            pages = bench.arenas.pages.view(layer, name)[bench.pages[0][0]]
            pages[..., entry, :] += 1.0
        return bench.draft([0], [99], ids[99:], hidden)[0]

    before, _ = bench.draft([0], [99], ids[99:], hidden)
    assert torch.equal(shifted(0), before)
    assert not torch.equal(shifted(1), before)


def test_the_first_pool_is_selected_and_not_scored(make_tiny: Callable[[str], Tiny]) -> None:
    tiny, ids = make_tiny("glm"), random_ids(200, 17)
    bench = tiny.bench(num_drafts=1)
    hidden = bench.hidden([bench.row(0, 0, ids[:150], None, 0)])[0][-1:]
    pooled = bench.arenas.pages.view(6, "pooled")[bench.pages[0][0]]
    for scale in (1.0, 0.0, 1e3):
        pooled[0] *= scale
        _, selected = bench.draft([0], [150], ids[150:151], hidden)
        assert selected is not None
        chosen = selected[0].nonzero().squeeze(1).tolist()
        assert chosen[:3] == [1, 2, 3]
        assert chosen[-3:] == [148, 149, 150], "the visible tail"
        assert len(chosen) == 32 - 1 + 3


def test_a_first_step_writes_what_the_target_writes_in_its_next_forward(tiny: Tiny) -> None:
    """Its entry is final, so a chain may be proposed before the token is folded."""
    glm = tiny.kind.startswith("glm")
    layer, names = (6, ("latent", "pooled")) if glm else (4, ("key", "value"))
    ids = random_ids(104, 18)
    drafted, folded = tiny.bench(num_drafts=3), tiny.bench(num_drafts=3)
    for bench in (drafted, folded):
        bench.hidden([bench.row(0, 0, ids[:99], None, 0)])
    (hidden,) = drafted.hidden(decode=[drafted.row(0, 99, ids[99:103], 0, 0)])
    folded.hidden(decode=[folded.row(0, 99, ids[99:104], 0, 0)])
    drafted.draft([0], [103], ids[103:], hidden[-1:])
    for name in names:
        close(drafted.entries(layer, name, 0, 104), folded.entries(layer, name, 0, 104))


def test_a_model_without_a_draft_layer_drafts_nothing(tiny: Tiny) -> None:
    bench = tiny.bench(num_drafts=1)
    (hidden,) = bench.hidden([bench.row(0, 0, [5, 6], None, 0)])
    draft, tiny.model.draft_layer = tiny.model.draft_layer, None  # type: ignore[attr-defined]
    try:
        with pytest.raises(Broken, match="without a draft layer"):
            bench.draft([0], [2], [7], hidden[-1:])
    finally:
        tiny.model.draft_layer = draft  # type: ignore[attr-defined]


def test_a_draft_layer_with_a_recurrent_state_is_refused_by_name(
    tiny: Tiny, ops: Bound, monkeypatch: pytest.MonkeyPatch
) -> None:
    family: Family = tiny.description.family
    assert not family.DraftLayer.has_recurrent_state
    monkeypatch.setattr(family.DraftLayer, "has_recurrent_state", True)
    with pytest.raises(Refused, match=rf"draft layer of {tiny.description.model_type}.*recurrent"):
        load(tiny.description, ops, dtype=torch.float32, device=CPU)


def run_chains(
    bench: Bench,
    starts: Sequence[int],
    ids: Sequence[int],
    hidden: torch.Tensor,
    follow: Sequence[int],
    first_seat: int = 0,
) -> list[torch.Tensor]:
    """The vectors of every step: chains of as many seats, then of no seat where `hidden` has more.

    Row r begins at `starts[r]` with that token of `ids`, and goes on with `follow`.
    """
    nobody = len(hidden) - len(starts)
    seats = [first_seat + row for row in range(len(starts))] + [-1] * nobody
    at = [*starts, *([0] * nobody)]
    n, selected, vectors = hidden, None, []
    for step in range(len(follow) + 1):
        tokens = [ids[i] for i in at] if step == 0 else [follow[step - 1]] * len(seats)
        positions = [i + step for i in at]
        n, selected = bench.draft(seats, positions, tokens, n, selected, ahead=len(follow) - step)
        vectors.append(n)
    return vectors


def draft_logits(tiny: Tiny, vectors: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tiny.model.draft_logits(vectors)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
