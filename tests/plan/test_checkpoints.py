"""Where anchors lie: properties over prompts, alignments, kernels, modes and cuts."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from millpond.plan.checkpoints import anchor_step, ladder_interval, plan_anchors
from millpond.state.checkpoint import AnchorKind

lengths = st.integers(1, 40_000)
alignments = st.integers(1, 16).map(lambda pages: 64 * pages)
granularities = st.sampled_from([16, 64, 128, 256])
intervals = st.sampled_from([0, 1, 64, 100, 512, 4096])


@given(lengths, alignments, intervals, st.sampled_from(["interior", "split"]), granularities)
def test_every_save_lies_on_the_alignment_in_every_mode(
    prompt, alignment, interval, mode, granularity
):
    anchors = plan_anchors(0, prompt, prompt, alignment, interval, mode, granularity)
    assert all(a.end % alignment == 0 and a.end % granularity == 0 for a in anchors)
    assert all(0 < a.end <= prompt for a in anchors)
    assert [a.end for a in anchors] == sorted({a.end for a in anchors})


@given(lengths, alignments, intervals, granularities)
def test_the_last_anchor_that_leaves_a_token_for_the_logits_is_always_saved(
    prompt, alignment, interval, granularity
):
    step = anchor_step(alignment, granularity)
    anchors = plan_anchors(0, prompt, prompt, alignment, interval, "interior", granularity)
    ends = {a.end for a in anchors if a.kind is AnchorKind.PROMPT_END}
    expected = {(prompt - 1) // step * step, prompt // step * step} - {0}
    assert ends == expected


@given(lengths, alignments, granularities)
def test_a_prompt_below_the_first_anchor_saves_nothing(prompt, alignment, granularity):
    anchors = plan_anchors(0, prompt, prompt, alignment, 0, "interior", granularity)
    assert bool(anchors) == (prompt >= anchor_step(alignment, granularity))


@given(lengths, alignments, intervals, st.lists(st.integers(1, 600), max_size=20))
def test_cutting_a_prompt_into_rows_anywhere_changes_no_anchor(prompt, alignment, interval, cuts):
    edges = [0]
    for pages in cuts:
        edges.append(min(prompt, edges[-1] + 64 * pages))
    edges.append(prompt)
    pieces = [
        anchor
        for start, end in pairwise(edges)
        for anchor in plan_anchors(start, end, prompt, alignment, interval, "interior", 64)
    ]
    assert pieces == list(plan_anchors(0, prompt, prompt, alignment, interval, "interior", 64))


@given(lengths, alignments, intervals, granularities)
def test_both_modes_save_at_the_same_places_and_off_saves_nothing(
    prompt, alignment, interval, granularity
):
    interior, split, off = (
        plan_anchors(0, prompt, prompt, alignment, interval, mode, granularity)
        for mode in ("interior", "split", "off")
    )
    assert interior == split
    assert off == ()


@given(lengths, st.integers(1, 64).map(lambda pages: 64 * pages), alignments)
def test_a_miss_costs_at_most_a_rung_of_the_ladder(prompt, interval, alignment):
    ends = [
        0,
        *(a.end for a in plan_anchors(0, prompt, prompt, alignment, interval, "interior", 64)),
        prompt,
    ]
    rung = -(-interval // anchor_step(alignment, 64)) * anchor_step(alignment, 64)
    assert max(b - a for a, b in pairwise(ends)) <= rung


@given(lengths, st.sampled_from([1, 64, 4096]), st.integers(0, 40))
def test_one_prompt_never_fills_the_budget_with_its_ladder(prompt, interval, budget):
    widened = ladder_interval(prompt, interval, budget)
    rungs = prompt // widened if widened else 0
    assert rungs <= max(0, budget - 1)
    assert widened == 0 or widened % interval == 0
