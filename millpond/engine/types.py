"""What crosses the engine's front door: a request in, a stream of deltas out. Plain data only."""

from __future__ import annotations

import msgspec

from millpond.engine.constraint import Constraint, Reasoning
from millpond.plan.counts import DeviceCounts
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import TokenLogprob


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to be continued. Requests with another `cache_salt` never share a prefix.

    `constraint` is what the answer is written in; `reasoning` tells its thinking from it, where
    that matters: with a constraint, or with a budget.
    """

    request_id: str
    tokens: tuple[int, ...]
    params: SamplingParams
    priority: int = 0  # higher first; equal: older first
    cache_salt: str = ""
    constraint: Constraint | None = None
    reasoning: Reasoning | None = None


class PrefixOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a prompt met the prefix index, in tokens.

    `reason` is one of hit, too_short, alignment, no_checkpoint, evicted, never_seen,
    needs_prompt_logits, disabled. `kind` says which kind of anchor was hit; `held_seconds` how long
    the request was held back for another that computed what they share, `queued_seconds` how long
    it waited for a seat, that included; `loaded_tokens` how many of the cached ones were not on the
    device when it came, but in a store.
    """

    reason: str
    prompt_tokens: int
    cached_tokens: int
    kind: str | None = None
    held_seconds: float = 0.0
    loaded_tokens: int = 0
    queued_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """What the outcome counts for, wherever it is counted: a hit what it spared, others all."""
        return self.cached_tokens if self.reason == "hit" else self.prompt_tokens


class TokenOut(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, array_like=True, omit_defaults=True
):
    """One generated token; log probabilities where asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Delta(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, array_like=True, omit_defaults=True
):
    """What one sample of a request gained since its last delta.

    `finish_reason` is None while it runs, then one of stop, length, abort, error. `stop_token` is
    the stop or end-of-sequence token that ended it (it is also the last of `tokens`); `error` says
    what went wrong, and `param` which field of the request is to blame, if one is. Of `drafted`
    draft tokens that were put to the test for it, `accepted` are among `tokens`. `outcome` and
    `prompt_logprobs` come with the first delta of a request.
    """

    request_id: str
    sample_index: int
    tokens: tuple[TokenOut, ...]
    finish_reason: str | None = None
    stop_token: int | None = None
    error: str | None = None
    param: str | None = None
    drafted: int = 0
    accepted: int = 0
    outcome: PrefixOutcome | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """The store beyond the device: a snapshot; counts since start, rates in bytes per second.

    `breaker` is closed (in use), open (left alone for a while), trying, hung or refused. `jobs` are
    lookups, gets and puts that ended, by `kind_reason`; `sheds` those not begun; `waits` requests
    that waited for the store, by how that ended. `bytes_held` is what the store holds, where known.
    """

    tier: str
    breaker: str
    breaker_trips: int
    jobs: dict[str, int]
    sheds: dict[str, int]
    moved_bytes: dict[str, int]
    get_rate: float
    put_rate: float
    waits: dict[str, int]
    waited_seconds: float
    waiting: int
    hit_tokens: dict[str, int]  # cached prompt tokens, by the tier they came from
    slots_held: int
    pages_held: int
    bytes_held: int | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of counters and gauges, all since start; counts are in the unit of their name."""

    requests_running: int
    requests_waiting: int
    slots_free: int
    slots_running: int
    slots_checkpoint: int
    slots_total: int
    pages_free: int
    pages_used: int
    pages_indexed: int
    pages_total: int
    steps: int
    steps_failed: int
    prompt_tokens: int
    generated_tokens: int
    prefix_tokens: dict[str, int]  # by outcome; hit counts cached tokens, others prompt tokens
    checkpoints_published: dict[str, int]  # by anchor kind
    checkpoints_skipped: dict[str, int]  # by reason
    checkpoints_evicted: int
    preemptions: int
    nonfinite: int
    finished: dict[str, int]  # requests by finish reason
    prefix_hits: dict[str, int] = {}  # requests by the kind of anchor they started from
    prefix_hit_tokens: dict[str, int] = {}  # their cached tokens, likewise
    checkpoint_budget: int = 0  # slots that checkpoints may hold
    requests_held: int = 0  # of those waiting, for another that computes what they share
    holds: dict[str, int] = {}  # holds that ended, by reason
    held_seconds: float = 0.0
    drafts: int = 0  # rows that verified draft tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0  # of them, with what an ending sample had no use for
    steps_ahead: int = 0  # planned while the step before was in flight
    steps_waited: dict[str, int] = {}  # not planned ahead on a device that could, by reason
    rows_wasted: int = 0  # rows of those steps whose sample had ended, or failed, meanwhile
    store: StoreStats | None = None
    device: DeviceCounts | None = None  # of a device tower that counts
    accepted_per_position: tuple[int, ...] = ()  # rows that accepted the first draft, second ...
