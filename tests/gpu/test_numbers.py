"""Whole models on a GPU against the CPU reference of the same weights: numbers, tokens, states.

Every op is the one that serves; matrix products are the library's, which depend on how many rows
there are, so numbers are near and not equal.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from msgspec.structs import replace

from millpond.plan.sampling import SamplingParams
from millpond.plan.step import PAGE_SIZE, PageUpdate, Row, SeatLoad, StepPlan
from millpond.state.lease import PageId, Seat, SlotId
from tests.exactness.engines import Ask, House, Served, serve
from tests.exactness.families import FAMILIES, OTHERS, VOCAB, Kind, executor
from tests.exactness.prompts import BASE, OTHER, PROMPTS
from tests.gpu.kept import Kept, compare
from tests.ops.triton.tolerances import BF16_NOISE, BF16_STATE_NOISE, within
from tests.support.recording import Truth, not_finite

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=VOCAB)
SEVERAL = replace(GREEDY, temperature=1.0, seed=5, n=2)

ASKS = (
    Ask(BASE[:200], GREEDY),
    Ask(OTHER[:118], GREEDY),
    Ask(BASE[:64], SEVERAL),
    Ask(PROMPTS[1], GREEDY, arrives=30),  # 130 tokens are those of the first
    Ask(BASE[:320], GREEDY, arrives=30),
    Ask(BASE[:200], GREEDY, arrives=30),
)
SAVING = {"checkpoint_interval": 64, "decode_checkpoint_interval": 64, "max_prefill_tokens": 256}


PLACES = [
    *(pytest.param(family, "cpu", id=f"{family}-cpu") for family in ("glm", "qwen dense")),
    *(
        pytest.param(
            family, "cuda", marks=[pytest.mark.gpu, pytest.mark.xdist_group(family)],
            id=f"{family}-gpu",
        )
        for family in (*FAMILIES, *OTHERS)
    ),
]  # fmt: skip
everywhere = pytest.mark.parametrize(("family", "device"), PLACES)


def reference(family: str, dtype: torch.dtype = torch.float32) -> Kind:
    return Kind(family, dtype=dtype, backend="torch")


def at(device: str, family: str, dtype: torch.dtype = torch.float32) -> Kind:
    """On the CPU with products in another order than the reference's, so that something differs."""
    return Kind(family, device, dtype, "halved" if device == "cpu" else "own")


@cache
def run(kind: Kind, num_drafts: int) -> tuple[Served, Kept]:
    truth = Kept()
    house = House(num_drafts=num_drafts, num_seats=8, settings=SAVING)
    return serve(kind, house, ASKS, truth, str(kind)), truth


@everywhere
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_in_fp32_tokens_equal_the_references_numbers_and_states_are_near(
    family: str, num_drafts: int, device: str
) -> None:
    found, found_bytes = run(at(device, family), num_drafts)
    expected, expected_bytes = run(reference(family), num_drafts)
    assert found.texts == expected.texts
    assert found.cached == expected.cached == [0, 0, 0, 128, 192, 192]
    assert found.drafts == expected.drafts
    assert found.executor.bytes_beyond == []
    assert found.executor.num_states > 20
    close = within("model", torch.float32)
    for mine, theirs in zip(told(found), told(expected), strict=True):
        torch.testing.assert_close(mine, theirs, **close)
    arenas = found.executor.arenas
    specs = {"state": arenas.slots.spec, "page": arenas.pages.spec}
    near = within("model", "state")
    counts = compare(
        found_bytes,
        expected_bytes,
        specs,
        lambda mine, theirs: torch.testing.assert_close(mine, theirs, **near),
    )
    assert counts["state"] > 20
    assert counts["page"] > 4


def told(served: Served) -> list[torch.Tensor]:
    """Of every sample, the log probabilities of the whole vocabulary at each token [n, V]."""
    tables = []
    for samples in served.told:
        for sample in samples:
            table = torch.full((len(sample), VOCAB), float("nan"))
            for place, token in enumerate(sample):
                ids, values = zip(*token.top, strict=True)
                table[place, list(ids)] = torch.tensor(values)
            tables.append(table)
    return tables


