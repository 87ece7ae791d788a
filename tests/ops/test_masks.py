"""Rows that may draw some tokens only draw those, and nobody else notices."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from millpond.engine.grammar import words_of
from millpond.ops.reference import sampling as ops
from tests.ops.test_sampling import VOCAB, Ask, random_logits, rows_of


def masked(rows: ops.SamplingRows, sets: dict[int, set[int]]) -> ops.SamplingRows:
    words = [torch.from_numpy(words_of(tuple(one), VOCAB).copy()) for one in sets.values()]
    return replace(rows, allowed_row=torch.tensor(list(sets)), allowed=torch.stack(words))


def test_bits_are_tokens() -> None:
    sets = ({0, 31, 32, 49}, set(), set(range(VOCAB)))
    words = torch.stack([torch.from_numpy(words_of(tuple(one), VOCAB).copy()) for one in sets])
    flags = ops.unpacked(words, VOCAB)
    assert [set(row.nonzero().flatten().tolist()) for row in flags] == list(sets)


@given(
    data=st.data(),
    temperature=st.sampled_from([0.0, 0.7, 1.5, 50.0]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([1.0, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.9]),
    seed=st.integers(0, 2**40),
)
def test_no_token_is_drawn_that_is_not_allowed_and_other_rows_draw_as_ever(
    data, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    allowed = data.draw(st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=9))
    bias = data.draw(
        st.lists(
            st.tuples(st.integers(0, VOCAB - 1), st.sampled_from([-1e6, 5.0, 1e6])), max_size=3
        )
    )
    ask = Ask(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, bias=tuple(bias)
    )
    logits = random_logits(3)
    plain = rows_of(ask, ask, ask)
    free, bound = ops.sample(logits, plain), ops.sample(logits, masked(plain, {1: allowed}))
    assert int(bound.token[1]) in allowed
    assert bound.finite.all()
    assert free.token[[0, 2]].equal(bound.token[[0, 2]])
    before, after = (
        ops.adjusted_logits(logits, plain),
        ops.adjusted_logits(logits, masked(plain, {1: allowed})),
    )
    assert before[[0, 2]].equal(after[[0, 2]])


def test_what_all_tokens_are_allowed_draws_as_without_a_mask() -> None:
    logits = random_logits(2)
    rows = rows_of(Ask(temperature=1.0, seed=4), Ask(temperature=1.0, seed=5, top_k=5))
    everything = masked(rows, {0: set(range(VOCAB)), 1: set(range(VOCAB))})
    assert ops.sample(logits, rows).token.equal(ops.sample(logits, everything).token)


def test_damaged_logits_are_seen_through_a_mask() -> None:
    logits = random_logits(2)
    logits[0, 3] = float("nan")
    rows = masked(rows_of(Ask(), Ask()), {0: {1, 2}, 1: {1, 2}})
    assert ops.sample(logits, rows).finite.tolist() == [False, True]
