"""Log probabilities do not depend on the batch, nor on how the prompt was cut."""

from __future__ import annotations

import pytest

from millpond.engine.types import EngineRequest, TokenOut
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import TokenLogprob
from tests.exactness.engines import make_engine
from tests.exactness.families import FAMILIES
from tests.exactness.prompts import GREEDY, PROMPTS
from tests.support.recording import Truth

ASKING = SamplingParams(
    max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=2
)
PROMPT = PROMPTS[1]


def scores(
    family: str, max_prefill_tokens: int, neighbours: int
) -> tuple[tuple[TokenLogprob, ...], list[TokenOut]]:
    settings = {"max_prefill_tokens": max_prefill_tokens}
    engine, _ = make_engine(family, Truth(), "scores", settings=settings)
    for number in range(neighbours):
        engine.submit(
            EngineRequest(request_id=f"other {number}", tokens=PROMPTS[number], params=GREEDY)
        )
    stream = engine.submit(EngineRequest(request_id="asking", tokens=PROMPT, params=ASKING))
    while engine.step():
        pass
    prompt: tuple[TokenLogprob, ...] = ()
    drawn: list[TokenOut] = []
    for delta in stream:
        assert delta.error is None
        prompt = delta.prompt_logprobs or prompt
        drawn += delta.tokens
    return prompt, drawn


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_prompt_and_answer_are_equal_alone_cut_and_in_company(family: str) -> None:
    prompt, drawn = scores(family, 512, 0)
    assert [e.position for e in prompt] == list(range(1, len(PROMPT)))
    assert [e.token for e in prompt] == list(PROMPT[1:])
    assert all(len(t.top) == 3 and t.logprob == t.top[0][1] for t in drawn)
    for budget, neighbours in ((64, 0), (128, 3), (512, 4)):
        assert scores(family, budget, neighbours) == (prompt, drawn)