TEXT = BASE[:230] + OTHER[:30]
WHOLE = 192
"""Of the text, what is folded in chunk form; the rest is folded a token at a time."""


@cache
def scored(kind: Kind) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log probabilities of every place of the text [n, V], and the state at its end by tensor."""
    made = executor(kind, Truth(), str(kind), num_slots=2, num_pages=8, num_seats=1)
    params = replace(GREEDY, max_tokens=1)
    seat, slot = Seat(0), SlotId(0)
    load = SeatLoad(
        seat=seat, request="text", sample_index=0, params=params, tokens=TEXT, prompt_len=len(TEXT)
    )
    pages = tuple(PageId(i) for i in range(-(-len(TEXT) // PAGE_SIZE)))
    table = torch.full((len(TEXT) - 1, VOCAB), float("nan"))

    def fold(start: int, end: int, **parts: object) -> None:
        row = Row(
            request="text",
            seat=seat,
            start=start,
            tokens=TEXT[start:end],
            state_in=slot if start else None,
            state_out=slot,
            prompt_logprobs=VOCAB,
            next_token=TEXT[end],
        )
        form = "decode" if start else "prefill"
        plan = StepPlan(step=start, **{form: (row,)}, **parts)
        (scores,) = made.launch(plan).result().prompt_logprobs
        for entry in scores.entries:
            ids, values = zip(*entry.top, strict=True)
            table[entry.position - 1, list(ids)] = torch.tensor(values)

    fold(0, WHOLE, seat_loads=(load,), page_updates=(PageUpdate(seat, 0, pages),))
    for start in range(WHOLE, len(TEXT) - 1):
        fold(start, start + 1)
    slots = made.arenas.slots
    assert not_finite(slots.spec, slots.storage[slot].cpu()) == []
    state = {
        f"{t.name} of layer {t.layer}": slots.view(t.layer, t.name)[slot].float().cpu()
        for t in slots.spec.tensors
    }
    return table, state


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The median of the differences: a token that takes another expert moves a few by a lot."""
    assert found.isfinite().all()
    return float((found - exact).abs().median())


@everywhere
def test_in_bf16_numbers_are_no_further_from_fp32_than_the_references(
    family: str, device: str
) -> None:
    """Rounding to bf16 at every step moves numbers by more than any tolerance worth naming."""
    exact, exact_state = scored(reference(family))
    rounded, rounded_state = scored(reference(family, torch.bfloat16))
    found, found_state = scored(at(device, family, torch.bfloat16))
    for part in (slice(WHOLE - 1), slice(WHOLE - 1, None)):
        noise = distance(rounded[part], exact[part])
        assert distance(found[part], exact[part]) <= BF16_NOISE * noise
        assert noise > 0
    for name, value in exact_state.items():
        noise = distance(rounded_state[name], value)
        assert distance(found_state[name], value) <= BF16_STATE_NOISE * noise, name


COUNTS = {"cpu": (7,), "cuda": (1, 2, 3, 8, 17, 33, 64)}


@cache
def of_batch(kind: Kind, count: int) -> Served:
    """64 requests, so many at once; prompts of all lengths around the first page."""
    params = replace(GREEDY, max_tokens=4)
    asks = [Ask(BASE[i : 2 * i + 33], params) for i in range(64)]
    house = House(
        num_slots=2 * count + 4,
        num_pages=4 * count + 4,
        num_seats=count,
        settings={"prefix_caching": False, "checkpoint_mode": "off", "max_prefill_tokens": 1024},
    )
    return serve(kind, house, asks, Truth(), f"{count} at once")


@everywhere
def test_in_fp32_any_number_of_requests_at_once_gives_the_tokens_of_the_reference(
    family: str, device: str
) -> None:
    """Products depend on how many rows there are: tokens are equal, bytes are not asked for."""
    expected = of_batch(reference(family), 64)
    for count in COUNTS[device]:
        found = of_batch(at(device, family), count)
        assert found.texts == expected.texts
        for mine, theirs in zip(told(found), told(expected), strict=True):
            torch.testing.assert_close(mine, theirs, **within("model", torch.float32))
