"""A user's wishes to the engine's sampling parameters: defaults filled in, nothing judged."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from millpond.config import GenerationConfig
from millpond.front.text import read_json
from millpond.plan.sampling import SamplingParams

COLDEST = 1e-20
"""Below this a temperature is greedy: logits divided by it would leave the range of fp32."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the model's own `generation_config.json` says about sampling."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of_model(cls, directory: Path) -> Defaults:
        """From a model's directory; what it does not say keeps its default."""
        found: dict[str, float] = {}
        path = directory / "generation_config.json"
        own = read_json(path) if path.is_file() else {}
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            if isinstance(own.get(name), int | float):
                found[name] = float(own[name])
        top_k = own.get("top_k")
        return cls(**found, top_k=top_k if isinstance(top_k, int) else 0)


def to_params(
    wish: GenerationConfig,
    defaults: Defaults,
    *,
    session_len: int,
    vocab_size: int,
    prompt_logprobs: int | None = None,
    fill: bool = False,
) -> SamplingParams:
    """The engine's parameters for one prompt; `fill` lets the answer take all the room there is.

    Nothing is judged here: the engine knows what can be served, and ends an answer where its
    context ends.
    """
    temperature = defaults.temperature if wish.temperature is None else wish.temperature
    if temperature < COLDEST:
        temperature = 0.0
    return SamplingParams(
        max_tokens=session_len if fill else wish.max_new_tokens,
        min_tokens=wish.min_new_tokens or 0,
        temperature=temperature if wish.do_sample else 0.0,
        top_p=defaults.top_p if wish.top_p is None else wish.top_p,
        # More than there are tokens keeps all of them, and may be more than a device can count.
        top_k=min(defaults.top_k if wish.top_k is None else wish.top_k, vocab_size),
        min_p=defaults.min_p if wish.min_p is None else wish.min_p,
        repetition_penalty=(
            defaults.repetition_penalty
            if wish.repetition_penalty is None
            else wish.repetition_penalty
        ),
        presence_penalty=wish.presence_penalty,
        frequency_penalty=wish.frequency_penalty,
        seed=secrets.randbits(63) if wish.random_seed is None else wish.random_seed,
        logit_bias=tuple((wish.logit_bias or {}).items()),
        stop_token_ids=wish.stop_token_ids or (),
        ignore_eos=wish.ignore_eos,
        logprobs=wish.logprobs,
        prompt_logprobs=prompt_logprobs,
        n=wish.n,
    )
