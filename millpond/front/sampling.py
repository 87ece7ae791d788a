"""A user's wishes to the engine's sampling parameters: defaults filled in, limits checked."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from millpond.config import GenerationConfig
from millpond.errors import Rejected
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
    prompt_tokens: int,
    session_len: int,
    vocab_size: int,
    max_samples: int,
    prompt_logprobs: int | None = None,
    fill: bool = False,
) -> SamplingParams:
    """The engine's parameters for one prompt; `fill` lets the answer take all the room there is.

    Raises `Rejected` naming the field for what this model or engine cannot do. An answer is never
    longer than the room the prompt leaves in `session_len`.
    """
    room = session_len - prompt_tokens
    if prompt_tokens < 1:
        raise Rejected("the prompt is empty", param="prompt", code="empty_prompt")
    if room < 1:
        raise Rejected(
            f"the prompt has {prompt_tokens} tokens, the longest that can be served has "
            f"{session_len - 1}",
            param="prompt",
            code="context_length_exceeded",
        )
    if wish.response_format not in (None, {"type": "text"}):
        raise Rejected(
            "response_format is not supported yet", param="response_format", code="unsupported"
        )
    if wish.n > max_samples:
        raise Rejected(f"n={wish.n} is more than the {max_samples} that run at once", param="n")
    limit = room if fill else min(room, wish.max_new_tokens)
    least = wish.min_new_tokens or 0
    if least > limit:
        raise Rejected(f"min_tokens={least} is more than the {limit} allowed", param="min_tokens")
    bias = tuple((wish.logit_bias or {}).items())
    for name, ids in (
        ("logit_bias", [i for i, _ in bias]),
        ("stop_token_ids", wish.stop_token_ids),
    ):
        wrong = next((i for i in ids or () if not 0 <= i < vocab_size), None)
        if wrong is not None:
            raise Rejected(f"{name}: {wrong} is not a token (0 to {vocab_size - 1})", param=name)
    temperature = defaults.temperature if wish.temperature is None else wish.temperature
    if temperature < COLDEST:
        temperature = 0.0
    return SamplingParams(
        max_tokens=limit,
        min_tokens=least,
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
        logit_bias=bias,
        stop_token_ids=wish.stop_token_ids or (),
        ignore_eos=wish.ignore_eos,
        logprobs=wish.logprobs,
        prompt_logprobs=prompt_logprobs,
        n=wish.n,
    )
