"""What a request asks of the sampler; plain numbers, checked by whoever accepts the request."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How tokens of one request are chosen.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off. Penalties as
    in the OpenAI API (`presence_penalty`, `frequency_penalty` over generated tokens) and the usual
    multiplicative `repetition_penalty` over prompt and generated tokens. `seed` is always set by
    the time a request reaches the engine: noise is keyed by (seed, sample index, position, token).
    `logprobs` is the number of alternatives reported per generated token (None: none, not even the
    chosen token's); `prompt_logprobs` likewise for the prompt's tokens.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # end the request; the token is reported but not text
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    @property
    def has_penalties(self) -> bool:
        """Whether the sampler needs counts of earlier tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
