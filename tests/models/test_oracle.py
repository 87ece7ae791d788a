"""Both families against transformers in fp32: all logits, however they are reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import torch
from transformers.utils import logging

from millpond.models.base import load
from millpond.ops.bind import Bound
from tests.support.batches import Bench
from tests.support.oracle import CPU, Tiny, random_ids

TOLERANCE = 1e-4  # fp32; transformers' own prefill and decode differ by as much
GRID = 64


def test_a_whole_prompt_gives_the_logits_of_transformers(tiny: Tiny, prompt: list[int]) -> None:
    logits = prefilled(tiny.bench(), prompt, ())
    torch.testing.assert_close(logits, tiny.reference(prompt), atol=TOLERANCE, rtol=0)


def test_the_other_values_of_glm_give_the_logits_of_transformers(
    make_tiny: Callable[[str], Tiny], prompt: list[int]
) -> None:
    """A gate without bound, tied weights, other pools, widths, counts and clamps."""
    tiny = make_tiny("glm_other")
    whole = prefilled(tiny.bench(), prompt, ())
    torch.testing.assert_close(whole, tiny.reference(prompt), atol=TOLERANCE, rtol=0)
    assert torch.equal(prefilled(tiny.bench(), prompt, (64, 128)), whole)


def test_every_chunking_on_the_grid_gives_the_same_bytes(tiny: Tiny, prompt: list[int]) -> None:
    inner = range(GRID, len(prompt), GRID)
    whole = prefilled(tiny.bench(), prompt, ())
    for count in range(1, len(inner) + 1):
        for cuts in combinations(inner, count):
            assert torch.equal(prefilled(tiny.bench(), prompt, cuts), whole), cuts


def test_token_by_token_gives_the_logits_of_transformers(tiny: Tiny, prompt: list[int]) -> None:
    bench = tiny.bench()
    logits = [
        bench.logits(decode=[bench.row(0, i, [token], 0 if i else None, 0)])[0]
        for i, token in enumerate(prompt)
    ]
    torch.testing.assert_close(torch.cat(logits), tiny.reference(prompt), atol=TOLERANCE, rtol=0)


def test_known_tokens_in_per_token_rows_equal_single_steps(tiny: Tiny, prompt: list[int]) -> None:
    """Generated tokens are recomputed many to a row after a preemption: the same bytes."""
    single, many = tiny.bench(), tiny.bench()
    for bench in (single, many):
        bench.hidden([bench.row(0, 0, prompt[:100], None, 0)])
    one_by_one = torch.cat(
        [single.logits(decode=[single.row(0, i, [prompt[i]], 0, 0)])[0] for i in range(100, 140)]
    )
    (at_once,) = many.logits(decode=[many.row(0, 100, prompt[100:140], 0, 0)])
    assert torch.equal(one_by_one, at_once)
    assert torch.equal(single.arenas.slots.storage[0], many.arenas.slots.storage[0])


def test_resuming_from_an_exported_checkpoint_gives_the_same_bytes(
    tiny: Tiny, prompt: list[int]
) -> None:
    bench = tiny.bench()
    exports = [(64, 1), (128, 2), (192, 3)]
    (whole,) = bench.logits([bench.row(0, 0, prompt, None, 0, exports)])
    end_state = bench.arenas.slots.storage[0].clone()
    for end, slot in exports:
        bench.share_pages(0, 1, end)
        kept = bench.arenas.slots.storage[slot].clone()
        (rest,) = bench.logits([bench.row(1, end, prompt[end:], slot, 9)])
        assert torch.equal(rest, whole[end:]), end
        assert torch.equal(bench.arenas.slots.storage[9], end_state), end
        assert torch.equal(bench.arenas.slots.storage[slot], kept), "a state that is read stays"


def test_a_mixed_batch_gives_each_row_what_it_gets_alone(tiny: Tiny) -> None:
    """A cold prompt, a resumed one, and two decoding rows in one forward."""
    texts = [random_ids(n, seed) for n, seed in ((150, 1), (180, 2), (90, 3), (77, 4))]
    alone = [prefilled(tiny.bench(), ids, ()) for ids in texts]
    bench = tiny.bench()
    bench.hidden([bench.row(1, 0, texts[1][:128], None, 1)])
    bench.hidden([bench.row(2, 0, texts[2][:88], None, 2), bench.row(3, 0, texts[3][:76], None, 3)])
    got = bench.logits(
        [
            bench.row(0, 0, texts[0], None, 0, [(64, 5), (128, 6)]),
            bench.row(1, 128, texts[1][128:], 1, 7),
        ],
        [
            bench.row(2, 88, texts[2][88:], 2, 2),  # in place, two known tokens
            bench.row(3, 76, texts[3][76:], 3, 8),
        ],
    )
    assert torch.equal(got[0], alone[0])
    assert torch.equal(got[1], alone[1][128:])
    torch.testing.assert_close(got[2], alone[2][88:], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(got[3], alone[3][76:], atol=TOLERANCE, rtol=0)


def test_greedy_text_equals_transformers_over_200_steps(tiny: Tiny) -> None:
    """One teacher-forced run tells what transformers would have chosen at every step.

    Logits agree within a tolerance: who leads by less than twice that may be second elsewhere.
    """
    bench, ids = tiny.bench(), random_ids(100, 5)
    (logits,) = bench.logits([bench.row(0, 0, ids, None, 0)])
    for _ in range(200):
        ids.append(int(logits[-1].argmax()))
        (logits,) = bench.logits(decode=[bench.row(0, len(ids) - 1, ids[-1:], 0, 0)])
    rated = tiny.reference(ids[:-1])[99:]
    behind = rated.amax(-1) - rated[range(200), ids[100:]]
    assert behind.max() <= 2 * TOLERANCE
    assert (behind == 0).sum() > 190
    assert len(set(ids[100:])) > 10, "the text repeats itself and proves little"


def test_bfloat16_is_no_further_from_fp32_than_transformers(
    tiny: Tiny, prompt: list[int], ops: Bound
) -> None:
    """Mean distance over all logits: routing flips make single ones meaningless."""
    logging.set_verbosity_error()
    model_dir, exact = tiny.description.model_dir, tiny.reference(prompt)
    oracle = type(tiny.oracle).from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        theirs = oracle(input_ids=torch.tensor([prompt])).logits[0].float()
    model = load(tiny.description, ops, dtype=torch.bfloat16, device=CPU)
    ours = prefilled(Bench(model, tiny.description.layout(torch.bfloat16)), prompt, (128,))
    assert (ours - exact).abs().mean() < 2.0 * (theirs - exact).abs().mean()


def test_a_wrong_state_shows_256_tokens_later(tiny: Tiny) -> None:
    """Pages right, recurrent state of another prompt at 128: else no test here sees a state."""
    ids, other = random_ids(400, 6), random_ids(128, 7)
    bench = tiny.bench()
    (right,) = bench.logits([bench.row(0, 0, ids, None, 0, [(128, 1)])])
    bench.hidden([bench.row(2, 0, other, None, 2)])
    for layer in tiny.linear_layers:
        bank = bench.arenas.slots.view(layer, "recurrent")
        bank[1] = bank[2]
    bench.share_pages(0, 1, 128)
    (wrong,) = bench.logits([bench.row(1, 128, ids[128:], 1, 3)])
    late = (wrong - right[128:])[256:].abs().amax()
    assert late > 0.05, "logits do not depend on a state 256 tokens old"
    for layer in tiny.linear_layers:
        bank = bench.arenas.slots.view(layer, "recurrent")
        drift = (bank[3] - bank[0]).abs().amax((1, 2)) / bank[0].abs().amax((1, 2))
        assert (drift[::2] > 0.01).all(), "heads that keep their state have forgotten it"


def test_every_layer_reports_what_it_wrote(tiny: Tiny, prompt: list[int]) -> None:
    bench = tiny.bench()
    bench.hidden([bench.row(1, 0, prompt[:70], None, 1)])
    bench.hidden(
        [bench.row(0, 0, prompt, None, 0, [(64, 5), (192, 6)])],
        [bench.row(1, 70, prompt[70:72], 1, 2)],
    )
    assert bench.last is not None
    prefill, decode = bench.last.prefill.written, bench.last.decode.written
    calls = 2 * len(tiny.linear_layers) + 1  # convolution and delta rule, then the boundary
    assert len(prefill.entries) == len(decode.entries) == calls
    assert prefill.agreed() == {(0, 200), (5, 64), (6, 192)}
    assert decode.agreed() == {(2, 2)}


def prefilled(bench: Bench, ids: list[int], cuts: Sequence[int]) -> torch.Tensor:
    """Logits of every position with the prompt cut at `cuts`, always in place."""
    edges = (0, *cuts, len(ids))
    return torch.cat(
        [
            bench.logits([bench.row(0, a, ids[a:b], 0 if a else None, 0)])[0]
            for a, b in pairwise(edges)
        ]
    )
