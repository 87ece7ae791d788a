"""Kind: two paths that should compute the same round differently, or at different moments."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from millpond.ops.reference.delta import delta_decode, delta_prefill
from tests.faults.delta_rule import HEADS, K, V, layer, packed
from tests.faults.house import House, prompt

BY = pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])


@BY
def test_tokens_folded_together_or_one_by_one_leave_the_same_state(by_channel):
    """Byte for byte: recomputing what was generated must give back the state that generated it."""
    sequence = layer(12, by_channel=by_channel)
    bank = torch.full((2, HEADS, V, K), float("nan"))
    together = sequence.fold(delta_decode, bank, packed([12], [-1], [0]), [(0, 12)])
    one_by_one = [
        sequence.fold(delta_decode, bank, packed([1], [1 if t else -1], [1]), [(t, t + 1)])
        for t in range(12)
    ]
    assert torch.equal(bank[0], bank[1])
    assert torch.equal(together, torch.cat(one_by_one))


@BY
def test_chunk_form_and_token_form_agree_on_slow_and_fast_decay(by_channel):
    """Outputs too, not states alone; the inputs of `layer` hold both kinds of heads."""
    sequence = layer(200, by_channel=by_channel)
    out = []
    for form in (delta_prefill, delta_decode):
        bank = torch.full((1, HEADS, V, K), float("nan"))
        out.append(sequence.fold(form, bank, packed([200], [-1], [0]), [(0, 200)]))
    torch.testing.assert_close(*out, rtol=1e-4, atol=1e-5)


@BY
def test_a_prompt_cut_on_the_grid_leaves_the_same_bytes_as_one_forward(by_channel):
    """Whole, cut at every anchor, and with the anchors exported inside the forward."""
    length, anchors = 331, (64, 128, 256)
    sequence = layer(length, by_channel=by_channel)
    nan = float("nan")

    split = torch.full((4, HEADS, V, K), nan)
    edges = (0, *anchors, length)
    cut = []
    for i, (begin, end) in enumerate(pairwise(edges)):
        rows = packed([end - begin], [i - 1], [i])
        cut.append(sequence.fold(delta_prefill, split, rows, [(begin, end)]))

    interior = torch.full((4, HEADS, V, K), nan)
    exports = [(0, end, slot) for slot, end in enumerate(anchors)]
    rows = packed([length], [-1], [3], exports)
    whole = sequence.fold(delta_prefill, interior, rows, [(0, length)])

    assert torch.equal(split, interior)
    assert torch.equal(torch.cat(cut), whole)


@pytest.mark.parametrize("budget", [64, 100, 256, 700])
def test_cold_and_resumed_prompts_are_cut_on_the_same_grid(budget):
    """Every row of a prompt starts on the grid; only its last one may end off it."""
    house = House(budget=budget, slots=20)
    tokens = prompt(900)
    for ask in (house.served(tokens), house.served(tokens), house.served(tokens[:500])):
        assert ask.is_right
        rows = [row for row in house.executor.rows(ask.name) if row.start < len(ask.spec.tokens)]
        assert [row.start % 64 for row in rows] == [0] * len(rows)
        assert [row.end % 64 for row in rows[:-1]] == [0] * (len(rows) - 1)
        assert rows[0].start == ask.cached
        assert rows[-1].end == len(ask.spec.tokens)
