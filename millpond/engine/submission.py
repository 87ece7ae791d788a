"""What a request must be before anything is allocated for it; refusals name value and limit."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

from millpond.engine.constraint import Reasoning
from millpond.engine.ledger import pages_for
from millpond.engine.settings import EngineSettings
from millpond.engine.types import EngineRequest
from millpond.errors import Rejected
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import PAGE_SIZE, Capabilities

MAX_COUNT = 2**63 - 1
"""What a device can count to; there is no need to ask for more."""

LARGEST_BIAS = 1e6
"""Decides any draw; what is much larger is infinite in fp32, and infinities do not add up."""


def token_limit(settings: EngineSettings, capabilities: Capabilities) -> int:
    """Tokens one sample may hold, prompt included."""
    pool = capabilities.num_pages * PAGE_SIZE
    return min(settings.session_len, capabilities.max_position, pool)


def check(request: EngineRequest, settings: EngineSettings, capabilities: Capabilities) -> None:
    """Raise `Rejected` for a request that can never be served as asked."""
    _check_tokens(request, settings, capabilities)
    _check_params(request.params, settings, capabilities)
    _check_reasoning(request.reasoning, capabilities)
    _check_salt(request.cache_salt)
    needed = pages_for(len(request.tokens))
    copies = request.params.n - 1 if len(request.tokens) % PAGE_SIZE else 0
    if needed + copies > capabilities.num_pages:
        raise Rejected(
            f"a prompt of {len(request.tokens)} tokens with n = {request.params.n} needs"
            f" {needed + copies} pages, the pool has {capabilities.num_pages}: ask for fewer",
            param="n",
        )


def _check_tokens(
    request: EngineRequest, settings: EngineSettings, capabilities: Capabilities
) -> None:
    tokens = request.tokens
    if not tokens:
        raise Rejected("the prompt is empty: at least one token is needed", param="prompt")
    try:
        array("q", tokens)
    except (TypeError, OverflowError) as error:
        raise Rejected(f"the prompt is not a list of token ids: {error}", param="prompt") from None
    vocab = capabilities.vocab_size
    if min(tokens) < 0 or max(tokens) >= vocab:
        raise Rejected(
            f"token id {_outside(tokens, vocab)} is not in the vocabulary, 0 to {vocab - 1}",
            param="prompt",
        )
    if len(tokens) + 1 > token_limit(settings, capabilities):
        raise Rejected(
            f"the prompt of {len(tokens)} tokens leaves no room for an answer:"
            f" {_tightest(settings, capabilities)}; shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )


def _tightest(settings: EngineSettings, capabilities: Capabilities) -> str:
    """The limit that governs the length of a sequence, in words."""
    limits = {
        "session_len allows": settings.session_len,
        "the model allows": capabilities.max_position,
        f"all {capabilities.num_pages} pages hold": capabilities.num_pages * PAGE_SIZE,
    }
    what = min(limits, key=lambda name: limits[name])
    return f"{what} {limits[what]} tokens, prompt and answer together"


def _check_params(
    params: SamplingParams, settings: EngineSettings, capabilities: Capabilities
) -> None:
    _within("n", params.n, 1, settings.max_batch_size)
    _within("max_tokens", params.max_tokens, 1, MAX_COUNT)
    _within("min_tokens", params.min_tokens, 0, params.max_tokens)
    _within("temperature", params.temperature, 0, math.inf)
    _within("top_k", params.top_k, 0, MAX_COUNT)
    _within("min_p", params.min_p, 0, 1)
    _within("presence_penalty", params.presence_penalty, -math.inf, math.inf)
    _within("frequency_penalty", params.frequency_penalty, -math.inf, math.inf)
    for name in ("top_p", "repetition_penalty"):
        value = getattr(params, name)
        _within(name, value, 0, 1 if name == "top_p" else math.inf)
        if value == 0:
            raise Rejected(f"{name} must be more than 0", param=name)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None:
            _within(name, value, 0, capabilities.vocab_size)
    for _, bias in params.logit_bias:
        _within("logit_bias", bias, -LARGEST_BIAS, LARGEST_BIAS)
    for name, ids in (
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("stop_token_ids", params.stop_token_ids),
    ):
        outside = _outside(ids, capabilities.vocab_size)
        if outside is not None:
            raise Rejected(
                f"{name} names token {outside}; ids go from 0 to {capabilities.vocab_size - 1}",
                param=name,
            )


def _check_reasoning(reasoning: Reasoning | None, capabilities: Capabilities) -> None:
    if reasoning is None:
        return
    if reasoning.budget is not None:
        _within("thinking_token_budget", reasoning.budget, 0, MAX_COUNT)
    marks = [reasoning.end_token]
    marks += [reasoning.start_token] if reasoning.start_token is not None else []
    outside = _outside(marks, capabilities.vocab_size)
    if outside is not None:
        raise Rejected(
            f"token {outside}, which is to mark the reasoning, is not in the vocabulary",
            param="reasoning",
        )


def _check_salt(salt: str) -> None:
    try:
        salt.encode()
    except UnicodeEncodeError:
        raise Rejected("cache_salt is not valid Unicode", param="cache_salt") from None


def _within(name: str, value: float, low: float, high: float) -> None:
    """A finite number in `low .. high`; NaN is in no range."""
    if not (low <= value <= high and math.isfinite(value)):
        limits = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        if low == -math.inf:
            limits = "a finite number"
        raise Rejected(f"{name} is {value}; it must be {limits}", param=name)


def _outside(ids: Iterable[int], vocab: int) -> int | None:
    return next((token for token in ids if not 0 <= token < vocab), None)
