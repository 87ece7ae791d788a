"""Kind: rejected or unchecked drafts remain in a state that goes on, or accepted ones do not."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from millpond.config import GenerationConfig, PytorchEngineConfig, SpeculativeConfig
from millpond.engine import drafting
from millpond.engine.request import Sequence
from millpond.evaluate.cases import Dialect
from millpond.front.pipeline import pipeline
from tests.exactness.engines import Ask, House
from tests.exactness.families import FAMILIES
from tests.exactness.prompts import BASE, OTHER
from tests.exactness.test_speculation import ALONG, ASKS, SEEDED, check, verify_rows
from tests.front.conftest import BUNDLED

QUOTES = range(4)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_without_drafts_between_steps_that_accept_several(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts on odd steps only: the next step starts where the accepted ones end."""
    asked = drafting.num_drafts
    turns: dict[str, int] = {}

    def on_odd_steps(sequence: Sequence, known: int, most: int) -> int:
        turns[sequence.name] = turns.get(sequence.name, 0) + 1
        return asked(sequence, known, most) if turns[sequence.name] % 2 else 0

    monkeypatch.setattr(drafting, "num_drafts", on_odd_steps)
    served = check(family, House(num_drafts=3, settings=ALONG), ASKS, lambda: 2)
    rows = verify_rows(served)
    assert any(row.num_drafts == 0 and row.pending == 2 for row in rows)
    assert any(row.num_drafts == 3 and row.pending == 0 for row in rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_cache_under_long_prompts_that_draft_changes_no_text(family: str) -> None:
    """Slots and pages for little more than what runs: what is saved is evicted and used again."""
    dice = random.Random(1)
    params = replace(SEEDED, max_tokens=8)
    prompts = [BASE[:200], OTHER[:200], (*BASE[:130], *OTHER[:60]), BASE[:190], OTHER[:150]]
    asks = [Ask(prompt, params, arrives=2 * i) for i, prompt in enumerate(prompts * 2)]
    house = House(num_drafts=3, num_slots=5, num_pages=13, num_seats=3, settings=ALONG)
    served = check(family, house, asks, lambda: dice.randint(0, 3))
    assert served.stats.checkpoints_evicted > 0
    assert sum(served.cached) > 0


def test_quotations_are_exact_with_drafts() -> None:
    """A healthy acceptance is no evidence; the text is."""
    dialect = Dialect(BUNDLED)
    cases = [dialect.case("copy", seed) for seed in QUOTES]
    config = PytorchEngineConfig(device="cpu", session_len=1024, max_batch_size=4, num_kv_pages=64)
    wish = GenerationConfig(max_new_tokens=64, do_sample=False)
    said = []
    for count in (0, 3):
        drafts = SpeculativeConfig(num_speculative_tokens=count)
        with pipeline(BUNDLED, config, drafts) as pipe:
            answers = [pipe([case.prompt for case in cases], wish) for _ in ("cold", "warm")]
            said += [[dialect.spoken(one.token_ids) for one in both] for both in answers]
            accepted = pipe.stats().accepted_tokens
    assert accepted > 0
    assert said == [said[0]] * 4
    right = [text == case.reply for text, case in zip(said[0], cases, strict=True)]
    assert sum(right) >= len(cases) - 1, "the model itself may slip once"
